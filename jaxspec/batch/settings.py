"""Settings of a job: how it runs, and which part of its rows it decodes."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import numpy as np

from jaxspec.batch.guard import GuardSettings
from jaxspec.core.checks import Checked, Count, at_least, checked, shown
from jaxspec.decoding.denoise import DenoiseConfig
from jaxspec.decoding.profile import DraftingMode
from jaxspec.decoding.request import GenerationConfig
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import DrafterLike

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

T = TypeVar("T")

AnyConfig = GenerationConfig | DenoiseConfig
"""Settings of decoding: of a causal model, or of a diffusion model."""
AnyDrafter = DrafterLike | SelfSpeculation | None
"""Settings of drafting, with weights where there are any."""


@dataclasses.dataclass(frozen=True)
class JobSettings(Checked):
    """Settings of a job.

    Only `capacity` changes its records, and `drafting` when sampling or in 16 bits.

    Attributes:
        batch_size: rows at once, a multiple of the parts that a mesh divides them into; `None`: as
            many as help and as fit into memory.
        capacity: tokens that each row's cache holds, rounded up to a multiple of 64; rows that need
            more become errors; `None`: the capacity that the rows need.
        drafting: "auto" lets a guard decide from the time that chunks take, where that changes no
            output: in float32, for causal models if decoding is greedy. "always" drafts, "never"
            does not.
        guard: settings of the guard.
        memory: bytes that caches, states and scratch may take; `None`: most of what is available.

    Raises:
        ValueError: a number is below 1, or `drafting` is not one of the three.

    Example:
        >>> JobSettings(batch_size=0)
        Traceback (most recent call last):
        ...
        ValueError: batch_size must be at least 1, got 0.
    """

    batch_size: Count | None = None
    capacity: Count | None = None
    drafting: DraftingMode = "auto"
    guard: GuardSettings | None = None
    memory: Annotated[int, at_least(1)] | None = None


@dataclasses.dataclass(frozen=True)
class Shard(Checked):
    """One of several parts of a job: the rows `index`, `index + num`, `index + 2 num`, ...

    Attributes:
        index: number of this part, from 1.
        num: number of parts.

    Raises:
        ValueError: there is no such part.

    Example:
        >>> [Shard(index, 3).rows_of("abcdefgh") for index in (1, 2, 3)]
        ['adg', 'beh', 'cf']
    """

    index: int = 1
    num: int = 1

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.index <= self.num:
            raise ValueError(f"shard must be I/N with I from 1 to N, such as 3/8, got {self}.")

    def __str__(self) -> str:
        return f"{self.index}/{self.num}"

    def rows_of(self, rows: Sequence[T]) -> Sequence[T]:
        """Returns the rows of this part, in their order."""
        return rows[self.index - 1 :: self.num]


def parse_shard(text: str) -> Shard:
    """Reads "3/8": the third of eight parts.

    Raises:
        ValueError: the text says something else, or there is no such part.

    Example:
        >>> parse_shard("3/8")
        Shard(index=3, num=8)
        >>> parse_shard("3/2")
        Traceback (most recent call last):
        ...
        ValueError: shard must be I/N with I from 1 to N, such as 3/8, got 3/2.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", checked("shard", text, str))
    if found is None:
        raise ValueError(f"shard must be I/N with I from 1 to N, such as 3/8, got {shown(text)}.")
    return Shard(int(found[1]), int(found[2]))


def drafts_change_nothing(model: "Model", config: AnyConfig, drafter: AnyDrafter) -> bool:
    """Returns True where outputs are the same with drafts and without, up to ties.

    16 bits round so coarsely that likeliest tokens may differ. Passes that are to have one shape
    have another without drafts. Tokens that a causal model draws
    depend on the drafts; those of a diffusion model do not, as each position has its own noise.
    """
    if np.dtype(model.network.dtype) != np.float32:
        return False
    if isinstance(drafter, SelfSpeculation):
        return drafter.lossy_top_k is None and not drafter.deterministic
    return isinstance(config, DenoiseConfig) or not np.any(config.temperature)
