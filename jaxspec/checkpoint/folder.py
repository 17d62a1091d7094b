"""A model's folder, whose small files are read once into one record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from jaxspec.checkpoint.files import CheckpointError, given, read_json
from jaxspec.core.checks import from_up_to, shown

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
# Files of `save_orbax`: the network's settings, and a folder of weights.
ORBAX_CONFIG = "network.json"
ORBAX_PARAMS = "params"

Kind = Literal["model", "eagle", "dflash"]
# Entries that only config.json of DFlash heads has, DSpark's among them.
_OF_DFLASH = ("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids")
# Settings that no model has; a head in the speculators format nests those of its layer.
_OF_EAGLE = ("bias", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")
SHARED_TOKENIZER = "shared_tokenizer"
"""Entry of config.json: the shipped model whose tokenizer this one has."""
_PACKAGE = Path(__file__).resolve().parent.parent
_BOOKKEEPING = ("_from_model_config", "transformers_version")


class Folder(NamedTuple):
    """Contents of a folder, as far as they decide what it is and how to load it.

    Attributes:
        path: the folder.
        kind: "model", or the kind of a head that drafts for one: "eagle" (EAGLE-1 to EAGLE-3) or
            "dflash"; `None`: it holds neither.
        config: the contents of config.json; empty without that file.
        generation_defaults: generation_config.json without bookkeeping; empty without that file.
        is_orbax: the weights are Orbax's.
        tokenizer: folder of its tokenizer.json: this one, or that of a shipped model; `None`: it
            has none.
    """

    path: Path
    kind: Kind | None
    config: Mapping[str, Any]
    generation_defaults: Mapping[str, Any]
    is_orbax: bool
    tokenizer: Path | None

    def stop_token_ids(self, of_tokenizer: int | None, vocab_size: int | None) -> tuple[int, ...]:
        """Returns the ids that end a text.

        They are those of generation_config.json, else of config.json, else of the tokenizer. The
        first may list more ids than the others, such as the end of a turn.

        Args:
            of_tokenizer: the id in the tokenizer; `None`: it has none.
            vocab_size: of the network, which is at least the tokenizer's; `None`: unknown.

        Raises:
            CheckpointError: a file lists something else than ids of the vocabulary; it is named.
        """
        name, nested = "eos_token_id", self.config.get("text_config")
        sources = (
            (GENERATION, self.generation_defaults),
            (CONFIG, self.config),
            (f"{CONFIG}: text_config", nested if isinstance(nested, Mapping) else {}),
            (TOKENIZER, {name: of_tokenizer}),
        )
        sources = ((file, entries.get(name)) for file, entries in sources)
        file, found = next((part for part in sources if part[1] is not None), (CONFIG, []))
        token_id = Annotated[int, from_up_to(0, 2**31 if vocab_size is None else vocab_size)]
        ids = given(f"{self.path / file}: {name}", found, tuple[token_id, ...] | token_id)
        return tuple(dict.fromkeys(ids if isinstance(ids, tuple) else (ids,)))


def read_folder(path: Path) -> Folder:
    """Reads the record of a folder, or of a place where there is none.

    Raises:
        CheckpointError: a file is damaged.
    """
    has_config = (path / CONFIG).is_file()
    config = read_json(path / CONFIG) if has_config else {}
    defaults = read_json(path / GENERATION) if (path / GENERATION).is_file() else {}
    is_orbax = (path / ORBAX_CONFIG).is_file() and (path / ORBAX_PARAMS).is_dir()
    return Folder(
        path=path,
        kind=_kind(config) if has_config or is_orbax else None,
        config=config,
        generation_defaults={k: v for k, v in defaults.items() if k not in _BOOKKEEPING},
        is_orbax=is_orbax,
        tokenizer=_tokenizer_of(path, config),
    )


def _tokenizer_of(path: Path, config: Mapping[str, Any]) -> Path | None:
    name = config.get(SHARED_TOKENIZER)
    if (path / TOKENIZER).is_file() or name is None:
        return path if (path / TOKENIZER).is_file() else None
    shared = shipped_folders().get(given(f"{path / CONFIG}: {SHARED_TOKENIZER}", name, str))
    if shared is None or not (shared / TOKENIZER).is_file():
        raise CheckpointError(
            f"{path / CONFIG}: {SHARED_TOKENIZER} must name a shipped model with a tokenizer, got "
            f"{shown(name)}: install the version of jaxspec that the model came with, or put its "
            f"{TOKENIZER} into the folder."
        )
    return shared


def shipped_folders() -> dict[str, Path]:
    """Returns the folders of all that was trained or searched and comes with the package.

    Example:
        >>> from jaxspec.checkpoint import shipped_folders
        >>> (shipped_folders()["demo-skips"] / "skips.json").is_file()
        True
    """
    # Next to the package in the repository, inside it when installed.
    found = {}
    for root in (_PACKAGE.parent / "checkpoints", _PACKAGE / "checkpoints"):
        if root.is_dir():
            found |= {path.name: path for path in sorted(root.iterdir()) if path.is_dir()}
    return found


def _kind(config: Mapping[str, Any]) -> Kind:
    if not config.keys().isdisjoint(_OF_DFLASH):
        return "dflash"
    one_layer = config.get("num_hidden_layers") == 1
    eagle = one_layer and any(name in config for name in _OF_EAGLE)
    return "eagle" if eagle or "transformer_layer_config" in config else "model"
