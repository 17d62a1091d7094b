"""Flags that several verbs share, and what they stand for."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxspec.checkpoint import Model, load, load_dflash, load_eagle, shipped_heads
from jaxspec.core.types import Drafter
from jaxspec.drafters import (
    PUBLISHED_SKIPS,
    AdaptiveBlock,
    Deer,
    DFlash,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    LoadedDrafter,
    PromptLookup,
    published_skips,
)
from jaxspec.generation import GenerationConfig
from jaxspec.sharding import beside, parse_mesh
from jaxspec.trees import load_tree, tree_of_head


def add_model_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declares which target to load and how."""
    count = None if required else "?"
    parser.add_argument(
        "model", nargs=count, metavar="MODEL", help="folder, shipped name or Hub id"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights")
    parser.add_argument("--max-positions", type=int, metavar="N", help="longest text, in tokens")


def load_model(args: argparse.Namespace, mesh: Mesh | None = None) -> Model:
    return load(args.model, dtype=args.dtype, max_positions=args.max_positions, mesh=mesh)


def add_mesh_argument(parser: argparse.ArgumentParser) -> None:
    """Declares which devices to divide the work over."""
    parser.add_argument(
        "--mesh",
        metavar="data=N,model=M",
        help="devices to divide rows (data) and the model (model) over; default: one device",
    )


def mesh_asked(args: argparse.Namespace) -> Mesh | None:
    """The mesh of `--mesh`, if it is given.

    Raises:
        ValueError: it cannot be read, or does not divide the devices.
    """
    return None if args.mesh is None else parse_mesh(args.mesh)


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every field of `GenerationConfig`, and the seed."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 128")
    group.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default)")
    group.add_argument("--top-k", type=int, metavar="K", help="0: off")
    group.add_argument("--top-p", type=float, metavar="P", help="1: off")
    group.add_argument("--min-p", type=float, metavar="P", help="0: off")
    group.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=VALUE", help="repeatable"
    )
    for flag, meaning in (
        ("--allowed-token-ids", "emit nothing else"),
        ("--banned-token-ids", "never emit these"),
        ("--stop-token-ids", "end after any of these; '' for none (default: the model's own)"),
    ):
        group.add_argument(flag, type=_token_ids, metavar="ID,...", help=meaning)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before it; repeatable")
    group.add_argument("--num-samples", type=int, metavar="N", help="continuations per prompt")
    for flag, meaning in (
        ("--logprobs", "record the target's log-probabilities (see --json)"),
        ("--warped-logprobs", "the same after temperature and filters"),
    ):
        group.add_argument(flag, action="store_true", default=None, help=meaning)
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="1 overrides the model's own"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N")


def generation_config(args: argparse.Namespace) -> GenerationConfig:
    """The settings asked for; flags left out keep the defaults.

    Raises:
        ValueError: naming the setting that is out of range.
    """
    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return GenerationConfig(**given)


def sizes(text: str) -> tuple[int, ...]:
    """Reads N,...: positive numbers."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"sizes count from 1, got {text!r}.")
    return numbers


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    return int(token), float(value)


NO_DRAFTER = "none"
OF_DRAFTERS = ("draft_model", "num_speculative_tokens", "max_ngram")
"""Flags that `--drafter` gives a meaning."""


class DrafterSpec(NamedTuple):
    """A drafter as a command line names it: "lookup" or "lookup:max_ngram=3,match=recent"."""

    text: str
    name: str
    settings: Mapping[str, str]


def drafter_spec(text: str) -> DrafterSpec | None:
    """Reads NAME or NAME:SETTING=VALUE,...; "none" is `None`.

    Raises:
        argparse.ArgumentTypeError: for an unknown name or something else than SETTING=VALUE.
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
    """`drafter_spec`, or "all" for every method that comes with the package."""
    return DrafterSpec(text, text, {}) if text == EVERY_DRAFTER else drafter_spec(text)


def add_drafter_arguments(parser: argparse.ArgumentParser, repeatable: bool) -> None:
    """Declares `--drafter` and the settings of drafters."""
    group = parser.add_argument_group("drafting")
    names = f"{', '.join((NO_DRAFTER, *DRAFTERS))}; settings given here precede the flags below"
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
    group.add_argument("--num-speculative-tokens", type=int, metavar="N", help="longest draft")
    group.add_argument("--max-ngram", type=int, metavar="N", help="longest match of lookup")


def drafter_asked(args: argparse.Namespace, model: Model) -> Drafter | LoadedDrafter | None:
    """The drafter of `--drafter`, to draft for `model`; `None` if none is asked for.

    Raises:
        ValueError: for flags of drafters that this one does not read; or as `make_drafter` does.
    """
    refuse_unread(args, [] if args.drafter is None else [args.drafter])
    return None if args.drafter is None else make_drafter(args.drafter, args, model)


def refuse_unread(args: argparse.Namespace, specs: Sequence[DrafterSpec]) -> None:
    """Refuses flags of drafters that none of those asked for reads.

    Raises:
        ValueError: naming the flags.
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


def make_drafter(
    spec: DrafterSpec, args: argparse.Namespace, model: Model
) -> Drafter | LoadedDrafter:
    """Builds what a spec asks for, to draft for `model`; flags fill in what it leaves open.

    Raises:
        ValueError: for an unknown setting, or one that is out of range.
    """
    _, build = DRAFTERS[spec.name]
    made = build(args, drafter_settings(spec, args), model)
    if not isinstance(made, LoadedDrafter):
        return made
    # Once, not in each call of `generate`.
    return made._replace(params=beside(model.params, made.params))


def drafter_settings(spec: DrafterSpec, args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a spec by name, as what they are; flags fill in what it leaves open.

    Raises:
        ValueError: for an unknown setting, or text in place of a number.
    """
    flags = {name: getattr(args, name) for name in ("num_speculative_tokens", "max_ngram")}
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
        except ValueError:
            raise ValueError(f"--drafter {spec.text}: {name} must be a number.") from None
    return settings


def _lookup(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> PromptLookup:
    del args, model
    return PromptLookup(**settings)


def _draft_model(
    args: argparse.Namespace, settings: Mapping[str, Any], model: Model
) -> LoadedDrafter:
    del model
    settings = dict(settings)
    source = settings.pop("model", args.draft_model)
    if source is None:
        raise ValueError(
            "--drafter draft-model needs --draft-model MODEL: a smaller model with the same "
            "tokenizer (for the shipped demo: --draft-model demo-draft)."
        )
    return DraftModel.of(load(source, dtype=args.dtype), **settings)


def _eagle(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> LoadedDrafter:
    del args
    head = _head("eagle", settings)
    tree = settings.get("tree")
    paths = tree_of_head(head) if tree is None else load_tree(tree)
    return Eagle.of(load_eagle(head, model.network), paths)


def _eagle2(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> LoadedDrafter:
    del args
    head = _head("eagle2", settings)
    given = {name: value for name, value in settings.items() if name != "head"}
    return Eagle2.of(load_eagle(head, model.network), **given)


def _head(drafter: str, settings: Mapping[str, Any]) -> str:
    if "head" not in settings:
        raise ValueError(
            f"--drafter {drafter} needs {drafter}:head=FOLDER, of an EAGLE-1 or EAGLE-3 head, or "
            f"the name of a shipped one: {', '.join(shipped_heads()) or 'none is here'}."
        )
    return settings["head"]


def _layer_skip(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> LayerSkip:
    del args
    settings = dict(settings)
    source = settings.pop("skips", None)
    if source is None:
        raise ValueError(
            "--drafter layer-skip needs layer-skip:skips=FILE, a result of `jaxspec tune skips`, "
            f"or a published set: {', '.join(PUBLISHED_SKIPS)}."
        )
    if source in PUBLISHED_SKIPS:
        return LayerSkip(published_skips(source, model.config.num_layers), **settings)
    return LayerSkip.read(source, **settings)


def _deer(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> LoadedDrafter:
    del model
    given = _block_settings(settings)
    source = given.pop("model", args.draft_model)
    if source is None:
        raise ValueError(
            "--drafter deer needs deer:model=MODEL, a diffusion model with the target's tokenizer "
            "(for the shipped demo: deer:model=demo-deer)."
        )
    return Deer.of(load(source, dtype=args.dtype), **given)


def _dflash(args: argparse.Namespace, settings: Mapping[str, Any], model: Model) -> LoadedDrafter:
    del args
    given = _block_settings(settings)
    if "head" not in given:
        raise ValueError(
            "--drafter dflash needs dflash:head=FOLDER, of a DFlash head, or the name of a shipped "
            f"one: {', '.join(shipped_heads('dflash')) or 'none is here'}."
        )
    return DFlash.of(load_dflash(given.pop("head"), model.network), **given)


def _block_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a block drafter, but for where its weights are.

    Raises:
        ValueError: costs are given, but a draft is always whole.
    """
    given = dict(settings)
    if "tree" in given:
        given["paths"] = load_tree(given.pop("tree"))
    costs = {name: given.pop(name) for name in _COSTS if name in given}
    if given.pop("adaptive", 0):
        given["adaptive"] = AdaptiveBlock(**costs)
    elif costs:
        raise ValueError(f"--drafter: {', '.join(costs)}: needs adaptive=1.")
    return given


_COSTS = ("draft_cost", "token_cost")
_OF_BLOCKS: Mapping[str, Callable[[str], Any]] = {
    "block": int,
    # A file of `tune tree`; or the nodes of a tree that is made anew for each step.
    "tree": str,
    "num_nodes": int,
    "branch": int,
    "temperature": float,
    "steps": int,
    # 1: so much of a block as has been worth it, at costs in target passes over one token.
    "adaptive": int,
    **dict.fromkeys(_COSTS, float),
}

# The only place where drafters have names: the kinds of their settings, and how they are built.
DRAFTERS: dict[str, tuple[Mapping[str, Callable[[str], Any]], Callable[..., Any]]] = {
    "lookup": ({"num_speculative_tokens": int, "max_ngram": int, "match": str}, _lookup),
    "draft-model": ({"num_speculative_tokens": int, "model": str}, _draft_model),
    # tree: a file of `tune tree` or a published name.
    "eagle": ({"head": str, "tree": str}, _eagle),
    "eagle2": ({"head": str, "depth": int, "beam": int, "num_nodes": int}, _eagle2),
    "deer": ({"model": str, **_OF_BLOCKS, "sep": str, "mask": str, "cache": str}, _deer),
    "dflash": ({"head": str, **_OF_BLOCKS}, _dflash),
    "layer-skip": ({"num_speculative_tokens": int, "threshold": float, "skips": str}, _layer_skip),
}


def refuse_unused(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuses flags that would be ignored.

    Raises:
        ValueError: naming those that are given, and why they mean nothing.
    """
    values = {name: getattr(args, name) for name in names}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags}: {why}")


def announce(**facts: Any) -> None:
    """Prints the resolved settings of a run on standard error."""
    for name, value in facts.items():
        print(f"{name}: {value}", file=sys.stderr)


def check_writable(path: str | Path | None, flag: str = "--json") -> None:
    """Notices a wrong file to write, given by `flag`, before the work, not after it.

    Raises:
        ValueError: if the folder does not exist, or the path is a folder.
    """
    if path is None or path == "-":
        return
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"{flag} {path}: must be a file in a folder that exists.")
