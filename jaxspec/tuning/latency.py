"""Latency profiles: seconds of the passes of a speculative step on one device.

The size of a target pass is its number of TOKENS, the root included: EAGLE's tree of 25 nodes is a
pass over 26. The size of a draft pass is the number of nodes of one level that have children.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxspec.core.checks import (
    Checked,
    Count,
    Natural,
    NotNegative,
    Positive,
    checks_arguments,
    shown,
)
from jaxspec.tuning.files import read_entry, records, shipped_names, write_entry

_SHIPPED = FilePath(__file__).resolve().parent / "profiles"
KEYED_ON = "tokens"
"""Unit of the sizes of target passes, as profile files name it: tokens, the root included."""


@dataclasses.dataclass(frozen=True)
class Timing(Checked):
    """Time of a pass of one size.

    Attributes:
        size: tokens of a target pass, the root included; nodes of a draft pass; for the first
            draft pass of a step, levels of the tree below its root.
        seconds: the median.
        spread: half the distance between the quartiles; `None` if it is not known.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    size: Count
    seconds: Positive
    spread: NotNegative | None = None


@dataclasses.dataclass(frozen=True)
class TableRow(Checked):
    """One row of a table of speeds, as it was published or is predicted.

    Attributes:
        nodes: draft tokens, the root EXCLUDED.
        draft_seconds: seconds of all draft passes of a step.
        target_seconds: seconds of the target pass of a step.
        tau: tokens per target pass, bonus INCLUDED.
        tokens_per_second: the speed; a published one is with all other costs of a step.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    name: str
    nodes: Natural
    draft_seconds: NotNegative
    target_seconds: Positive
    tau: Positive
    tokens_per_second: Positive


@dataclasses.dataclass(frozen=True)
class PartialPasses(Checked):
    """Times of a draft token that the target drafts itself, with sub-layers left out.

    Attributes:
        num_layers: layers of the target.
        whole: seconds with all sub-layers.
        no_attention: seconds without any attention.
        no_mlp: seconds without any MLP.
        nothing: seconds without both: embedding and output head.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    num_layers: Count
    whole: Positive
    no_attention: Positive
    no_mlp: Positive
    nothing: Positive


@dataclasses.dataclass(frozen=True)
class LatencyProfile(Checked):
    """Times of passes on one device. Times between two measured sizes are interpolated linearly.

    Attributes:
        name: a name for tables and plots.
        target: target passes, by tokens, the root included; size 1 and at least one more.
        draft: draft passes, by nodes; size 1 and any others. Empty: the profile has `partial`, for
            layer skipping, and no tree can be searched by it.
        first_draft: the first draft pass of a step (the root's), by the levels of the tree. This
            pass also reads the tokens that the last step emitted: at most one more than there are
            levels. Empty: the time of a draft pass of one node.
        device: the device that ran the passes.
        runtime: the software that ran them; that of JAX begins with "jax".
        dtype: type of activations.
        quantization: type of the weights; "none" if they are not quantized.
        source: origin of the figures; says which of them are inferred.
        published: rows of the table that the figures come from.
        one_pass: the drafter predicts a whole block at once. A step then has one draft pass,
            `first_draft`, for a tree of any depth and width.
        partial: draft tokens with layers left out, for `jaxspec tune skips`; `None`: not timed.
        model: name of the model whose passes they are; empty: not known.

    Raises:
        ValueError: there are too few sizes, a size twice, or a field of another type.

    Example:
        >>> from jaxspec.tuning import LatencyProfile, Timing
        >>> target = (Timing(1, 0.010), Timing(5, 0.014))
        >>> profile = LatencyProfile("here", target, draft=(Timing(1, 0.002),))
        >>> round(float(profile.target_seconds(3)), 3)
        0.012
    """

    name: str
    target: tuple[Timing, ...]
    draft: tuple[Timing, ...]
    first_draft: tuple[Timing, ...] = ()
    device: str = ""
    runtime: str = ""
    dtype: str = ""
    quantization: str = "none"
    source: str = ""
    published: tuple[TableRow, ...] = ()
    one_pass: bool = False
    partial: PartialPasses | None = None
    model: str = ""

    def __post_init__(self):
        super().__post_init__()
        fewest_drafts = 1 if self.partial is None else 0
        for field, fewest in (("target", 2), ("draft", fewest_drafts), ("first_draft", 0)):
            timings = _ordered(field, getattr(self, field), fewest)
            object.__setattr__(self, field, timings)

    @property
    def max_tokens(self) -> int:
        """The widest target pass that was timed, in tokens, the root included."""
        return self.target[-1].size

    @property
    def max_batch(self) -> int:
        """The widest draft pass that was timed, in nodes."""
        return self.draft[-1].size

    @property
    def max_levels(self) -> float:
        """Levels of the deepest tree whose first draft pass was timed; no limit if none was."""
        return self.first_draft[-1].size if self.first_draft else math.inf

    @property
    def ends_chains(self) -> bool:
        """True if decoding there can end chains early: by JAX, not by exported files."""
        return self.runtime.startswith("jax")

    def target_seconds(
        self, tokens: int | Float[np.ndarray, " sizes"]
    ) -> Float[np.ndarray, "*sizes"]:
        """Seconds of a target pass over this many tokens, the root included.

        Raises:
            ValueError: the size is outside those that were timed.
        """
        return _interpolate(self.name, "target", self.target, tokens)

    def draft_seconds(self, batches: Sequence[int]) -> float:
        """Seconds of all draft passes of a step.

        Args:
            batches: nodes of each pass, the root's first, as `draft_batches` returns them.

        Raises:
            ValueError: a size is outside those that were timed.
        """
        if not batches:
            return 0.0
        if self.one_pass:
            return self.first_draft_seconds(len(batches))
        deeper = self.later_draft_seconds(np.asarray(batches[1:], np.int64))
        return self.first_draft_seconds(len(batches)) + float(np.sum(deeper))

    def first_draft_seconds(self, levels: int) -> float:
        """Seconds of the first draft pass of a step, by the levels of the tree (at least 1).

        Raises:
            ValueError: the number of levels is outside those that were timed.
        """
        if not self.first_draft:
            return float(_interpolate(self.name, "draft", self.draft, 1))
        return float(_interpolate(self.name, "first_draft", self.first_draft, levels))

    def later_draft_seconds(
        self, nodes: int | Int[np.ndarray, " passes"]
    ) -> Float[np.ndarray, "*passes"]:
        """Seconds of the later draft passes of a step, by the nodes in each.

        Raises:
            ValueError: a size is outside those that were timed.
        """
        return _interpolate(self.name, "draft", self.draft, nodes)

    def block_costs(self, block: int) -> dict[str, float]:
        """Costs of drafting a block, as `AdaptiveBlock` names them, by the sizes nearest to it.

        Example:
            >>> from jaxspec.tuning import LatencyProfile, Timing
            >>> target, draft = (Timing(1, 0.010), Timing(9, 0.018)), (Timing(1, 0.005),)
            >>> LatencyProfile("here", target, draft).block_costs(8)
            {'draft_cost': 0.5, 'token_cost': 0.1}
        """
        one, tokens = self.target[0].seconds, min(1 + block, self.max_tokens)
        further = max(0.0, float(self.target_seconds(tokens)) - one) / (tokens - 1)
        drafting = self.first_draft_seconds(int(min(block, self.max_levels)))
        costs = {"draft_cost": drafting / one, "token_cost": further / one}
        return {name: float(f"{cost:.2g}") for name, cost in costs.items()}

    def normalised(self) -> Float[np.ndarray, " sizes"]:
        """Times of the target passes, divided by the time of one token."""
        return np.asarray([timing.seconds for timing in self.target]) / self.target[0].seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile in the form of its file."""
        return {
            "name": self.name,
            "model": self.model,
            "device": self.device,
            "runtime": self.runtime,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "source": self.source,
            "target_keyed_on": KEYED_ON,
            **{
                field: [_as_entry(unit, timing) for timing in getattr(self, field)]
                for field, unit in _UNITS.items()
            },
            "published": [dataclasses.asdict(run) for run in self.published],
            "one_pass": self.one_pass,
            "partial": None if self.partial is None else dataclasses.asdict(self.partial),
        }


@checks_arguments
def save_profile(profile: LatencyProfile, path: str | FilePath) -> None:
    """Writes a profile. An interrupted write leaves no file.

    Example:
        >>> import tempfile
        >>> from jaxspec.tuning import load_profile, save_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_profile(phone, f"{folder}/phone.json")
        ...     load_profile(f"{folder}/phone.json") == phone
        True
    """
    write_entry(path, profile.as_dict())


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package.

    Example:
        >>> from jaxspec.tuning import shipped_profiles
        >>> shipped_profiles()
        ['galaxy-s25-adreno830-vicuna7b-q4', 'server-a100-roofline-7b-bf16']
    """
    return shipped_names(_SHIPPED)


@checks_arguments
def load_profile(source: str | FilePath) -> LatencyProfile:
    """Reads a profile.

    Args:
        source: a file, or a name of `shipped_profiles()`.

    Example:
        >>> from jaxspec.tuning import load_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> float(phone.target_seconds(26))
        0.39212

    Raises:
        ValueError: a field is missing, of the wrong type or out of range; the message names it.
    """
    return profile_from_dict(read_entry("profile", source, _SHIPPED), str(source))


def profile_from_dict(entry: dict[str, Any], where: str) -> LatencyProfile:
    """Inverts `LatencyProfile.as_dict`; messages name the source, `where`."""
    known = {*LatencyProfile("", _UNIT, _UNIT).as_dict()}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ValueError(
            f"profile {where}: unknown field {shown(unknown[0])}; known: {sorted(known)}."
        )
    if entry.get("target_keyed_on") != KEYED_ON:
        raise ValueError(
            f"profile {where}: target_keyed_on must be {KEYED_ON!r}, the root included, got "
            f"{shown(entry.get('target_keyed_on'))}; n draft nodes are verified by a pass of n + 1."
        )
    lacking = [field for field in ("target", "draft") if field not in entry]
    if lacking:
        raise ValueError(
            f"profile {where}: has no {lacking[0]}; `target` is a list of objects with `tokens` "
            "and `seconds`, `draft` one of objects with `nodes` and `seconds`."
        )
    given = {"name": where, **entry}
    del given["target_keyed_on"]
    try:
        for field, unit in _UNITS.items():
            given[field] = records(field, entry.get(field, ()), Timing, {"size": unit})
        given["published"] = records("published", entry.get("published", ()), TableRow)
        if entry.get("partial") is not None:
            (given["partial"],) = records("partial", [entry["partial"]], PartialPasses)
        return LatencyProfile(**given)
    except ValueError as error:
        raise ValueError(f"profile {where}: {error}") from None


_UNIT = (Timing(1, 1.0), Timing(2, 1.0))
# The name of each field's sizes in a file.
_UNITS = {"target": "tokens", "draft": "nodes", "first_draft": "levels"}
# The unit of each field's sizes in a message, and the option that lists the sizes to measure.
_SIZES = {
    "target": ("tokens, the root included", "--tokens"),
    "draft": ("nodes", "--batches"),
    "first_draft": ("levels", "--levels"),
}


def _ordered(field: str, timings: Sequence[Timing], fewest: int) -> tuple[Timing, ...]:
    """Returns timings by size; refuses sizes that are too few, or there twice."""
    ordered = tuple(sorted(timings, key=lambda timing: timing.size))
    sizes = [timing.size for timing in ordered]
    what, _ = _SIZES[field]
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"{field} lists a size twice, got {shown(sizes)} {what}.")
    if len(sizes) < fewest or (sizes and sizes[0] != 1):
        raise ValueError(
            f"{field} needs the time of 1 and at least {fewest} sizes, got {shown(sizes)} {what}; "
            "measure them."
        )
    return ordered


def _interpolate(
    name: str, field: str, timings: tuple[Timing, ...], sizes: Any
) -> Float[np.ndarray, "*sizes"]:
    if not timings:
        raise ValueError(
            f"profile {name}: has no {field} passes, as it is for layer skipping; for a tree, time "
            "those of the drafter (`jaxspec export kit --drafter`, or `jaxspec tune profile`)."
        )
    known = np.asarray([timing.size for timing in timings])
    beyond = np.asarray(sizes)[(np.asarray(sizes) < known[0]) | (np.asarray(sizes) > known[-1])]
    if beyond.size:
        what, flag = _SIZES[field]
        raise ValueError(
            f"profile {name}: {field} passes were timed for {known[0]} to {known[-1]} {what}, not "
            f"for {int(beyond[0])}; measure that (`jaxspec tune profile {flag} "
            f"{','.join(map(str, sorted({*known.tolist(), int(beyond[0])})))}`) or ask for less."
        )
    return np.interp(sizes, known, [timing.seconds for timing in timings])


def _as_entry(size_name: str, timing: Timing) -> dict[str, Any]:
    return {size_name: timing.size, "seconds": timing.seconds, "spread": timing.spread}
