"""Flags that several verbs share, and the objects that they ask for."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxspec.checkpoint import Model, load, load_dflash, load_eagle, shipped_heads
from jaxspec.checkpoint.files import MOST_JSON, read_text
from jaxspec.checkpoint.huggingface import DTYPES
from jaxspec.checkpoint.tokenizer import covers
from jaxspec.commands.flags import add_flags, given
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import (
    PUBLISHED_SKIPS,
    AdaptiveBlock,
    Deer,
    DFlash,
    DrafterLike,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    LoadedDrafter,
    PromptLookup,
    SuffixLookup,
    TokenRecycling,
    Union,
    published_skips,
)
from jaxspec.measure.prompts import read_prompts
from jaxspec.models.storage import STORAGES
from jaxspec.sharding import parse_mesh, shard_like
from jaxspec.tuning import load_threshold, load_tree


def add_model_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declares the target and how to load it."""
    count = None if required else "?"
    parser.add_argument(
        "model", nargs=count, metavar="MODEL", help="folder, shipped name or Hub id"
    )
    add_loading_arguments(parser)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how to load the target."""
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="type of weights, activations and caches"
    )
    parser.add_argument(
        "--weights",
        choices=STORAGES,
        help="form in which matrices are kept; default: --dtype, or as stored",
    )
    parser.add_argument(
        "--max-positions", type=int, metavar="N", help="length of the longest text, in tokens"
    )


def load_model(args: argparse.Namespace, mesh: Mesh | None = None) -> Model:
    """Loads the target, as `add_loading_arguments` asks."""
    return load(args.model, args.dtype, args.max_positions, mesh, args.weights)


def add_mesh_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the devices to divide the work over."""
    parser.add_argument(
        "--mesh",
        metavar="data=N,model=M",
        help="devices to divide rows (data) and the model (model) over; default: one device",
    )


def mesh_asked(args: argparse.Namespace) -> Mesh | None:
    """Returns the mesh of `--mesh`, or `None` without it.

    Raises:
        ValueError: the text is not a mesh, or it does not fit the devices.
    """
    return None if args.mesh is None else parse_mesh(args.mesh)


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a flag for every field of `GenerationConfig`, and the seed."""
    group = parser.add_argument_group("decoding")
    add_flags(group, GenerationConfig, options=_GENERATION_OPTIONS)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)"
    )


def generation_config(args: argparse.Namespace) -> GenerationConfig:
    """Returns the settings asked for; flags left out keep the defaults.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    values = given(args, GenerationConfig)
    for name, kind in (("logit_bias", dict), ("stop", tuple)):
        if name in values:
            values[name] = kind(values[name])
    if "json_schema" in values:
        values["json_schema"] = read_text(values["json_schema"], MOST_JSON)
    return GenerationConfig(**values)


def sizes(text: str) -> tuple[int, ...]:
    """Reads positive numbers, separated by commas.

    Example:
        >>> sizes("1,2,8")
        (1, 2, 8)
    """
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"sizes count from 1, got {text!r}.")
    return numbers


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    return int(token), float(value)


_SWITCH: Mapping[str, Any] = {"action": "store_true"}
_IDS: Mapping[str, Any] = {"type": _token_ids, "metavar": "ID,..."}
_GENERATION_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "allowed_token_ids": _IDS,
    "banned_token_ids": _IDS,
    "stop_token_ids": {
        **_IDS,
        "help": "end a row after any of these; '' for none (default: the model's own)",
    },
    "logit_bias": {"type": _bias, "action": "append", "metavar": "ID=VALUE"},
    "stop": {"action": "append"},
    "choices": {
        "flag": "--choice",
        "action": "append",
        "help": "a text that the output may be; give the flag once for each",
    },
    "regex": {"metavar": "REGEX", "help": "a regular expression that the whole output matches"},
    "json_schema": {"metavar": "FILE", "type": Path, "help": "schema that the output is valid for"},
    "tokenizer_ids_only": _SWITCH,
    "logprobs": _SWITCH,
    "warped_logprobs": _SWITCH,
}


NO_DRAFTER = "none"
OF_DRAFTERS = ("draft_model", "num_speculative_tokens", "max_ngram")
"""Flags that need `--drafter`."""


class DrafterSpec(NamedTuple):
    """A drafter as a command line names it: "lookup" or "lookup:max_ngram=3,match=recent".

    Attributes:
        text: the whole text.
        name: the part before the colon.
        settings: the settings after it, as texts.
    """

    text: str
    name: str
    settings: Mapping[str, str]


def drafter_spec(text: str) -> DrafterSpec | None:
    """Reads NAME or NAME:SETTING=VALUE,...; "none" gives `None`.

    Raises:
        argparse.ArgumentTypeError: the name is unknown, or a part is not SETTING=VALUE.

    Example:
        >>> drafter_spec("lookup:max_ngram=3").settings
        {'max_ngram': '3'}
    """
    if text == NO_DRAFTER:
        return None
    name, _, rest = text.partition(":")
    if name not in DRAFTERS:
        names = ", ".join((NO_DRAFTER, *DRAFTERS))
        raise argparse.ArgumentTypeError(f"must be one of {names}, got {name!r}.")
    settings = {}
    for part in filter(None, rest.split(",")):
        setting, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{name}: expected SETTING=VALUE, got {part!r}.")
        settings[setting.strip()] = value.strip()
    return DrafterSpec(text, name, settings)


EVERY_DRAFTER = "all"


def drafter_spec_or_all(text: str) -> DrafterSpec | None:
    """Reads what `drafter_spec` reads, or "all": every method that comes with the package."""
    return DrafterSpec(text, text, {}) if text == EVERY_DRAFTER else drafter_spec(text)


def add_drafter_arguments(parser: argparse.ArgumentParser, repeatable: bool) -> None:
    """Declares `--drafter` and the settings of drafters."""
    group = parser.add_argument_group("drafting")
    names = f"{', '.join((NO_DRAFTER, *DRAFTERS))}; settings given here override the flags below"
    if repeatable:
        names += f"; {EVERY_DRAFTER}: each method that comes with the package for this model"
    group.add_argument(
        "--drafter",
        type=drafter_spec_or_all if repeatable else drafter_spec,
        action="append" if repeatable else "store",
        metavar="NAME[:SETTING=VALUE,...]",
        help=f"{names}; repeatable" if repeatable else names,
    )
    group.add_argument("--draft-model", metavar="MODEL", help="folder, shipped name or Hub id")
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="length of the longest draft"
    )
    group.add_argument(
        "--max-ngram", type=int, metavar="N", help="length of the longest match of lookup"
    )


def add_drafter_argument(parser: argparse.ArgumentParser) -> None:
    """Declares `--drafter` for a verb that tunes one drafter."""
    parser.add_argument(
        "--drafter",
        type=drafter_spec,
        metavar="NAME[:SETTING=VALUE,...]",
        help="eagle:head=FOLDER, draft-model:model=MODEL, deer:model=MODEL,block=N or "
        "dflash:head=FOLDER,block=N; folders may be shipped names",
    )


def loaded_drafter_asked(args: argparse.Namespace, model: Model) -> LoadedDrafter:
    """Builds the drafter of `--drafter`, which must have weights.

    Raises:
        ValueError: none is given, or it has no weights; or as `make_drafter` raises.
    """
    made = None if args.drafter is None else make_drafter(args.drafter, args, model)
    if not isinstance(made, LoadedDrafter):
        raise ValueError(
            "--drafter: name one that drafts over a tree: eagle, draft-model, deer or dflash."
        )
    return made


def drafter_asked(args: argparse.Namespace, model: Model) -> DrafterLike | None:
    """Builds the drafter of `--drafter` for `model`; returns `None` without one.

    Raises:
        ValueError: a flag is given that this drafter does not read; or as `make_drafter` raises.
    """
    refuse_unread(args, [] if args.drafter is None else [args.drafter])
    return None if args.drafter is None else make_drafter(args.drafter, args, model)


def refuse_unread(args: argparse.Namespace, specs: Sequence[DrafterSpec]) -> None:
    """Refuses flags that none of these drafters reads.

    Raises:
        ValueError: such flags are given; the message names them.
    """
    read = {
        "draft_model" if kind == "model" else kind
        for spec in specs
        if spec.name in DRAFTERS
        for kind in DRAFTERS[spec.name][0]
    }
    names = ", ".join(spec.name for spec in specs)
    why = f"--drafter {names} has no such setting." if specs else "needs --drafter."
    refuse_unused(args, [flag for flag in OF_DRAFTERS if flag not in read], why)


def make_drafter(spec: DrafterSpec, args: argparse.Namespace, model: Model) -> DrafterLike:
    """Builds the drafter of a spec for `model`; flags give the settings that the spec leaves out.

    Raises:
        ValueError: a setting is unknown or out of range.
    """
    _, build = DRAFTERS[spec.name]
    made = build(args, drafter_settings(spec, args), model)
    if not isinstance(made, LoadedDrafter):
        return made
    # Placed once here, not in each call of `generate`.
    return made._replace(params=shard_like(model.params, made.params))


def drafter_settings(spec: DrafterSpec, args: argparse.Namespace) -> dict[str, Any]:
    """Reads the settings of a spec; flags give the settings that the spec leaves out.

    Raises:
        ValueError: a setting is unknown, or is not what is needed.
    """
    flags = {name: getattr(args, name, None) for name in ("num_speculative_tokens", "max_ngram")}
    kinds, _ = DRAFTERS[spec.name]
    unknown = sorted(set(spec.settings) - set(kinds))
    if unknown:
        raise ValueError(
            f"--drafter {spec.text}: {spec.name} has no setting {unknown[0]!r}; "
            f"it has {', '.join(kinds)}."
        )
    settings: dict[str, Any] = {
        name: value for name, value in flags.items() if name in kinds and value is not None
    }
    for name, text in spec.settings.items():
        try:
            settings[name] = kinds[name](text)
        except (KeyError, ValueError):
            needed = _NEEDED[kinds[name]]
            raise ValueError(
                f"--drafter {spec.text}: {name} must be {needed}, got {text!r:.40}."
            ) from None
    return settings


def _taken(settings: dict[str, Any], name: str, drafter: str, needs: str) -> str:
    """Takes the setting that names a drafter's weights out of the others.

    Raises:
        ValueError: it is not given.
    """
    source = settings.pop(name, None)
    if source is None:
        raise ValueError(f"--drafter {drafter} needs {needs}.")
    return source


def _loaded(args: argparse.Namespace, settings: dict[str, Any], drafter: str, needs: str) -> Model:
    """Loads the model of the setting `model`, or of `--draft-model`."""
    settings.setdefault("model", getattr(args, "draft_model", None))
    return load(_taken(settings, "model", drafter, needs), dtype=getattr(args, "dtype", None))


def _suffix(
    _: argparse.Namespace, settings: dict[str, Any], model: Model
) -> SuffixLookup | LoadedDrafter:
    corpus = settings.pop("corpus", None)
    if corpus is None:
        return SuffixLookup(**settings)
    return SuffixLookup.of(_texts_of(corpus), model, **settings)


def _texts_of(path: str) -> list[str]:
    """Reads the texts of a corpus: those of a `.jsonl` or `.jsonl.gz` file, or a file as a whole.

    Raises:
        ValueError: a line of the file holds no text, or as for `checkpoint.files.read_text`.
        OSError: the file cannot be read.
    """
    if not path.endswith((".jsonl", ".jsonl.gz")):
        return [read_text(Path(path))]
    prompts = [row.prompt for row in read_prompts(path)]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ValueError(f"corpus={path}: each line must hold a text, and one holds a chat.")
    return texts


def _union(args: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    head = {name: settings.pop(name) for name in ("head", "tree", "threshold") if name in settings}
    own = {name: settings.pop(name) for name in ("min_match",) if name in settings}
    lookup = _suffix(args, settings, model)
    return Union.of(_eagle(args, head, model, "union"), lookup, **own)


def _recycling(_: argparse.Namespace, settings: dict[str, Any], model: Model) -> TokenRecycling:
    tree = settings.get("tree")
    return TokenRecycling() if tree is None else TokenRecycling(load_tree(tree))


def _draft_model(args: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    _read_tree(settings)
    needs = (
        "--draft-model MODEL or draft-model:model=MODEL, a smaller model, at best with the same "
        "tokenizer (for the shipped demo: demo-draft)"
    )
    draft = _loaded(args, settings, "draft-model", needs)
    theirs, ours = draft.tokenizer, model.tokenizer
    if theirs is None or ours is None or covers(theirs, ours):
        return DraftModel.of(draft, **settings)
    made = DraftModel.of(draft, target=model, **settings)
    shared = int(made.params.shared.sum())
    announce(
        draft_model=f"{draft.name} has another tokenizer, and drafts with the {shared} tokens that "
        f"both have, of {ours.vocab_size}"
    )
    return made


def _eagle(
    _: argparse.Namespace, settings: dict[str, Any], model: Model, drafter: str = "eagle"
) -> LoadedDrafter:
    source = _head(drafter, settings)
    _read_tree(settings)
    return Eagle.of(load_eagle(source, model.network), **settings)


def _read_tree(settings: dict[str, Any]) -> None:
    """Replaces the setting `tree` by what its file holds, unless that is given too."""
    tree = settings.pop("tree", None)
    if tree is not None:
        settings["paths"] = load_tree(tree)
        settings.setdefault("threshold", load_threshold(tree))


def _eagle2(_: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    head = load_eagle(_head("eagle2", settings), model.network)
    return Eagle2.of(head, **settings)


def _head(drafter: str, settings: dict[str, Any]) -> str:
    shipped = ", ".join(shipped_heads()) or "there is none"
    kind = "EAGLE-1 or EAGLE-3 head, or the name of a shipped one"
    return _taken(settings, "head", drafter, f"{drafter}:head=FOLDER, of an {kind}: {shipped}")


def _layer_skip(_: argparse.Namespace, settings: dict[str, Any], model: Model) -> LayerSkip:
    published = f"or a published set: {', '.join(PUBLISHED_SKIPS)}"
    needs = f"layer-skip:skips=FILE, a result of `jaxspec tune skips`, {published}"
    source = _taken(settings, "skips", "layer-skip", needs)
    if source in PUBLISHED_SKIPS:
        return LayerSkip(published_skips(source, model.config.num_layers), **settings)
    return LayerSkip.read(source, **settings)


def _deer(args: argparse.Namespace, settings: dict[str, Any], _: Model) -> LoadedDrafter:
    needs = (
        "deer:model=MODEL, a diffusion model with the target's tokenizer (for the shipped demo: "
        "deer:model=demo-deer)"
    )
    given = _block_settings(settings)
    return Deer.of(_loaded(args, given, "deer", needs), **given)


def _dflash(_: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    shipped = ", ".join(shipped_heads("dflash")) or "there is none"
    needs = f"dflash:head=FOLDER, of a DFlash head, or the name of a shipped one: {shipped}"
    given = _block_settings(settings)
    head = load_dflash(_taken(given, "head", "dflash", needs), model.network)
    return DFlash.of(head, **given)


def _block_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the settings of a drafter of blocks, except the place of its weights.

    Raises:
        ValueError: costs are given without `adaptive=1`.
    """
    given = dict(settings)
    if "tree" in given:
        given["paths"] = load_tree(given.pop("tree"))
    costs = {name: given.pop(name) for name in _COSTS if name in given}
    if given.pop("adaptive", False):
        given["adaptive"] = AdaptiveBlock(**costs)
    elif costs:
        raise ValueError(f"--drafter: {', '.join(costs)}: needs adaptive=1.")
    return given


def _yes_or_no(text: str) -> bool:
    return {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}[text]


_NEEDED: Mapping[Callable[[str], Any], str] = {
    int: "a whole number",
    float: "a number",
    _yes_or_no: "1 (yes) or 0 (no)",
}

_COSTS = ("draft_cost", "token_cost")
_OF_BLOCKS: Mapping[str, Callable[[str], Any]] = {
    "block": int,
    # tree: a file of `tune tree`; num_nodes: nodes of a tree that is built anew in each step.
    "tree": str,
    "num_nodes": int,
    "branch": int,
    "temperature": float,
    "steps": int,
    # 1: draft only as much of a block as pays; costs are in target passes over one token.
    "adaptive": _yes_or_no,
    **dict.fromkeys(_COSTS, float),
}

_OF_SUFFIX: Mapping[str, Callable[[str], Any]] = {
    "num_speculative_tokens": int,
    "max_ngram": int,
    "corpus": str,
}

# The only place that names drafters: the types of their settings, and how they are built.
DRAFTERS: dict[str, tuple[Mapping[str, Callable[[str], Any]], Callable[..., Any]]] = {
    "lookup": (
        {"num_speculative_tokens": int, "max_ngram": int, "match": str},
        lambda args, settings, model: PromptLookup(**settings),
    ),
    # corpus: a file of text, or a .jsonl file of texts.
    "suffix": (_OF_SUFFIX, _suffix),
    # tree: a file of rank paths or a published name, here and below.
    "recycling": ({"tree": str}, _recycling),
    # threshold: of chains that end early.
    "draft-model": (
        {"num_speculative_tokens": int, "model": str, "tree": str, "threshold": float},
        _draft_model,
    ),
    "eagle": ({"head": str, "tree": str, "threshold": float}, _eagle),
    "union": (
        {"head": str, "tree": str, "threshold": float, "min_match": int, **_OF_SUFFIX},
        _union,
    ),
    "eagle2": ({"head": str, "depth": int, "beam": int, "num_nodes": int}, _eagle2),
    "deer": ({"model": str, **_OF_BLOCKS, "sep": str, "mask": str, "cache": str}, _deer),
    "dflash": ({"head": str, **_OF_BLOCKS, "confidence": float}, _dflash),
    "layer-skip": ({"num_speculative_tokens": int, "threshold": float, "skips": str}, _layer_skip),
}


_SPELLED = {"num_drafts": "drafts", "quantization": "quantize"}
"""Flags that are not spelled as their settings."""


def flags_of_names(names: Iterable[str]) -> str:
    """Returns flags as they are typed, for messages.

    Example:
        >>> flags_of_names(["max_new_tokens", "seed"])
        '--max-new-tokens, --seed'
    """
    return ", ".join("--" + _SPELLED.get(name, name).replace("_", "-") for name in names)


def refuse_unused(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuses flags that would be ignored.

    Raises:
        ValueError: one of them is given; the message names it and the reason.
    """
    values = {name: getattr(args, name) for name in names}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{flags_of_names(given)}: {why}")


def announce(**facts: Any) -> None:
    """Prints the settings of a run on standard error."""
    for name, value in facts.items():
        print(f"{name}: {value}", file=sys.stderr)


def check_writable(path: str | Path | None, flag: str = "--json") -> None:
    """Checks a file to write, given by `flag`, before the work and not after it.

    Raises:
        ValueError: its folder does not exist, or the path is a folder.
    """
    if path is None or path == "-":
        return
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"{flag} {path}: must be a file in a folder that exists.")


def write_figures(figures: dict[str, Any], path: str | None) -> None:
    """Writes all figures as JSON to a file, or to standard output for "-"."""
    if path is None:
        return
    text = json.dumps(figures, indent=2)
    if path == "-":
        print(text)
        return
    from jaxspec.batch.writer import write_whole

    place = Path(path).resolve()
    if place.exists() and not place.is_file():  # A pipe or a device.
        place.write_text(text + "\n", encoding="utf-8")
    else:
        write_whole(place, [text.encode() + b"\n"])
    print(f"wrote {path}", file=sys.stderr)
