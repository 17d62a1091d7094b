"""The guard: decides from the measured time of a job's chunks whether steps draft.

A draft takes time whether or not it is accepted. With many rows a target pass is bound by
arithmetic and not by reading weights, so a pass over more tokens takes longer, and speculation may
lose. The guard therefore measures this job on this machine: seconds of steps with drafts, seconds
of plain steps, and tokens that a step with drafts emits. Rows that draft also take longer to get
into their slots, as the drafter reads their prompts too; the guard measures that time for both.
"""

import dataclasses
from collections import deque
from statistics import median
from typing import Annotated, NamedTuple

from jaxspec.core.checks import Checked, Count, Positive, between, from_up_to
from jaxspec.decoding.profile import MARGIN


@dataclasses.dataclass(frozen=True)
class GuardSettings(Checked):
    """Settings of a guard.

    Attributes:
        margin: share by which drafting must be faster than plain decoding to begin, so that noise
            alone never begins it. It continues for as long as it is faster at all.
        samples: chunks of each kind to time before the first decision; they take at least this many
            times `probe_seconds` together.
        probe_seconds: time for which steps run to be timed: less is mostly noise.
        probe_share: share of the job's time for trying the other kind again.
        expected: tokens per second of drafting over those of plain decoding with this many rows, as
            measured before; the job begins accordingly; `None`: it begins with chunks of both
            kinds.

    Raises:
        ValueError: a number is out of range.
    """

    margin: Annotated[float, from_up_to(0, 1)] = MARGIN
    samples: Count = 2
    probe_seconds: Positive = 0.1
    probe_share: Annotated[float, between(0, 1)] = 0.01
    expected: Positive | None = None


class Chunk(NamedTuple):
    """The next chunk.

    Attributes:
        drafting: True: steps draft. False: they decode plainly.
        limit: most steps; 0: the chunk is run to time what it takes besides steps.
    """

    drafting: bool
    limit: int


_FADE = 0.98
"""Factor on the weight of older steps, or rows, for each new one."""
_FEWEST_READ = 4
"""Prompts that must be read before their time counts."""
_FEWEST_CHUNKS, _PROBES_KEPT = 15, 10
"""Chunks, and times `probe_seconds`, beyond `samples` for which the times of steps are kept."""
_MOST_ONCE = 0.8
"""Share of a chunk's time that may be ascribed to what it takes besides its steps."""
_STALLED = 3
"""Times a median chunk's seconds per step that any chunk counts at most."""


@dataclasses.dataclass
class _Share:
    """A ratio of two sums in which older values weigh less."""

    over: float = 0.0
    under: float = 0.0

    def add(self, over: float, under: float, num: int) -> None:
        """Adds to both sums the values of `num` steps, or rows."""
        fade = _FADE**num
        self.over, self.under = fade * self.over + over, fade * self.under + under

    @property
    def ratio(self) -> float | None:
        return self.over / self.under if self.under else None


@dataclasses.dataclass
class _Kind:
    """Measurements of one kind of steps. The first chunk warms up and does not count.

    Attributes:
        warm: the first chunk is over.
        reading: seconds over tokens of the prompts that were read into slots.
        num_read: number of these prompts.
        chunks: seconds and steps of the latest chunks.
        probing: seconds left to time.
    """

    warm: bool = False
    reading: _Share = dataclasses.field(default_factory=_Share)
    num_read: int = 0
    chunks: deque[tuple[float, int]] = dataclasses.field(default_factory=deque)
    probing: float = 0.0

    def add(self, seconds: float, steps: int, fewest: int, most_seconds: float) -> None:
        """Notes a chunk, and forgets what is older than `most_seconds` and `fewest` chunks."""
        self.chunks.append((seconds, steps))
        while len(self.chunks) > fewest and self.seconds > most_seconds:
            self.chunks.popleft()

    @property
    def seconds(self) -> float:
        """Seconds of the latest chunks together."""
        return sum(seconds for seconds, _ in self.chunks)

    def step_seconds(self, once: float) -> float:
        """Returns seconds per step, without `once` seconds that each chunk takes besides its steps.

        A chunk may have one step, as it ends when a row stops. Therefore the chunks are added up.
        One in which the machine did something else counts like a slow one.
        """
        stepping = [
            (seconds - min(once, _MOST_ONCE * seconds), steps) for seconds, steps in self.chunks
        ]
        most = _STALLED * median(seconds / steps for seconds, steps in stepping)
        total = sum(min(seconds, most * steps) for seconds, steps in stepping)
        return total / sum(steps for _, steps in stepping)

    @property
    def read_seconds(self) -> float | None:
        """Seconds per token of a prompt; `None` as long as too few were read."""
        return self.reading.ratio if self.num_read >= _FEWEST_READ else None


class Guard:
    """Decides before each chunk whether it drafts; afterwards it is given the chunk's time.

    It reads no clock: time comes in as numbers, so that a test can make it up.

    Example:
        >>> guard = Guard(GuardSettings(expected=0.8))
        >>> guard.choose()
        Chunk(drafting=False, limit=32)
    """

    def __init__(
        self, settings: GuardSettings | None = None, longest: int = 32, most_tokens: int = 128
    ):
        """Takes the most steps of a chunk and the most tokens of a row."""
        self.settings = settings or GuardSettings()
        self._longest, self._most_tokens = longest, most_tokens
        self._kinds = {True: _Kind(), False: _Kind()}
        self._tau, self._running = {True: _Share(), False: _Share()}, _Share()
        self._row_tokens, self._prompt_tokens = _Share(), _Share()
        self._waiting = False
        # Seconds that a chunk takes besides its steps. Both kinds pay them, when a row has stopped.
        self._once: float | None = None
        self._timing_once = False
        self._elapsed = self._first_step = 0.0
        self._probed, self._probe_cost = 0.0, 0.0
        expected = self.settings.expected
        self._drafting = expected is None or expected > 1 + self.settings.margin
        self._settled = expected is not None
        self._probing: bool | None = None

    @property
    def speedup(self) -> float | None:
        """Tokens per second of drafting over those of plain decoding; `None` until both are known.

        It includes the time to fill slots, as long as rows wait for them. Where only one kind has
        filled any, the other is assumed to be as fast at that.
        """
        bounds = self._bounds()
        return None if bounds is None else bounds[1]

    def _bounds(self) -> tuple[float, float] | None:
        """Returns bounds of the speed-up: plain rows fill slots at least as fast as others.

        It compares seconds per token: a step's over the tokens that it emits, and reading a prompt
        over all tokens of its row.
        """
        draft, plain = self._kinds[True], self._kinds[False]
        tau, plain_tau = self._tau[True].ratio, self._tau[False].ratio
        running = self._running.ratio
        if not (draft.chunks and plain.chunks and tau and plain_tau and running):
            return None
        once = self._once or 0.0
        drafted = draft.step_seconds(once) / (running * tau)
        # Plain steps of a diffusion model may fill in several tokens too.
        plainly = plain.step_seconds(once) / (running * max(1.0, plain_tau))
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
        """Emitted tokens over rows that have ended; tokens of running rows count too."""
        mean = self._row_tokens.ratio
        return self._most_tokens if mean is None else min(mean, self._most_tokens)

    def choose(self) -> Chunk:
        """Returns the next chunk."""
        if not self._settled:
            return self._first_chunk()
        if self._probing is None and self._may_probe():
            other = self._kinds[not self._drafting]
            other.probing, other.warm = self.settings.probe_seconds, False
            self._probing, self._probe_cost = not self._drafting, 0.0
        if self._probing is not None:
            return self._probe(self._probing)
        return Chunk(self._drafting, self._longest)

    def book_reading(self, drafting: bool, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Notes the time to fill slots.

        Args:
            drafting: the drafter has read the prompts too.
            num_rows: rows that were put into slots.
            num_tokens: tokens of their prompts, with padding.
            seconds: time for all of them.
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
        """Notes a chunk.

        Args:
            drafting: it drafted.
            steps: steps of the batch.
            row_steps: steps, counted once for each row that was running.
            tokens: tokens emitted by all rows.
            seconds: time from its start until its results were there.
            extra_seconds: time before it, in which rows that were decoded plainly rejoined.
            num_stopped: rows that have ended.
            waiting: rows wait for slots. If none do, no more slots are filled.
        """
        kind = self._kinds[drafting]
        self._elapsed += seconds + extra_seconds
        if not steps:
            if self._timing_once:
                self._once, self._timing_once = seconds, False
        elif not kind.warm:
            kind.warm = True
            if not kind.chunks:
                # Too long, but good enough to choose the steps of a probe.
                self._first_step = seconds / steps
        else:
            if kind.probing == self.settings.probe_seconds:
                kind.chunks.clear()  # a probe begins: older times may be another machine's by now
            samples = self.settings.samples  # as many must fit, or nothing is ever decided
            most = (_PROBES_KEPT + samples) * self.settings.probe_seconds
            kind.add(seconds, steps, _FEWEST_CHUNKS + samples, most)
            kind.probing = max(0.0, kind.probing - seconds)
        self._tau[drafting].add(tokens, row_steps, steps)
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
            self._probe_cost += extra_seconds  # a plain probe made rows rejoin
        self._decide(drafted=False)

    def _decide(self, drafted: bool) -> None:
        """Begins to draft only after a probe that `drafted`; continues for as long as it is faster.

        Otherwise noise would make rows change again and again, and each change reads their text.
        """
        faster = self._faster()
        if faster is None:
            return
        if not self._settled:
            if not all(map(self._timed, self._kinds.values())):
                return
            self._settled, self._probed = True, self._elapsed
            self._probe_cost = self._elapsed / 2
            self._drafting = faster
        elif self._drafting and not faster:
            self._drafting, self._probed = False, self._elapsed
        elif drafted:
            self._drafting = self._drafting or faster

    def _faster(self) -> bool | None:
        """Returns True if drafting is faster; `None` if that depends on times not measured yet."""
        bounds = self._bounds()
        if bounds is None:
            return None
        # Drafting continues until it loses: changing back and forth costs more than it can gain.
        enough = 1.0 if self._settled and self._drafting else 1 + self.settings.margin
        at_least, at_most = (speedup > enough for speedup in bounds)
        return at_least if at_least == at_most else None

    def _first_chunk(self) -> Chunk:
        """Returns a first chunk of either kind: those with drafts first, then the plain ones.

        In turns, the drafter would have to read the rows' text again and again.
        """
        return self._probe(not self._timed(self._kinds[True]))

    def _timed(self, kind: _Kind) -> bool:
        """Returns True once a kind of steps was timed for long enough for a first decision."""
        samples, seconds = self.settings.samples, self.settings.probe_seconds
        return len(kind.chunks) >= samples and kind.seconds >= samples * seconds

    def _probe(self, drafting: bool) -> Chunk:
        kind = self._kinds[drafting]
        if not kind.warm:
            return Chunk(drafting, 1)
        if self._once is None:
            self._timing_once = True
            return Chunk(drafting, 0)
        step = kind.step_seconds(self._once) if kind.chunks else self._first_step
        steps = max(1, round(self.settings.probe_seconds / max(step, 1e-6)))
        return Chunk(drafting, min(self._longest, steps))

    def _may_probe(self) -> bool:
        """Returns True where the last try's cost is a small share of the time since.

        Before the first try, its cost is estimated as ten probes.
        """
        cost = self._probe_cost or 10 * self.settings.probe_seconds
        return self._elapsed - self._probed >= cost / self.settings.probe_share
