"""Whether to draft: decided by what drafting and plain decoding really took in this job.

A draft costs time whether or not it is accepted. With many rows a target pass is bound by
arithmetic and not by reading weights, so a pass over more tokens takes longer, and speculation may
lose. No table of another day knows this job's texts and this machine's load, so the guard books
the time of the job's own chunks: one number for the steps that draft, one for those that do not,
and how many tokens a step that drafts emits.
"""

import dataclasses
import math
from collections import deque
from statistics import median
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class GuardSettings:
    """When to try what, and when to believe it.

    Attributes:
        margin: drafting must be faster than plain decoding by this share, so that noise never
            drafts.
        samples: chunks of each kind to look at before the first decision.
        probe_seconds: a chunk that is run to be timed lasts about this long: short ones are mostly
            noise.
        probe_share: of the job's time, what trying the other way again may take.
        expected: tokens per second of drafting over those of plain decoding, as a curve that was
            measured before says for this many rows; the job begins as it says. `None`: without a
            curve, it begins with chunks of both kinds.

    Raises:
        ValueError: a number is out of range.
    """

    margin: float = 0.03
    samples: int = 2
    probe_seconds: float = 0.1
    probe_share: float = 0.01
    expected: float | None = None

    def __post_init__(self):
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be in [0, 1), got {self.margin}.")
        if self.samples < 1 or self.probe_seconds <= 0 or not 0 < self.probe_share < 1:
            raise ValueError(
                "samples must be at least 1, probe_seconds positive and probe_share in (0, 1), got "
                f"{self.samples}, {self.probe_seconds} and {self.probe_share}."
            )
        if self.expected is not None and not self.expected > 0:
            raise ValueError(f"expected must be positive, got {self.expected}.")


class Chunk(NamedTuple):
    """What to run next.

    drafting: with drafts or plainly.
    limit: steps at most.
    """

    drafting: bool
    limit: int


@dataclasses.dataclass
class _Kind:
    """What is known of one way to step. The first chunk warms up and is not booked."""

    warm: bool = False
    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=15))
    probing: int = 0

    @property
    def step_seconds(self) -> float:
        return median(self.seconds)


class Guard:
    """Says before each chunk whether it drafts, and is told afterwards what it took.

    Pure bookkeeping: time comes in as numbers, so that a test can make it up.
    """

    def __init__(self, settings: GuardSettings | None = None, longest: int = 32):
        """`longest`: steps of a chunk at most."""
        self.settings = settings or GuardSettings()
        self._longest = longest
        self._kinds = {True: _Kind(), False: _Kind()}
        self._tokens, self._row_steps = 0.0, 0.0
        self._elapsed = self._first_step = 0.0
        self._probed, self._probe_cost = 0.0, 0.0
        expected = self.settings.expected
        self._drafting = expected is None or expected > 1 + self.settings.margin
        self._settled = expected is not None
        self._probing: bool | None = None

    @property
    def speedup(self) -> float | None:
        """Tokens per second of drafting over those of plain decoding; `None` until both are known.

        Of rows that run: what the slots hold besides takes the same time in both.
        """
        draft, plain = self._kinds[True], self._kinds[False]
        if not (draft.seconds and plain.seconds and self._row_steps):
            return None
        return self._tokens / self._row_steps * plain.step_seconds / draft.step_seconds

    def choose(self) -> Chunk:
        """What to run next."""
        if not self._settled:
            return self._to_find_out()
        if self._probing is None and self._may_probe():
            other = self._kinds[not self._drafting]
            other.probing, other.warm = 1, False
            self._probing, self._probe_cost = not self._drafting, 0.0
        if self._probing is not None:
            return self._probe(self._probing)
        return Chunk(self._drafting, self._longest)

    def book(
        self,
        drafting: bool,
        steps: int,
        row_steps: int,
        tokens: int,
        seconds: float,
        extra_seconds: float = 0.0,
    ) -> None:
        """Takes in what a chunk was.

        Args:
            drafting: whether it drafted.
            steps: that it made.
            row_steps: the same, counted once for each row that was running.
            tokens: emitted by all rows.
            seconds: from its start until its results were there.
            extra_seconds: spent beforehand to let rows draft that had gone on plainly.
        """
        kind = self._kinds[drafting]
        self._elapsed += seconds + extra_seconds
        if steps and not kind.warm:
            kind.warm = True
            if not kind.seconds:
                # Too long, but it tells how many steps a probe should have.
                self._first_step = seconds / steps
        elif steps:
            kind.seconds.append(seconds / steps)
            kind.probing = max(0, kind.probing - 1)
        if drafting:
            fade = 0.98**steps
            self._tokens = fade * self._tokens + tokens
            self._row_steps = fade * self._row_steps + row_steps
        if self._probing == drafting:
            self._probe_cost += seconds + extra_seconds
            if not kind.probing:
                self._probing, self._probed = None, self._elapsed
                self._decide(drafted=drafting)
                return
        elif extra_seconds:
            self._probe_cost += extra_seconds  # what a plain probe left behind
        self._decide(drafted=False)

    def _decide(self, drafted: bool) -> None:
        """Begins to draft only upon trying it, `drafted`, and then for as long as it is faster.

        Otherwise noise would make rows change again and again, which costs a reading of their text.
        """
        speedup = self.speedup
        if speedup is None:
            return
        faster = speedup > 1 + self.settings.margin
        if not self._settled:
            fewest = min(len(kind.seconds) for kind in self._kinds.values())
            if fewest < self.settings.samples:
                return
            self._settled, self._probed = True, self._elapsed
            self._probe_cost = self._elapsed / 2
            self._drafting = faster
        elif self._drafting and not faster:
            self._drafting, self._probed = False, self._elapsed
        elif drafted:
            self._drafting = self._drafting or faster

    def _to_find_out(self) -> Chunk:
        """Drafts first, while rows are as a drafter left them, and only then plainly.

        In turns, rows would have to let the drafter read their text again and again.
        """
        return self._probe(len(self._kinds[True].seconds) < self.settings.samples)

    def _probe(self, drafting: bool) -> Chunk:
        kind = self._kinds[drafting]
        if not kind.warm:
            return Chunk(drafting, 1)
        step = kind.step_seconds if kind.seconds else self._first_step
        steps = math.ceil(self.settings.probe_seconds / max(step, 1e-6))
        return Chunk(drafting, min(self._longest, max(2, steps)))

    def _may_probe(self) -> bool:
        """True where what the last try cost, or a guess of it, is a small share of the time since.

        Before the first try, one is taken to cost ten probes.
        """
        cost = self._probe_cost or 10 * self.settings.probe_seconds
        return self._elapsed - self._probed >= cost / self.settings.probe_share
