"""From a name to a model that can be run: a folder, a shipped model or a Hub id, and back."""

import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.card import CARD, model_card
from jaxspec.checkpoint.files import (
    CheckpointError,
    as_path,
    check_whole,
    given,
    replacing_files,
    write_json,
)
from jaxspec.checkpoint.folder import (
    CONFIG,
    GENERATION,
    ORBAX_CONFIG,
    ORBAX_PARAMS,
    Folder,
    Kind,
    read_folder,
    shipped_folders,
)
from jaxspec.checkpoint.huggingface import FILES, load_network, write_network
from jaxspec.checkpoint.orbax import load_orbax, write_orbax
from jaxspec.checkpoint.params import UnreadLeaf
from jaxspec.checkpoint.tokenizer import Tokenizer, load_tokenizer
from jaxspec.core.checks import Count, checked, from_up_to, meant, shown
from jaxspec.core.masks import causal
from jaxspec.core.protocol import check_members, check_sizes
from jaxspec.core.types import LanguageModel, PyTree
from jaxspec.models.config import DynamicScaling, ModelConfig
from jaxspec.models.digest import weights_digest
from jaxspec.models.summary import summary_html, summary_line, weight_facts
from jaxspec.models.transformer import Network
from jaxspec.sharding import mesh_of, on_mesh_of

# Files to fetch from the Hub. Other weight formats, often a second copy, are left alone.
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# Heads were first published as pickles, which their owner converts once.
_HUB_HEAD_FILES = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "tree.json"),
)
_MORE_TEMPLATES = "additional_chat_templates"
# Files that a saved model replaces in its folder, also where it writes none of that name itself.
_REPLACED = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*.safetensors"),
    *("model.safetensors.index.json", ORBAX_CONFIG, ORBAX_PARAMS),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", _MORE_TEMPLATES),
)
_HUB_ID = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII
)


@dataclass(frozen=True, eq=False)
class Model:
    """A network with what is needed to talk to it.

    `load` makes one from files, and `Model.of` from a network of your own.

    Attributes:
        network: weights and the functions that read them: a `Network`, or what was given to `of`.
        tokenizer: `None` if the folder has no tokenizer.json; then only token ids go in and out.
        name: what it was loaded as.
        stop_token_ids: ids that end a text.
        generation_defaults: generation_config.json as published. `generate` takes its penalties
            where settings leave them open, and nothing else.
        own_max_positions: longest text of a network of your own, in tokens; `None`: what the
            network's config says.

    Example:
        >>> model = load("demo", weights="float32")
        >>> model  # doctest: +NORMALIZE_WHITESPACE
        Model(name: demo, layers: 12, weights: 11.6 M, dtype: float32, memory: 46.6 MB,
              vocabulary: 4096)
        >>> model.config.num_layers, model.vocab_size
        (12, 4096)
    """

    network: Network
    tokenizer: Tokenizer | None = None
    name: str = "model"
    stop_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    own_max_positions: int | None = None

    @classmethod
    def of(
        cls,
        network: LanguageModel,
        tokenizer: Tokenizer | None = None,
        *,
        max_positions: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        name: str | None = None,
    ) -> "Model":
        """Returns a model around any network that satisfies `jaxspec.core.types.LanguageModel`.

        `generate`, `stream`, `score`, `compare` and `check_drafter` take it, with every drafter
        that reads only text, features and a draft model. `check_model` tests what the network
        computes; here its members and shapes are checked, and nothing is compiled.

        Args:
            network: a pytree of arrays on one device, with static settings. It is causal: the
                features of a token score the token after it.
            tokenizer: `None`: only token ids go in and out.
            max_positions: longest text, in tokens; `None`: the network's `max_positions`, or that
                of its `config`.
            stop_token_ids: ids that end a text; `None`: the tokenizer's end of text, if any.
            name: for messages and reports; `None`: the name of the network's class.

        Raises:
            ValueError: a member of the protocol is missing or gives wrong shapes, or an argument
                does not fit the network. The message names the member or the argument.

        Example:
            >>> model = Model.of(load("demo-draft").network, name="mine")
            >>> model.name, model.tokenizer, model.max_positions
            ('mine', None, 1024)
        """
        if isinstance(network, Model):
            raise ValueError("network: got a Model; give its network.")
        check_members(network)
        check_sizes(network)
        if mesh_of(network) is not None:
            raise ValueError(
                "network: its weights lie on a mesh, over which only models of `load` are divided; "
                "put them on one device."
            )
        if not isinstance(tokenizer, Tokenizer | None):
            raise ValueError(
                f"tokenizer must be a jaxspec.Tokenizer, got {type(tokenizer).__name__}; give "
                "jaxspec.checkpoint.load_tokenizer(folder), or jaxspec.Tokenizer(backend) around "
                "one of the package tokenizers, such as `backend_tokenizer` of transformers'."
            )
        if tokenizer is not None and tokenizer.vocab_size > network.vocab_size:
            raise ValueError(
                f"tokenizer: it knows {tokenizer.vocab_size} ids, and the network only "
                f"{network.vocab_size}; give the tokenizer of this network."
            )
        if stop_token_ids is None:
            end = None if tokenizer is None else tokenizer.eos_id
            stop_token_ids = () if end is None else (end,)
        token_id = Annotated[int, from_up_to(0, network.vocab_size)]
        ids = checked("stop_token_ids", stop_token_ids, tuple[token_id, ...])
        name = checked("name", name, str | None)
        kept: Any = network
        return cls(
            kept,
            tokenizer,
            type(network).__name__ if name is None else name,
            ids,
            own_max_positions=_positions_of(network, max_positions),
        )

    def _facts(self) -> dict[str, str]:
        own = {"network": type(self.network).__name__}
        layers = own if self.is_own else {"layers": f"{self.network.num_layers}"}
        sizes = {**weight_facts(self.params), "vocabulary": f"{self.vocab_size}"}
        return {"name": self.name, **layers, **sizes}

    def __repr__(self) -> str:
        return summary_line(self, self._facts())

    def _repr_html_(self) -> str:
        return summary_html(self, self._facts())

    def push_to_hub(self, repo_id: str, dtype: Any = None, private: bool | None = None) -> str:
        """Uploads what `save` writes to the Hugging Face Hub, and returns the address.

        As with `save`, files of another model that the repository has go, and its README.md stays.

        Args:
            repo_id: "owner/name" of a repository, made if there is none.
            dtype: see `save`.
            private: of a repository that is made; `None`: what its owner's settings say.

        Raises:
            CheckpointError: `repo_id` is no such name, or the Hub refuses or cannot be reached; or
                as `save` raises.
            ValueError: the network is one of your own (`Model.of`).
        """
        repo_id = given("repo_id", repo_id, str)
        if not _HUB_ID.fullmatch(repo_id):
            raise CheckpointError(f"repo_id must be owner/name, got {shown(repo_id)}.")
        private = given("private", private, bool | None)
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        with tempfile.TemporaryDirectory() as folder:
            save(self, folder, dtype)
            try:
                address = huggingface_hub.create_repo(repo_id, private=private, exist_ok=True)
                kept = [CARD] if huggingface_hub.file_exists(repo_id, CARD) else []
                huggingface_hub.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    ignore_patterns=kept,
                    delete_patterns=[*_REPLACED, f"{_MORE_TEMPLATES}/*"],
                )
            except (HfHubHTTPError, LocalTokenNotFoundError) as error:
                raise CheckpointError(
                    f"{repo_id} cannot be written to on the Hugging Face Hub ({error}): log in, "
                    "with `hf auth login`, as somebody who may write there."
                ) from error
            # Releases of that library differ in the one that they connect with.
            except (*HfHubHTTPError.__bases__, OSError) as error:
                raise CheckpointError(
                    f"The Hugging Face Hub cannot be reached to write {repo_id} "
                    f"({type(error).__name__}): connect to the network, and try again."
                ) from error
        return str(address)

    @property
    def is_own(self) -> bool:
        """True if the network is one of your own, given to `of`, and no `Network`."""
        return not isinstance(self.network, Network)

    @property
    def is_in_files(self) -> bool:
        """True if its weights were left in their files, by `load(..., weights="files")`."""
        return any(isinstance(leaf, UnreadLeaf) for leaf in jax.tree.leaves(self.params))

    @property
    def known_network(self) -> Network:
        """The network, for work that reads its weights or settings by name.

        Raises:
            ValueError: it is one of your own.
        """
        if self.is_own:
            raise ValueError(
                f"model: {self.name} is a network of your own ({type(self.network).__name__}), "
                "which only generate, stream, score, compare, check_drafter and check_model take; "
                "use a model of `load` here."
            )
        return self.network

    @property
    def config(self) -> ModelConfig:
        """Settings of the network.

        Raises:
            ValueError: it is one of your own, which has none.
        """
        return self.known_network.config

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        if self.own_max_positions is not None:
            return self.own_max_positions
        return _positions_of(self.network, None)

    @property
    def is_diffusion(self) -> bool:
        """True if it fills in masks. A network of your own counts as causal."""
        return not self.is_own and self.config.diffusion is not None

    @property
    def dtype(self) -> Any:
        """Dtype of activations and caches; of a network of your own, that of its keys."""
        if not self.is_own:
            return self.network.dtype
        cache = jax.eval_shape(lambda network: network.empty_cache(1), self.network)
        return cache.layers[0].keys.dtype

    @cached_property
    def digest(self) -> str | None:
        """Digest of its weights, by which a drafter knows its target, see `models.digest`.

        `None` for a network of your own, and where the form of the weights allows none.
        """
        return None if self.is_own else weights_digest(self.params)

    @property
    def params(self) -> PyTree:
        """Weights; of a network of your own, the whole of it."""
        return self.network if self.is_own else self.network.params

    @property
    def forward(self):
        """One pass over the tokens of one row; see `Network.forward`."""
        return self.network.forward

    @property
    def vocab_size(self) -> int:
        """Size of the network's vocabulary. It may be padded beyond the tokenizer's."""
        return self.network.vocab_size


def check_is_model(given: Any, name: str = "model") -> None:
    """Refuses what is no `Model`, and says what makes one, and a model that only `export` takes.

    Raises:
        ValueError: naming the argument.

    Example:
        >>> check_is_model("demo")
        Traceback (most recent call last):
        ...
        ValueError: model must be a Model, got str; give jaxspec.load('demo').
    """
    if isinstance(given, Model):
        if given.is_in_files:
            raise ValueError(
                f"{name}: the weights of {given.name} were left in their files, for exports; load "
                f"it without weights={FILES!r}."
            )
        return
    makes = "a model of jaxspec.load, or jaxspec.Model.of(network)"
    if isinstance(given, str | Path):
        makes = f"jaxspec.load({str(given)!r})"
    raise ValueError(f"{name} must be a Model, got {type(given).__name__}; give {makes}.")


def _positions_of(network: Any, asked: int | None) -> int:
    """Returns the longest text of a network for `Model.of`."""
    asked = checked("max_positions", asked, Count | None)
    config = getattr(network, "config", None)
    found: Any = getattr(network, "max_positions", getattr(config, "max_positions", None))
    says = int(found) if isinstance(found, int | np.integer) and found >= 1 else None
    if asked is None:
        if says is not None:
            return says
        raise ValueError(
            f"max_positions: {type(network).__name__} does not say how long its texts may be; give "
            "max_positions=, in tokens."
        )
    if says is not None and asked > says:
        raise ValueError(
            f"max_positions must be at most the network's {says}, got "
            f"{asked}; `load` takes more where a RoPE scaling allows it."
        )
    return asked


def load(
    path_or_hub_id: str | Path,
    dtype: Any = None,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
    weights: str | None = None,
    revision: str | None = None,
    check: bool = False,
) -> Model:
    """Loads a model.

    Args:
        path_or_hub_id: a folder in the Hugging Face layout or written by `save_orbax`; the name of
            a model shipped with this package, such as "demo"; or the "owner/name" of a model on
            the Hugging Face Hub, which is downloaded once if it is not on this machine yet.
        dtype: of weights, activations and caches: "float32", "bfloat16" or "float16"; `None`:
            float32 on CPUs, which do not compute in 16 bits, and as stored on accelerators.
        max_positions: longest text, in tokens, to prepare for; `None`: what the model says of
            itself. For models with two LongRoPE tables, `None` is the length up to which the
            short one is used. More than the trained length is allowed only as far as a RoPE
            scaling in the model's config stretches it. Past it, a dynamic scaling gives other
            outputs than `transformers` gives for prompts; a warning says so.
        mesh: devices to divide the model and its rows over, from `jaxspec.sharding.make_mesh`; each
            tensor goes straight to its shards. `None`: one device.
        weights: the form in which matrices are kept: "float32", "bfloat16" or "int8" (rounded, one
            scale for each output channel). They are multiplied as numbers of `dtype`. `None`: of
            `dtype`; but where native code runs and `dtype` is `None` too, matrices that are stored
            in bfloat16 stay that, which gives the same results from half the memory. "files": they
            stay in the folder's files, and only `jaxspec.mobile.export`, which reads them one at a
            time, and the loaders of heads take such a model. An Orbax folder is read nevertheless.
        revision: a branch, tag or commit on the Hub; `None`: the newest of its main branch.
        check: run a pass over a few tokens, and refuse weights whose logits are not finite.

    Raises:
        ValueError: the mesh does not divide the model, `dtype` is none that weights can have, or
            `weights` is unknown or wider than `dtype`, or "files" with a mesh or `check`.
        CheckpointError: nothing is there under this name, or it cannot be read, or it is too large
            for the memory, `max_positions` is out of range, there is no such revision, or an
            argument is of another type. The message says what was found and what to do.

    Example:
        >>> model = load("demo")
        >>> model.tokenizer.decode(model.tokenizer.encode("Two and two"))
        'Two and two'
    """
    max_positions = given("max_positions", max_positions, Count | None)
    mesh, check = given("mesh", mesh, Mesh | None), given("check", check, bool)
    if weights == FILES and (check or mesh is not None):
        raise ValueError(f"{'check' if check else 'mesh'}: weights={FILES!r} reads no weights.")
    folder = _find("path_or_hub_id", path_or_hub_id, revision)
    if folder.kind in _HEADS:
        name, loader = _HEADS[folder.kind]
        raise CheckpointError(
            f"{path_or_hub_id} is {name} head, which drafts for a model: load that, then "
            f"jaxspec.{loader}({str(path_or_hub_id)!r}, model), or on the command line --drafter "
            f"{folder.kind}:head={path_or_hub_id}."
        )
    if folder.is_orbax:
        form = None if weights == FILES else weights
        network = load_orbax(folder.path, dtype, max_positions, mesh, form)
    else:
        network = load_network(folder.path, dtype, max_positions, mesh, folder.config, weights)
    scaling = network.config.rope.scaling
    if isinstance(scaling, DynamicScaling) and scaling.original_max_positions < (
        network.config.max_positions
    ):
        warnings.warn(
            f"{path_or_hub_id}: its RoPE scaling is dynamic. For prompts of more than "
            f"{scaling.original_max_positions} tokens outputs differ from those of transformers, "
            "which rotates every token by the length of the whole prompt; here each is rotated by "
            "its own position.",
            stacklevel=2,
        )
    if check:
        _check_finite(network, path_or_hub_id)
    tokenizer = load_tokenizer(folder.path) if folder.tokenizer else None
    return Model(
        network,
        tokenizer,
        name=str(path_or_hub_id),
        stop_token_ids=folder.stop_token_ids(
            None if tokenizer is None else tokenizer.eos_id, network.vocab_size
        ),
        generation_defaults=folder.generation_defaults,
    )


def _check_finite(network: Network, name: str | Path) -> None:
    tokens = jnp.arange(min(8, network.vocab_size, network.config.max_positions))
    with on_mesh_of(network):
        features = network.forward(tokens, tokens, causal(len(tokens)), None).features
        finite = bool(jnp.isfinite(network.unembed(features)).all())
    if not finite:
        raise CheckpointError(
            f"{name}: a first pass gives logits that are not finite, so its weights are damaged, "
            'too large for this dtype (try dtype="float32"), or not those of its config.json.'
        )


def save(model: Model, folder: str | Path, dtype: Any = None) -> None:
    """Writes a model in the Hugging Face layout, for this and other libraries to load.

    If it fails or is interrupted, the folder is left as it was. If the process is killed, what the
    folder held is still there: where files had been moved already, `load` says so, and the next
    save or `recover_files` puts them back. Files of the folder that belong to no model stay. A
    folder without README.md gets one: a model card for its author to complete.

    Args:
        model: what to write.
        folder: where; made if it does not exist.
        dtype: to store the weights in; `None`: the one they have.

    Raises:
        CheckpointError: no Hugging Face family describes the network, or `folder` can be no path.
        ValueError: the network is one of your own (`Model.of`), or `dtype` is none that weights can
            have.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(load("demo"), folder)
        ...     load(folder).vocab_size
        4096
    """
    check_is_model(model)
    network, folder = model.known_network, as_path("folder", folder)
    with replacing_files(folder, _REPLACED) as staging:
        write_network(network, staging, dtype, _token_ids(model))
        _write_companions(model, staging)
        if not (folder / CARD).exists():
            (staging / CARD).write_text(model_card(model), encoding="utf-8")


def save_orbax(model: Model, folder: str | Path) -> None:
    """Writes a model as an Orbax folder: any `Network`, its dtype as it is. As safe as `save`.

    Raises:
        CheckpointError: `folder` can be no path.
        ValueError: the network is one of your own (`Model.of`).

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_orbax(load("demo-draft"), folder)
        ...     load(folder).vocab_size
        4096
    """
    check_is_model(model)
    network = model.known_network
    with replacing_files(as_path("folder", folder), _REPLACED) as staging:
        write_orbax(network, staging)
        _write_companions(model, staging)


def shipped_models() -> dict[str, Path]:
    """Returns the folders of the models that come with the package, by name.

    Example:
        >>> from jaxspec.checkpoint import shipped_models
        >>> "demo" in shipped_models(), "demo-eagle" in shipped_models()
        (True, False)
    """
    return _shipped("model")


def shipped_heads(kind: Literal["eagle", "dflash"] = "eagle") -> dict[str, Path]:
    """Returns the folders of the heads of one kind that come with the package, by name.

    Example:
        >>> from jaxspec.checkpoint import shipped_heads
        >>> sorted(shipped_heads())
        ['demo-eagle', 'demo-eagle3']
    """
    return _shipped(kind)


def _shipped(kind: Kind) -> dict[str, Path]:
    folders = shipped_folders().items()
    return {name: path for name, path in folders if read_folder(path).kind == kind}


def find_model(source: str | Path) -> Path:
    """Finds the folder of a model: on this machine, shipped under this name, or from the Hub.

    Raises:
        CheckpointError: there is none, or it cannot be downloaded.

    Example:
        >>> from jaxspec.checkpoint import find_model
        >>> find_model("demo").name
        'demo'
    """
    folder = as_path("source", source)
    return folder if folder.is_dir() else _find("source", source, None).path


def find_head(
    source: str | Path,
    kind: Literal["eagle", "dflash"] = "eagle",
    revision: str | None = None,
) -> Path:
    """Finds the folder of a head: on this machine, shipped under this name, or from the Hub.

    `kind` is that of `shipped_heads`, and `revision` that of `load`.

    Raises:
        CheckpointError: there is none, it cannot be downloaded, or there is no such kind.

    Example:
        >>> from jaxspec.checkpoint import find_head
        >>> find_head("demo-eagle").name
        'demo-eagle'
    """
    folder = as_path("source", source)
    _check_revision(source, folder, revision)
    shipped = shipped_heads(given("kind", kind, Literal["eagle", "dflash"]))
    if not folder.is_dir() and str(source) in shipped:
        return shipped[str(source)]
    if folder.exists():
        return folder
    return _download(source, "head", shipped, _HUB_HEAD_FILES, revision)


# Names of the kinds of heads, and the functions that load them.
_HEADS: dict[Kind | None, tuple[str, str]] = {
    "eagle": ("an EAGLE", "load_eagle"),
    "dflash": ("a DFlash", "checkpoint.load_dflash"),
}


def _check_revision(source: str | Path, folder: Path, revision: str | None) -> None:
    """Refuses a revision of what lies on this machine."""
    revision = given("revision", revision, str | None)
    if revision is not None and (folder.exists() or str(source) in shipped_folders()):
        raise CheckpointError(
            f"revision: got {shown(revision)}, but {source} lies on this machine, where it has no "
            "revisions; leave it out, or give the owner/name of a repository on the Hub."
        )


def _find(argument: str, source: str | Path, revision: str | None) -> Folder:
    folder, name = as_path(argument, source), str(source)
    _check_revision(source, folder, revision)
    check_whole(folder)
    found = read_folder(folder)
    if found.kind is not None:
        return found
    known = {path.name: read_folder(path) for path in shipped_folders().values()}
    if name in known and known[name].kind is not None:
        return known[name]
    shipped = [name for name, found in known.items() if found.kind == "model"]
    for path in (folder, *folder.glob("*.tflite")):
        if path.suffix == ".tflite" and path.is_file():
            raise CheckpointError(
                f"{path} is a file for LiteRT; decode with it by jaxspec.mobile.MobileModel, or "
                f"`jaxspec generate --runtime litert {path} PROMPT`."
            )
    if folder.is_dir():
        entries = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{folder} holds no model: expected {CONFIG} with safetensors, or {ORBAX_CONFIG} with "
            f"{ORBAX_PARAMS}; found {entries}."
        )
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the folder that it lies in.")
    return read_folder(_download(source, "model", shipped, _HUB_FILES, revision))


def _download(
    hub_id: str | Path,
    kind: str,
    shipped: Iterable[str],
    files: tuple[str, ...],
    revision: str | None,
) -> Path:
    """Fetches the files of a model or a head that is not on this machine."""
    if not isinstance(hub_id, str) or not _HUB_ID.fullmatch(hub_id):
        shipped = list(shipped)
        asked = meant(str(hub_id), shipped)
        raise CheckpointError(
            f"There is no folder {shown(str(hub_id))}, nor a shipped {kind} of that name (shipped: "
            f"{', '.join(shipped) or 'none'}){asked or '.'} {kind.capitalize()}s on the Hugging "
            "Face Hub are called owner/name."
        )
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=list(files))
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id} asks for consent: accept its terms on huggingface.co/{hub_id} and log in "
            "with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"There is no folder {hub_id!r} here, and no model of that name on the Hugging Face "
            "Hub, or it is private: check the spelling, or log in with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"revision: {hub_id} has no branch, tag or commit {revision!r}; "
            f"huggingface.co/{hub_id}/tree/main lists them."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"There is no folder {hub_id!r} here, it was not downloaded before, and the Hugging "
            f"Face Hub cannot be reached ({type(error).__name__}): connect to the network once, or "
            "give the path of a folder."
        ) from error


def _token_ids(model: Model) -> dict[str, Any]:
    tokenizer, stops = model.tokenizer, list(model.stop_token_ids)
    ids = {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": None if not stops else stops[0] if len(stops) == 1 else stops,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_id,
    }
    published = {
        name: model.generation_defaults.get(name) for name in ids if name != "eos_token_id"
    }
    return ids | {name: value for name, value in published.items() if value is not None}


def _write_companions(model: Model, folder: Path) -> None:
    write_json(folder / GENERATION, {**model.generation_defaults, **_token_ids(model)})
    if model.tokenizer is not None:
        model.tokenizer.write(folder)
