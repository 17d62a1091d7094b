"""How long the passes of a speculative step take on a device: measured, published or modelled.

A target pass is known by its TOKENS, the root included: EAGLE's tree of 25 nodes is a pass over
26. A draft pass is known by its batch: the nodes of one level that have children.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxspec.trees.files import read_entry, shipped_names, write_entry

_SHIPPED = FilePath(__file__).resolve().parent / "profiles"
KEYED_ON = "tokens"
"""What a profile's target passes are keyed on, as its file says: tokens, the root included."""


class Timing(NamedTuple):
    """What a pass of one size takes.

    size: tokens of a target pass, the root included; nodes in a draft pass; for a step's first
        draft pass, levels of the tree below its root.
    seconds: the median.
    spread: half the distance between the quartiles; `None` where it is not known.
    """

    size: int
    seconds: float
    spread: float | None = None


class PublishedRun(NamedTuple):
    """One row of a published table, kept as it was printed.

    nodes: draft tokens, the root EXCLUDED.
    draft_seconds: of all draft passes of a step.
    target_seconds: of the target pass of a step.
    tau: tokens per target pass, bonus INCLUDED.
    tokens_per_second: as reported, whatever else a step costs included.
    """

    name: str
    nodes: int
    draft_seconds: float
    target_seconds: float
    tau: float
    tokens_per_second: float


class OnChipMemory(NamedTuple):
    """What `CachePressure` needs to know of a device and a model; all in bytes."""

    on_chip: float
    kv_per_token: float
    activations_per_token: float


@dataclasses.dataclass(frozen=True)
class LatencyProfile:
    """Times of passes on one device. Between measured sizes they are interpolated linearly.

    Attributes:
        name: what to call it.
        target: of target passes, by tokens, the root included; 1 and at least one more.
        draft: of draft passes, by the nodes in them; 1 is among them.
        first_draft: of a step's first draft pass, the root's, by the levels of the tree: it also
            reads what the last step emitted, up to one token more than there are levels. None:
            as a draft pass of one node.
        device: that it was measured on.
        runtime: that ran it.
        dtype: of activations.
        quantisation: of weights; "none" if there is none.
        source: where the figures come from, and which of them are inferred.
        memory: of the device and model, for `CachePressure`.
        published: rows of the source's table.
        one_pass: the drafter predicts a whole block at once, so that a step has one draft pass,
            `first_draft`, however deep and wide its tree is.

    Raises:
        ValueError: for too few sizes, a size twice, or a time that is not positive.
    """

    name: str
    target: tuple[Timing, ...]
    draft: tuple[Timing, ...]
    first_draft: tuple[Timing, ...] = ()
    device: str = ""
    runtime: str = ""
    dtype: str = ""
    quantisation: str = "none"
    source: str = ""
    memory: OnChipMemory | None = None
    published: tuple[PublishedRun, ...] = ()
    one_pass: bool = False

    def __post_init__(self):
        for field, fewest in (("target", 2), ("draft", 1), ("first_draft", 0)):
            timings = _checked(self.name, field, getattr(self, field), fewest)
            object.__setattr__(self, field, timings)

    @property
    def max_tokens(self) -> int:
        """The widest target pass that was timed, in tokens, the root included."""
        return self.target[-1].size

    @property
    def max_batch(self) -> int:
        """The most nodes in a draft pass that was timed."""
        return self.draft[-1].size

    @property
    def max_levels(self) -> float:
        """Of the deepest tree whose first draft pass was timed; no limit if none was, apart."""
        return self.first_draft[-1].size if self.first_draft else math.inf

    def target_seconds(
        self, tokens: int | Float[np.ndarray, " sizes"]
    ) -> Float[np.ndarray, "*sizes"]:
        """Seconds of a target pass over so many tokens, the root included.

        Raises:
            ValueError: beyond the sizes that were timed.
        """
        return _interpolate(self.name, "target", self.target, tokens)

    def draft_seconds(self, batches: Sequence[int]) -> float:
        """Seconds of all draft passes of a step.

        Args:
            batches: nodes in each pass, the root's first; see `search.draft_batches`.

        Raises:
            ValueError: beyond the sizes that were timed.
        """
        if not batches:
            return 0.0
        if self.one_pass:
            return self.first_draft_seconds(len(batches))
        deeper = self.later_draft_seconds(np.asarray(batches[1:], np.int64))
        return self.first_draft_seconds(len(batches)) + float(np.sum(deeper))

    def first_draft_seconds(self, levels: int) -> float:
        """Seconds of the first draft pass of a step over a tree with so many levels, at least 1.

        Raises:
            ValueError: beyond the levels that were timed.
        """
        if not self.first_draft:
            return self.draft[0].seconds
        return float(_interpolate(self.name, "first_draft", self.first_draft, levels))

    def later_draft_seconds(
        self, nodes: int | Int[np.ndarray, " passes"]
    ) -> Float[np.ndarray, "*passes"]:
        """Seconds of a step's further draft passes, by the nodes in each.

        Raises:
            ValueError: beyond the sizes that were timed.
        """
        return _interpolate(self.name, "draft", self.draft, nodes)

    def normalised(self) -> Float[np.ndarray, " sizes"]:
        """Times of the target passes over that of one token."""
        return np.asarray([timing.seconds for timing in self.target]) / self.target[0].seconds

    def as_dict(self) -> dict[str, Any]:
        """The profile as its file has it."""
        return {
            "name": self.name,
            "device": self.device,
            "runtime": self.runtime,
            "dtype": self.dtype,
            "quantisation": self.quantisation,
            "source": self.source,
            "target_keyed_on": KEYED_ON,
            "target": [_as_entry("tokens", timing) for timing in self.target],
            "draft": [_as_entry("nodes", timing) for timing in self.draft],
            "first_draft": [_as_entry("levels", timing) for timing in self.first_draft],
            "memory_bytes": None if self.memory is None else self.memory._asdict(),
            "published": [run._asdict() for run in self.published],
            "one_pass": self.one_pass,
        }


def save_profile(profile: LatencyProfile, path: str | FilePath) -> None:
    """Writes a profile; the file is there whole or not at all."""
    write_entry(path, profile.as_dict())


def shipped_profiles() -> list[str]:
    """Names that `load_profile` knows without a file."""
    return shipped_names(_SHIPPED)


def load_profile(source: str | FilePath) -> LatencyProfile:
    """Reads a profile: a file, made here or elsewhere, or the name of a shipped one.

    Example:
        >>> from jaxspec.trees import load_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> float(phone.target_seconds(26))
        0.39212

    Raises:
        ValueError: naming what is missing, of the wrong kind or out of range.
    """
    return profile_from_dict(read_entry("profile", source, _SHIPPED), str(source))


def profile_from_dict(entry: dict[str, Any], where: str) -> LatencyProfile:
    """The inverse of `as_dict`; `where` names the source in messages.

    Raises:
        ValueError: as for `load_profile`.
    """
    known = {*LatencyProfile("", _UNIT, _UNIT).as_dict()}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ValueError(f"profile {where}: unknown field {unknown[0]!r}; known: {sorted(known)}.")
    if entry.get("target_keyed_on") != KEYED_ON:
        raise ValueError(
            f"profile {where}: target_keyed_on must be {KEYED_ON!r}, the root included, got "
            f"{entry.get('target_keyed_on')!r}; n draft nodes are verified by a pass of n + 1."
        )
    memory = entry.get("memory_bytes")
    try:
        texts = {
            field: str(entry[field])
            for field in ("device", "runtime", "dtype", "quantisation", "source")
            if field in entry
        }
        return LatencyProfile(
            name=str(entry.get("name", where)),
            target=tuple(_from_entry("tokens", timing) for timing in entry["target"]),
            draft=tuple(_from_entry("nodes", timing) for timing in entry["draft"]),
            first_draft=tuple(
                _from_entry("levels", timing) for timing in entry.get("first_draft", ())
            ),
            memory=None if memory is None else OnChipMemory(**memory),
            published=tuple(PublishedRun(**run) for run in entry.get("published", ())),
            one_pass=bool(entry.get("one_pass", False)),
            **texts,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"profile {where}: {error!r}; `target` is a list of objects with `tokens` and "
            "`seconds`, `draft` one of objects with `nodes` and `seconds`."
        ) from error


def roofline_profile(
    name: str,
    *,
    target_bytes: float,
    draft_bytes: float,
    bytes_per_second: float,
    flops_per_second: float,
    bytes_per_weight: float = 2.0,
    sizes: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    **facts: Any,
) -> LatencyProfile:
    """An analytic profile of a device that either reads weights or multiplies, never waits else.

    T(n) = max(bytes / bandwidth, 2 * weights * n / peak): flat up to the ridge, linear past it.
    Assumed: every pass reads every weight once; peak rates are reached; attention, the cache,
    launches and sampling cost nothing. So it flatters the device, most of all for small models.

    Args:
        name: of the profile.
        target_bytes: of the target's weights.
        draft_bytes: of the weights that a draft pass reads, the output head included.
        bytes_per_second: memory bandwidth.
        flops_per_second: peak of dense products.
        bytes_per_weight: 2 for bfloat16.
        sizes: tokens of target passes and nodes of draft passes to list.
        **facts: further fields of `LatencyProfile`.
    """

    def seconds(num_bytes: float, size: int) -> float:
        flops = 2 * num_bytes / bytes_per_weight * size
        return max(num_bytes / bytes_per_second, flops / flops_per_second)

    sizes = tuple(sizes)
    return LatencyProfile(
        name,
        target=tuple(Timing(size, seconds(target_bytes, size)) for size in sizes),
        draft=tuple(Timing(size, seconds(draft_bytes, size)) for size in sizes),
        **facts,
    )


@dataclasses.dataclass(frozen=True)
class CachePressure:
    """An analytic T_target(n) of a device whose on-chip memory the verified tokens overflow.

    T(n) = one_token + (n - 1) * per_token + refetch * max(0, W - free) * W / free

    with W = n * (keys and values of a token in all layers + activations of a token in the widest
    layer): the working set of the paper's argument, which has 8.34 MB at 16 tokens and 12.5 MB at
    24, of 12 MB on the chip. Assumed:

    - up to `free`, each token adds the same time: arithmetic that weights already read allow;
    - `free` is half of the on-chip memory, the other half holding the weights that stream by;
    - what exceeds it is fetched again, once per tile of tokens, and tiles grow in number with W;
      hence the quadratic.

    This is a heuristic that puts the knee between 8 and 16 tokens, as the paper's figure has it.
    It is not a derivation: the new keys of all layers are never needed on the chip at once, and
    4-bit products are bound by arithmetic early. Use it for the shape between measured points;
    measure where it counts.

    Attributes:
        one_token: seconds of a pass over one token.
        per_token: seconds that each further token adds while all fits.
        refetch: seconds per byte that does not fit and tile.
        memory: of the device and model.
    """

    one_token: float
    per_token: float
    refetch: float
    memory: OnChipMemory

    @classmethod
    def fitted(cls, profile: LatencyProfile) -> "CachePressure":
        """The curve through a profile's first two and its last timing.

        Raises:
            ValueError: the profile does not say how large the memory is, or its timings do not lie
                on both sides of the knee.
        """
        if profile.memory is None:
            raise ValueError(
                f"profile {profile.name}: says nothing of on-chip memory (memory_bytes)."
            )
        first, second, last = profile.target[0], profile.target[1], profile.target[-1]
        per_token = (second.seconds - first.seconds) / (second.size - first.size)
        bare = cls(first.seconds, per_token, 1.0, profile.memory)
        overflow = float(bare.overflow(last.size))
        if float(bare.overflow(second.size)) > 0 or overflow == 0:
            raise ValueError(
                f"profile {profile.name}: timings 1 and 2 must lie before the knee at "
                f"{bare.knee:.1f} tokens, and the last one past it."
            )
        linear = first.seconds + (last.size - first.size) * per_token
        return dataclasses.replace(bare, refetch=(last.seconds - linear) / overflow)

    @property
    def knee(self) -> float:
        """Tokens at which the working set fills the part of the memory that is free for it."""
        return self.memory.on_chip / 2 / self._per_token_bytes

    def seconds(self, tokens: int | Float[np.ndarray, " sizes"]) -> Float[np.ndarray, "*sizes"]:
        """T_target; of any number of tokens, for it is a model."""
        tokens = np.asarray(tokens)
        linear = self.one_token + (tokens - 1) * self.per_token
        return linear + self.refetch * self.overflow(tokens)

    def overflow(self, tokens: int | Float[np.ndarray, " sizes"]) -> Float[np.ndarray, "*sizes"]:
        """Bytes that do not fit, times tiles."""
        free = self.memory.on_chip / 2
        working_set = np.asarray(tokens) * self._per_token_bytes
        return np.maximum(0.0, working_set - free) * working_set / free

    @property
    def _per_token_bytes(self) -> float:
        return self.memory.kv_per_token + self.memory.activations_per_token


_UNIT = (Timing(1, 1.0), Timing(2, 1.0))
# What the sizes of a field's timings are, and the option that says which are measured.
_SIZES = {
    "target": ("tokens, the root included", "--tokens"),
    "draft": ("nodes", "--batches"),
    "first_draft": ("levels", "--levels"),
}


def _checked(name: str, field: str, timings: Iterable[Timing], fewest: int) -> tuple[Timing, ...]:
    ordered = tuple(sorted(timings))
    sizes = [timing.size for timing in ordered]
    what, _ = _SIZES[field]
    for size, seconds, _ in ordered:
        if size != int(size) or size < 1:
            raise ValueError(f"profile {name}: {field} has {size} {what}; sizes count from 1.")
        _check_seconds(name, f"{field} of {size} {what}", seconds)
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"profile {name}: {field} lists a size twice, got {sizes} {what}.")
    if len(sizes) < fewest or (sizes and sizes[0] != 1):
        raise ValueError(
            f"profile {name}: {field} needs the time of 1 and at least {fewest} sizes, got {sizes} "
            f"{what}; measure them."
        )
    return ordered


def _check_seconds(name: str, what: str, seconds: Any) -> None:
    if not (isinstance(seconds, int | float) and math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"profile {name}: seconds of {what} must be above 0, got {seconds!r}.")


def _interpolate(
    name: str, field: str, timings: tuple[Timing, ...], sizes: Any
) -> Float[np.ndarray, "*sizes"]:
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


def _from_entry(size_name: str, entry: dict[str, Any]) -> Timing:
    return Timing(entry[size_name], entry["seconds"], entry.get("spread"))
