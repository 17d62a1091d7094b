"""Whether to draft: decided by what drafting and plain decoding really took in this job.

A draft costs time whether or not it is accepted. With many rows a target pass is bound by
arithmetic and not by reading weights, so a pass over more tokens takes longer, and speculation may
lose. No table of another day knows this job's texts and this machine's load, so the guard books
the time of the job's own chunks: one number for the steps that draft, one for those that do not,
and how many tokens a step that drafts emits. Rows that draft also take longer to get into their
slots, as the drafter reads their prompts too; so that time is booked as well, for both kinds.
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
        margin: drafting must be faster than plain decoding by this share to begin, so that noise
            never drafts. It goes on for as long as it is faster at all.
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

    margin: float = 0.05
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


_FADE = 0.98
"""What older steps, or rows, weigh when one more is booked."""
_FEWEST_READ = 4
"""Rows, before it counts what reading their prompts took."""


@dataclasses.dataclass
class _Share:
    """A sum over another, in which what is older weighs less."""

    over: float = 0.0
    under: float = 0.0

    def add(self, over: float, under: float, num: int) -> None:
        """Takes both in; they are of `num` steps, or rows."""
        fade = _FADE**num
        self.over, self.under = fade * self.over + over, fade * self.under + under

    @property
    def ratio(self) -> float | None:
        return self.over / self.under if self.under else None


@dataclasses.dataclass
class _Kind:
    """What is known of one way to step. The first chunk warms up and is not booked.

    reading: seconds over tokens of the prompts that were read into slots.
    num_read: of these prompts.
    """

    warm: bool = False
    reading: _Share = dataclasses.field(default_factory=_Share)
    num_read: int = 0
    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=15))
    probing: int = 0

    @property
    def step_seconds(self) -> float:
        return median(self.seconds)

    @property
    def read_seconds(self) -> float | None:
        """Per token of a prompt; `None` as long as too few were read."""
        return self.reading.ratio if self.num_read >= _FEWEST_READ else None


class Guard:
    """Says before each chunk whether it drafts, and is told afterwards what it took.

    Pure bookkeeping: time comes in as numbers, so that a test can make it up.
    """

    def __init__(
        self, settings: GuardSettings | None = None, longest: int = 32, most_tokens: int = 128
    ):
        """`longest`: steps of a chunk at most. `most_tokens`: that a row emits at most."""
        self.settings = settings or GuardSettings()
        self._longest, self._most_tokens = longest, most_tokens
        self._kinds = {True: _Kind(), False: _Kind()}
        self._tau, self._running = _Share(), _Share()
        self._row_tokens, self._prompt_tokens = _Share(), _Share()
        self._waiting = False
        self._elapsed = self._first_step = 0.0
        self._probed, self._probe_cost = 0.0, 0.0
        expected = self.settings.expected
        self._drafting = expected is None or expected > 1 + self.settings.margin
        self._settled = expected is not None
        self._probing: bool | None = None

    @property
    def speedup(self) -> float | None:
        """Tokens per second of drafting over those of plain decoding; `None` until both are known.

        With what it takes to fill slots, as long as rows wait for them. Where only one kind was
        seen to fill any, the other is taken to be as fast at that.
        """
        bounds = self._bounds()
        return None if bounds is None else bounds[1]

    def _bounds(self) -> tuple[float, float] | None:
        """The speed-up at least and at most: plain rows take no longer to fill slots than others.

        Seconds per token: a step's over the tokens it emits, and a row's reading over all it emits.
        """
        draft, plain = self._kinds[True], self._kinds[False]
        tau, running = self._tau.ratio, self._running.ratio
        if not (draft.seconds and plain.seconds and tau and running):
            return None
        drafted = draft.step_seconds / (running * tau)
        plainly = plain.step_seconds / running
        slow, fast = draft.read_seconds, plain.read_seconds
        if not self._waiting or (slow is None and fast is None):
            return plainly / drafted, plainly / drafted
        per_token = (self._prompt_tokens.ratio or 0.0) / self._tokens_of_a_row
        if slow is None:
            fill = per_token * (fast or 0.0)
            return 0.0, (plainly + fill) / (drafted + fill)
        drafted += per_token * slow
        least, most = (0.0, slow) if fast is None else (min(fast, slow),) * 2
        return (plainly + per_token * least) / drafted, (plainly + per_token * most) / drafted

    @property
    def _tokens_of_a_row(self) -> float:
        """All that is emitted, over rows that came to their end: those that run count as well."""
        mean = self._row_tokens.ratio
        return self._most_tokens if mean is None else min(mean, self._most_tokens)

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

    def book_reading(self, drafting: bool, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Takes in what it took to fill slots.

        Args:
            drafting: whether the drafter has read the prompts too.
            num_rows: that were put into slots.
            num_tokens: of their prompts, with padding.
            seconds: for all of them.
        """
        self._elapsed += seconds
        kind = self._kinds[drafting]
        kind.reading.add(seconds, num_tokens, num_rows)
        kind.num_read += num_rows
        self._prompt_tokens.add(num_tokens, num_rows, num_rows)

    def book(
        self,
        drafting: bool,
        steps: int,
        row_steps: int,
        tokens: int,
        seconds: float,
        extra_seconds: float = 0.0,
        num_stopped: int = 0,
        waiting: bool = False,
    ) -> None:
        """Takes in what a chunk was.

        Args:
            drafting: whether it drafted.
            steps: that it made.
            row_steps: the same, counted once for each row that was running.
            tokens: emitted by all rows.
            seconds: from its start until its results were there.
            extra_seconds: spent beforehand to let rows draft that had gone on plainly.
            num_stopped: rows that came to their end.
            waiting: whether rows wait for slots. If none do, what filling takes is paid.
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
            self._tau.add(tokens, row_steps, steps)
        self._running.add(row_steps, steps, steps)
        self._row_tokens.add(tokens, num_stopped, num_stopped)
        self._waiting = waiting
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
        faster = self._faster()
        if faster is None:
            return
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

    def _faster(self) -> bool | None:
        """Whether drafting is; `None` as long as that hangs on what no chunk has shown yet."""
        bounds = self._bounds()
        if bounds is None:
            return None
        # What drafts goes on until it loses: to change back and forth costs more than it can bring.
        enough = 1.0 if self._settled and self._drafting else 1 + self.settings.margin
        at_least, at_most = (speedup > enough for speedup in bounds)
        return at_least if at_least == at_most else None

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
        return Chunk(drafting, min(self._longest, steps))

    def _may_probe(self) -> bool:
        """True where what the last try cost, or a guess of it, is a small share of the time since.

        Before the first try, one is taken to cost ten probes.
        """
        cost = self._probe_cost or 10 * self.settings.probe_seconds
        return self._elapsed - self._probed >= cost / self.settings.probe_share
