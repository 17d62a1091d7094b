"""Flags that several commands share, and the objects that they ask for."""

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxspec.checkpoint import Model, load, load_dflash, load_eagle, shipped_folders, shipped_heads
from jaxspec.checkpoint.files import MOST_JSON, read_text
from jaxspec.checkpoint.huggingface import DTYPES
from jaxspec.checkpoint.tokenizer import covers
from jaxspec.commands.flags import add_flags, given, help_texts
from jaxspec.commands.parser import add_place
from jaxspec.core.checks import meant, shown
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
from jaxspec.drafters.block import BlockSettings
from jaxspec.measure.prompts import read_prompts
from jaxspec.models.storage import STORAGES
from jaxspec.sharding import parse_mesh, shard_like
from jaxspec.tuning import LatencyProfile, load_profile, load_threshold, load_tree


def add_model_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declares the target and how to load it."""
    add_place(
        parser,
        "model",
        *("-m", "--model"),
        metavar="MODEL",
        help="folder, shipped name or Hub id",
        kind=_model_name,
        required=required,
    )
    add_loading_arguments(parser)


def _model_name(text: str) -> str:
    if text.endswith((".jsonl", ".jsonl.gz")):
        raise argparse.ArgumentTypeError(f"{text} is a file of prompts, which comes after MODEL.")
    return text


def add_prompts_argument(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declares the file of prompts."""
    add_place(
        parser,
        "prompts",
        *("-p", "--prompts"),
        metavar="PROMPTS.jsonl[.gz]",
        help="a prompt per line",
        kind=Path,
        required=required,
    )


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how to load the target."""
    group = parser.add_argument_group("loading the model")
    group.add_argument(
        "--dtype", choices=tuple(DTYPES), help="type of weights, activations and caches"
    )
    group.add_argument(
        "--weights",
        choices=STORAGES,
        help="form in which matrices are kept; default: --dtype, or as stored",
    )
    group.add_argument(
        "--max-positions", type=int, metavar="N", help="length of the longest text, in tokens"
    )


def load_model(args: argparse.Namespace, mesh: Mesh | None = None) -> Model:
    """Loads the target, as `add_loading_arguments` asks."""
    return load(args.model, args.dtype, args.max_positions, mesh, args.weights)


def note_other_model(profile: LatencyProfile | None, model: Model) -> None:
    """Says so where the times of a profile are those of another model."""
    if profile is not None and profile.model not in ("", model.name):
        print(
            f"NOTE: --profile: its times are those of {profile.model} (weights: "
            f"{profile.quantization}), and the search is for {model.name}.",
            file=sys.stderr,
        )


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


_COMMON = ("max_new_tokens", "temperature")


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a flag for every field of `GenerationConfig`, and the seed."""
    add_flags(parser, GenerationConfig, _COMMON)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)"
    )
    names = {field.name for field in dataclasses.fields(GenerationConfig)} - {*_COMMON}
    group = parser.add_argument_group("decoding")
    add_flags(group, GenerationConfig, names, options=_GENERATION_OPTIONS)


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
        raise argparse.ArgumentTypeError(f"sizes count from 1, got {shown(text)}.")
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
EVERY_DRAFTER = "all"


class DrafterSpec(NamedTuple):
    """A drafter as a command line names it: "lookup" or "lookup:max_ngram=3,match=recent".

    Attributes:
        text: the whole text.
        name: the part before the colon.
        settings: the settings after it.
    """

    text: str
    name: str
    settings: Mapping[str, Any]


def drafter_spec(text: str) -> DrafterSpec | None:
    """Reads NAME or NAME:SETTING=VALUE,...; "none" gives `None`.

    Raises:
        argparse.ArgumentTypeError: the name or a setting is unknown, or not what is needed.

    Example:
        >>> drafter_spec("lookup:max_ngram=3").settings
        {'max_ngram': 3}
    """
    if text == NO_DRAFTER:
        return None
    name, _, rest = text.partition(":")
    if name not in DRAFTERS:
        raise argparse.ArgumentTypeError(f"no drafter is called {name!r:.40}{_drafter_meant(text)}")
    known, settings = settings_of(name), {}
    for part in filter(None, rest.split(",")):
        setting, equals, value = map(str.strip, part.partition("="))
        if not equals:
            raise argparse.ArgumentTypeError(
                f"{name}: expected SETTING=VALUE, got {part!r:.40}; settings are "
                f"{', '.join(known)}."
            )
        if setting not in known:
            asked = meant(setting, known) or f"; it has {', '.join(known)}."
            raise argparse.ArgumentTypeError(f"{name} has no setting {setting!r:.40}{asked}")
        try:
            settings[setting] = known[setting].read(value)
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(
                f"{name}: {setting} must be {known[setting].needed}, got {value!r:.40}."
            ) from None
    return DrafterSpec(text, name, settings)


def _drafter_meant(text: str) -> str:
    """Returns what may have been meant by a text whose name is unknown."""
    name, rest = re.split(r"[^\w-]+|$", text, maxsplit=1)
    if name == EVERY_DRAFTER:
        return "; did you mean jaxspec demo --all, or jaxspec bench --drafter all?"
    for example in (each.example for each in DRAFTERS.values()):
        if example.endswith("=" + name):  # weights that ship
            return f"; did you mean {example}?"
    spelled = "-".join(name.lower().split("_"))
    spelled = {"ngram": "lookup", "n-gram": "lookup"}.get(spelled, spelled)
    asked = meant(spelled, DRAFTERS, lambda found: f"{found}:{rest}" if rest else found)
    return asked or f"; give one of {', '.join((*DRAFTERS, NO_DRAFTER))}."


def drafter_spec_or_all(text: str) -> DrafterSpec | None:
    """Reads what `drafter_spec` reads, or "all": every method that comes with the package."""
    return DrafterSpec(text, text, {}) if text == EVERY_DRAFTER else drafter_spec(text)


def add_drafter_argument(
    parser: argparse.ArgumentParser,
    repeatable: bool = False,
    every: bool = False,
    required: bool = False,
) -> None:
    """Declares `--drafter`.

    Args:
        parser: the parser of a command.
        repeatable: several may be given.
        every: "all" may be given.
        required: one must be given.
    """
    text = "how to draft; `jaxspec drafters` lists names, `jaxspec drafters NAME` settings"
    if every:
        text += f"; {EVERY_DRAFTER}: each method that comes with the package for this model"
    parser.add_argument(
        "--drafter",
        type=drafter_spec_or_all if every else drafter_spec,
        action="append" if repeatable else "store",
        metavar="NAME[:SETTING=VALUE,...]",
        required=required,
        help=f"{text}; repeatable" if repeatable else text,
    )
    parser.set_defaults(instead=_as_drafter)


def _as_drafter(name: str) -> str | None:
    """Returns what to type where a drafter or a setting of one is given as a flag."""
    if name in DRAFTERS:
        return f"--drafter {DRAFTERS[name].example}"
    setting = name.replace("-", "_")
    of = next((each for each in DRAFTERS if setting in settings_of(each)), None)
    return None if of is None else f"--drafter {of}:{setting}=..."


def loaded_drafter_asked(args: argparse.Namespace, model: Model) -> LoadedDrafter:
    """Builds the drafter of `--drafter`, which must have weights.

    Raises:
        ValueError: none is given, or it has no weights; or as `make_drafter` raises.
    """
    made = drafter_asked(args, model)
    if not isinstance(made, LoadedDrafter):
        raise ValueError(
            "--drafter: name one that drafts over a tree: eagle, draft-model, deer or dflash."
        )
    return made


def drafter_asked(args: argparse.Namespace, model: Model) -> DrafterLike | None:
    """Builds the drafter of `--drafter` for `model`; returns `None` without one.

    Raises:
        ValueError: as `make_drafter` raises.
    """
    return None if args.drafter is None else make_drafter(args.drafter, args, model)


def make_drafter(spec: DrafterSpec, args: argparse.Namespace, model: Model) -> DrafterLike:
    """Builds the drafter of a spec for `model`.

    Raises:
        ValueError: a setting is missing or out of range.
    """
    made = DRAFTERS[spec.name].build(args, dict(spec.settings), model)
    if not isinstance(made, LoadedDrafter):
        return made
    # Placed once here, not in each call of `generate`.
    return made._replace(params=shard_like(model.params, made.params))


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
    """Loads the model of the setting `model`."""
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
        raise ValueError(f"corpus={path}: each line must hold a text, not a chat or token ids.")
    return texts


def _union(args: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    of_head = ("head", "tree", "threshold", "any_target")
    head = {name: settings.pop(name) for name in of_head if name in settings}
    own = {name: settings.pop(name) for name in ("min_match",) if name in settings}
    lookup = _suffix(args, settings, model)
    return Union.of(_eagle(args, head, model, "union"), lookup, **own)


def _recycling(_: argparse.Namespace, settings: dict[str, Any], model: Model) -> TokenRecycling:
    tree = settings.get("tree")
    return TokenRecycling() if tree is None else TokenRecycling(load_tree(tree))


def _draft_model(args: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    _read_tree(settings)
    needs = (
        "draft-model:model=MODEL, a smaller model, at best with the same tokenizer (for the "
        "shipped demo: draft-model:model=demo-draft)"
    )
    draft = _loaded(args, settings, "draft-model", needs)
    theirs, ours = draft.tokenizer, model.tokenizer
    if theirs is None or ours is None or covers(theirs, ours):
        return DraftModel.of(draft, **settings)
    made = DraftModel.of(draft, target=model, **settings)
    shared = int(made.params.shared.sum())
    remark(
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
    given = _block_settings(settings, settings.get("model"))
    return Deer.of(_loaded(args, given, "deer", needs), **given)


def _dflash(_: argparse.Namespace, settings: dict[str, Any], model: Model) -> LoadedDrafter:
    shipped = ", ".join(shipped_heads("dflash")) or "there is none"
    needs = f"dflash:head=FOLDER, of a DFlash head, or the name of a shipped one: {shipped}"
    given = _block_settings(settings, settings.get("head"))
    head = load_dflash(_taken(given, "head", "dflash", needs), model.network)
    return DFlash.of(head, **given)


def _block_settings(settings: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """Reads the settings of a drafter of blocks, except the place of its weights, `source`.

    Costs that are not given are those of the profile beside the weights, if there is one.

    Raises:
        ValueError: costs are given without `adaptive=1`, or the profile cannot be read.
    """
    given = dict(settings)
    if "tree" in given:
        given["paths"] = load_tree(given.pop("tree"))
    costs: dict[str, Any] = {name: given.pop(name) for name in _COSTS if name in given}
    if given.pop("adaptive", False):
        if source and (path := _folder(source) / "profile.json").is_file():
            block = given.get("block", BlockSettings.block)
            costs = load_profile(path).block_costs(block) | costs
        given["adaptive"] = AdaptiveBlock(**costs)
    elif costs:
        raise ValueError(f"--drafter: {', '.join(costs)}: needs adaptive=1.")
    return given


def _folder(source: str) -> Path:
    return shipped_folders().get(source, Path(source))


def _yes_or_no(text: str) -> bool:
    return {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}[text]


_READERS: Mapping[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: _yes_or_no,
}
_NEEDED = {int: "a whole number", float: "a number", str: "a text", bool: "1 (yes) or 0 (no)"}


class DrafterSetting(NamedTuple):
    """A setting of a drafter, as `jaxspec drafters NAME` shows it.

    Attributes:
        kind: type of its value.
        default: value without it; `None`: see `meaning`.
        meaning: a sentence.
        choices: the only values; `()` for any.
    """

    kind: type
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def needed(self) -> str:
        """The values that it takes, in words."""
        return " or ".join(self.choices) or _NEEDED[self.kind]

    def read(self, text: str) -> Any:
        """Returns the value that a text gives.

        Raises:
            ValueError: it gives none.
        """
        if self.choices and text not in self.choices:
            raise ValueError(f"must be {self.needed}")
        return _READERS[self.kind](text)


_Build = Callable[[argparse.Namespace, dict[str, Any], Model], DrafterLike]


class DrafterKind(NamedTuple):
    """A drafter that `--drafter` can name.

    Attributes:
        method: class of the drafter; the first line of its docstring says what it does.
        build: builds it from settings, for a model.
        example: a spec.
        others: settings that are no fields: names of `_OTHERS`.
        fields: settings that are fields, by the class that has them.
    """

    method: type
    build: _Build
    example: str
    others: tuple[str, ...]
    fields: Mapping[type, tuple[str, ...]]


_TREE = "file of `jaxspec tune tree` or of rank paths, or a published name; default: "
_OTHERS: Mapping[str, Mapping[str, str]] = {
    "": {
        "model": "needed: the drafting model; a folder, shipped name or Hub id",
        "head": "needed: the head; a folder, shipped name or Hub id",
        "corpus": "file of text, or .jsonl file of texts, to look up",
        "skips": "needed: a result of `jaxspec tune skips`, or the name of a published set",
        "tree": _TREE + "the one beside the head",
        "sep": "token behind the masks, '' for none; default: the one of training",
        "mask": "token of the mask, where config.json names none",
        "any_target": "draft for a target with other weights than the one trained for",
    },
    "draft-model": {"tree": _TREE + "a chain"},
    "recycling": {"tree": _TREE + "one of 5 nodes"},
    "deer": {"tree": _TREE + "a chain"},
    "dflash": {"tree": _TREE + "a chain"},
}
"""Meanings of settings that are no fields, for one drafter or, under "", for all."""
_OF_OTHERS = {"any_target": (bool, False)}
"""Types and defaults of settings that are no fields, and no texts without a default."""
_COSTS = ("draft_cost", "token_cost")
_OF_SUFFIX = {SuffixLookup: ("num_speculative_tokens", "max_ngram")}
_OF_BLOCKS = ("block", "num_nodes", "branch", "temperature", "steps", "adaptive")

# The only place that names drafters.
DRAFTERS: dict[str, DrafterKind] = {
    "lookup": DrafterKind(
        PromptLookup,
        lambda args, settings, model: PromptLookup(**settings),
        "lookup",
        (),
        {PromptLookup: ("num_speculative_tokens", "max_ngram", "match")},
    ),
    "suffix": DrafterKind(
        SuffixLookup, _suffix, "suffix:corpus=texts.jsonl", ("corpus",), _OF_SUFFIX
    ),
    "recycling": DrafterKind(TokenRecycling, _recycling, "recycling", ("tree",), {}),
    "draft-model": DrafterKind(
        DraftModel,
        _draft_model,
        "draft-model:model=demo-draft",
        ("model", "tree"),
        {DraftModel: ("num_speculative_tokens", "threshold")},
    ),
    "eagle": DrafterKind(
        Eagle,
        _eagle,
        "eagle:head=demo-eagle",
        ("head", "tree", "any_target"),
        {Eagle: ("threshold",)},
    ),
    "union": DrafterKind(
        Union,
        _union,
        "union:head=demo-eagle",
        ("head", "tree", "corpus", "any_target"),
        {Eagle: ("threshold",), Union: ("min_match",), **_OF_SUFFIX},
    ),
    "eagle2": DrafterKind(
        Eagle2,
        _eagle2,
        "eagle2:head=demo-eagle",
        ("head", "any_target"),
        {Eagle2: ("depth", "beam", "num_nodes")},
    ),
    "deer": DrafterKind(
        Deer,
        _deer,
        "deer:model=demo-deer",
        ("model", "tree", "sep", "mask", "any_target"),
        {Deer: (*_OF_BLOCKS, "cache"), AdaptiveBlock: _COSTS},
    ),
    "dflash": DrafterKind(
        DFlash,
        _dflash,
        "dflash:head=FOLDER",
        ("head", "tree", "any_target"),
        {DFlash: (*_OF_BLOCKS, "confidence"), AdaptiveBlock: _COSTS},
    ),
    "layer-skip": DrafterKind(
        LayerSkip,
        _layer_skip,
        "layer-skip:skips=demo-skips",
        ("skips",),
        {LayerSkip: ("num_speculative_tokens", "threshold")},
    ),
}


def settings_of(name: str) -> dict[str, DrafterSetting]:
    """Returns the settings of a drafter, from the fields and docstrings of its classes.

    Example:
        >>> settings_of("lookup")["max_ngram"][:3]
        (<class 'int'>, 2, 'longest match to look for')
    """
    kind = DRAFTERS[name]
    meanings = {**_OTHERS[""], **_OTHERS.get(name, {})}
    found = {
        other: DrafterSetting(*_OF_OTHERS.get(other, (str, None)), meanings[other])
        for other in kind.others
    }
    for owner, names in kind.fields.items():
        hints, texts = typing.get_type_hints(owner), help_texts(owner)
        defaults = {field.name: field.default for field in dataclasses.fields(owner)}
        for field in names:
            held = typing.get_args(hints[field]) or (hints[field],)
            choices = tuple(each for each in held if isinstance(each, str))
            # A record is asked for with its defaults.
            plain = next((each for each in held if each in _READERS), str if choices else bool)
            meaning = texts[field].partition(". ")[0]
            found[field] = DrafterSetting(plain, defaults[field], meaning, choices)
    return found


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


def announce(args: argparse.Namespace, **facts: Any) -> None:
    """Prints the settings of a run on standard error, if `--verbose` is given."""
    if args.verbose:
        remark(**facts)


def remark(**facts: Any) -> None:
    """Prints facts on standard error."""
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
