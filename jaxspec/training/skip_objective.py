"""What a set of skipped sub-layers is worth: expected seconds per token, without decoding.

Given text, a draft can be computed without being made. From slot s the drafter reads the tokens
s, s + 1, ... with the skipped network; the kept layers see the whole network's keys and values
before s, and their own from s on. If the text is what is drafted, all K places are one causal pass
of K tokens, and the drafts from all slots are one batch. With

    a(s, k)   the k-th drafted token is the whole network's choice at its place,
    c(s, k)   its probability in the draft, before any warping,
    D(s)      tokens drafted: up to the first k with c(s, k) below the threshold, at most K,
    A(s)      tokens accepted: a(s, 1) ... a(s, A) all hold, A <= D,

decoding goes from s to s + A(s) + 1. Over the slots that steps begin at, a step emits
tau = 1 + mean A(s) tokens, the bonus token included, and takes

    mean D(s) * t(z) + mean T(w(D(s) + 1)) seconds.

A mean over all slots would be too good: steps begin behind rejected drafts, where the text is hard.

A draft of up to fewer tokens is the beginning of one of up to K, so the best length up to K is
found from the same pass, like the best threshold.

t(z) is a draft token's time: one part for each attention and each MLP that is kept, one for the
rest. T(w) is the time of a target pass of the width w that holds a draft and its root. Both are
measured once, so that a set's worth is a matter of the text alone, and the same every time.

What this leaves out:

- The drafter reads what it drafted, not the text. The two are the same up to the first rejection
  if the text is the network's own greedy continuation: then A and D are exactly those of a step
  that begins at s. (A draft that goes on after a wrong token ends elsewhere, but every place after
  it is rejected anyway: D alone is then approximate.) On text by others, the reading is what
  teacher forcing is: right after an accepted token the text may go on with another one.
- The exit threshold stands still; steps of verification beside the passes cost nothing.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.bench.passes import CONTEXT, NUM_SLOTS, measure_passes
from jaxspec.bench.timing import time_in_turns
from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.core.masks import causal
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import Context, KVCache, LayerKV, Params, Recent, Warp
from jaxspec.drafters import LayerSkip
from jaxspec.drafters.layer_skip import LayerSkipState
from jaxspec.generation import GenerationConfig, generate
from jaxspec.metrics import Metrics
from jaxspec.models import Network, Skips
from jaxspec.training.data import Document, Source, read_source

Tokens = Sequence[int] | Int[np.ndarray, " tokens"]


class Window(NamedTuple):
    """Fixed text to judge sets on.

    tokens: rows, right-padded with 0.
    lengths: of the rows.
    first: the first slot that a draft may begin at: the last of the prompt.
    """

    tokens: Int[np.ndarray, "rows slots"]
    lengths: Int[np.ndarray, " rows"]
    first: int


def own_window(model: Model, prompts: Sequence[Tokens], max_new_tokens: int) -> Window:
    """Prompts of one length and what the model goes on with, greedily.

    Raises:
        ValueError: the window is longer than the model's context, or prompts differ in length.
    """
    (size, *others) = {len(prompt) for prompt in prompts}
    if others:
        raise ValueError(f"prompts must have one length, got {sorted({size, *others})}.")
    check_window(model, size + max_new_tokens)
    result = generate(model, list(prompts), GenerationConfig(max_new_tokens=max_new_tokens))
    rows = [[*prompt, *row.tokens] for prompt, row in zip(prompts, result, strict=True)]
    return _window(rows, size - 1)


def given_window(model: Model, rows: Sequence[Tokens], prompt_tokens: int) -> Window:
    """Rows of text as they are: drafts are then teacher-forced.

    Raises:
        ValueError: a row is longer than the model's context.
    """
    check_window(model, max(map(len, rows)))
    return _window(rows, prompt_tokens - 1)


def check_window(model: Model, length: int) -> None:
    """Refuses rows of more tokens than the model's context holds.

    Raises:
        ValueError: they do not fit.
    """
    if length > model.config.max_positions:
        raise ValueError(
            f"The window must fit the model's context of {model.config.max_positions} tokens, got "
            f"{length}: use a shorter prompt or fewer new tokens."
        )


def _window(rows: Sequence[Tokens], first: int) -> Window:
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return Window(tokens, lengths, first)


def held_out_rows(
    model: Model, sources: Sequence[Source], length: int, count: int
) -> list[Int[np.ndarray, " length"]]:
    """Beginnings of held-out documents, the sources in turn, the same ones every time.

    Raises:
        ValueError: too few documents are as long as `length` tokens.
    """
    if model.tokenizer is None:
        raise ValueError("model: has no tokenizer, so text cannot be read.")
    rng = np.random.default_rng(0)
    found: list[Iterator[Int[np.ndarray, " length"]]] = []
    for source in sources:
        documents = read_source(source).validation
        order = rng.permutation(len(documents))
        found.append(_beginnings(model.tokenizer, [documents[i] for i in order], length))
    turns = (row for rows in itertools.zip_longest(*found) for row in rows if row is not None)
    rows = list(itertools.islice(turns, count))
    if len(rows) < count:
        raise ValueError(
            f"Only {len(rows)} held-out documents have {length} tokens, {count} are needed: ask "
            "for fewer or shorter rows, or name more text."
        )
    return rows


def _beginnings(
    tokenizer: Tokenizer, documents: Sequence[Document], length: int
) -> Iterator[Int[np.ndarray, " length"]]:
    for document in documents:
        # Tokens are rarely longer than this: long documents need not be encoded to their end.
        tokens = tokenizer.encode("".join(document.pieces)[: 32 * length])
        if len(tokens) >= length:
            yield np.asarray(tokens[:length], np.int32)


class Reading(NamedTuple):
    """The whole network's pass over a window, what every draft is compared with.

    layers: keys and values of every slot.
    choices: the likeliest next token after every slot.
    """

    layers: tuple[LayerKV, ...]
    choices: Int[Array, "rows slots"]


class Drafts(NamedTuple):
    """Drafts from several slots, as deep as they may be.

    agrees: whether the drafted token is the whole network's choice at its place.
    confidence: its probability in the draft.
    """

    agrees: Bool[Array | np.ndarray, "*starts depth"]
    confidence: Float[Array | np.ndarray, "*starts depth"]


@jax.jit
def read_window(target: Network, tokens: Int[Array, "rows slots"]) -> Reading:
    """One pass of the whole network over each row."""
    slots = tokens.shape[1]

    def read(row):
        hidden = target.forward(row, jnp.arange(slots), causal(slots), None)
        return Reading(hidden.new_kv, argmax_rows(target.unembed(hidden.features)))

    return jax.lax.map(read, tokens)


@partial(jax.jit, static_argnames="depth")
def draft_everywhere(
    target: Network,
    tokens: Int[Array, "rows slots"],
    reading: Reading,
    starts: Int[Array, " starts"],
    skip: Skips,
    *,
    depth: int,
) -> Drafts:
    """Drafts `depth` tokens from each of `starts` in each row: `[rows, starts, depth]`.

    `skip` is traced: one program serves every set.
    """

    def draft(layers, row, choices, start):
        slots = start + jnp.arange(depth)
        prefix = KVCache(layers, start)
        hidden = target.forward(row[slots], slots, causal(depth), prefix, skip=skip)
        logits = target.unembed(hidden.features)
        drafted = argmax_rows(logits)
        laws = jax.nn.softmax(logits, axis=-1)
        confidence = jnp.take_along_axis(laws, drafted[:, None], axis=1)[:, 0]
        return Drafts(drafted == choices[slots], confidence)

    def draft_row(inputs):
        layers, row, choices = inputs
        return jax.vmap(partial(draft, layers, row, choices))(starts)

    # Row by row: logits of all of them at once may be larger than the network.
    return jax.lax.map(draft_row, (reading.layers, tokens, reading.choices))


class Costs(NamedTuple):
    """Measured seconds, of one row.

    attention, mlp: of one such sub-layer in the pass of a draft token; the mean over layers.
    rest: of the same pass with all of them skipped.
    passes: of a target pass, by every width up to the longest draft's, root included.
    """

    attention: float
    mlp: float
    rest: float
    passes: Mapping[int, float]

    def draft_token(self, num_attention: int, num_mlp: int) -> float:
        """t(z) with so many sub-layers kept."""
        return self.rest + num_attention * self.attention + num_mlp * self.mlp

    def target_pass(
        self, num_tokens: Int[np.ndarray, " starts"], widths: Sequence[int]
    ) -> Float[np.ndarray, " starts"]:
        """T(w), w the smallest of the ascending `widths` that holds so many tokens."""
        seconds = np.array([self.passes[width] for width in widths])
        return seconds[np.searchsorted(widths, num_tokens)]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, and back by `costs_from`."""
        return {**self._asdict(), "passes": {str(n): t for n, t in self.passes.items()}}


def costs_from(plain: Mapping[str, Any]) -> Costs:
    """Reads what `Costs.as_dict` gives."""
    return Costs(**{**plain, "passes": {int(n): t for n, t in plain["passes"].items()}})


def measure_costs(target: Network, depth: int, repeats: int = 15) -> Costs:
    """Times drafts of `depth` tokens with four sets, and target passes of every width, in turns.

    At a context of `bench.passes.CONTEXT` tokens.
    """
    num_layers = target.num_layers
    keep, leave = (False,) * num_layers, (True,) * num_layers
    sets = {
        "whole": Skips(keep, keep),
        "no attention": Skips(leave, keep),
        "no mlp": Skips(keep, leave),
        "nothing": Skips(leave, leave),
    }
    programs = {name: _draft_program(target, skip, depth) for name, skip in sets.items()}
    seconds = {
        name: float(np.median(times)) / depth
        for name, times in time_in_turns(programs, repeats).items()
    }
    attention = (seconds["whole"] - seconds["no attention"]) / num_layers
    mlp = (seconds["whole"] - seconds["no mlp"]) / num_layers
    passes = measure_passes(target, range(1, depth + 2), repeats=repeats).seconds
    # Noise may make next to nothing negative; a search would then keep what it should skip.
    return Costs(max(attention, 0.0), max(mlp, 0.0), seconds["nothing"], passes)


def _draft_program(target: Network, skip: Skips, depth: int):
    drafter = LayerSkip(skip, depth, threshold=0.0, adaptive=None)
    nothing = jnp.zeros((depth + 1, 0), jnp.float32)
    context = Context(
        tokens=jnp.zeros(NUM_SLOTS, jnp.int32),
        length=jnp.int32(CONTEXT + 1),
        room=jnp.int32(depth + 1),
        stop_ids=jnp.zeros(0, jnp.int32),
        warp=Warp(),
        cache=target.empty_cache(NUM_SLOTS)._replace(length=jnp.int32(CONTEXT)),
        recent=Recent(jnp.zeros(depth + 1, jnp.int32), nothing, nothing, jnp.int32(0)),
    )
    state = LayerSkipState(jnp.float32(0), jnp.float32(0), jnp.int32(0))

    @jax.jit
    def draft(target, key, rows):
        propose = partial(drafter.propose, Params(target, ()), key)
        return jax.vmap(propose)(*rows)[0].tokens

    # A batch of one row, mapped as decoding maps it.
    rows = jax.tree.map(lambda array: array[None], (state, context))
    return partial(draft, target, jax.random.key(0), rows)


class Worth(NamedTuple):
    """What one set is expected to do.

    num_speculative_tokens: the longest draft, the best of those tried.
    threshold: of the exit, likewise.
    tau: tokens emitted a step, the bonus token INCLUDED.
    drafted: tokens drafted a step.
    agreement: share of all drafted tokens, at any place up to the longest draft tried, that are the
        whole network's choice there; `None` where decoding was timed.
    """

    seconds_per_token: float
    num_speculative_tokens: int
    threshold: float
    tau: float
    drafted: float
    agreement: float | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, the bonus token left out."""
        return (self.tau - 1) / self.drafted


def worth_of(
    drafts: Drafts,
    counted: Bool[np.ndarray, "rows starts"],
    seconds_per_draft_token: float,
    costs: Costs,
    lengths: Sequence[int],
    thresholds: Sequence[float],
) -> Worth:
    """The formula above, at the length and the threshold where it is least.

    Args:
        drafts: from every slot of each row: `[rows, starts, depth]`.
        counted: those that fit into their row, its first ones; decoding begins at the first.
        seconds_per_draft_token: t(z).
        costs: of target passes.
        lengths: of the longest draft, to try.
        thresholds: of the exit, to try.
    """
    matching = np.cumprod(drafts.agrees, axis=2).sum(axis=2)
    agreement = float(np.mean(np.asarray(drafts.agrees)[counted]))

    def at(length: int, threshold: float) -> Worth:
        goes_on = np.cumprod(drafts.confidence[..., : length - 1] >= threshold, axis=2)
        drafted = 1 + goes_on.sum(axis=2)
        emitted = 1 + np.minimum(matching, drafted)
        begins = step_starts(emitted, counted)
        tau, drafted = float(np.mean(emitted[begins])), drafted[begins]
        passes = costs.target_pass(drafted + 1, LayerSkip(None, length).widths)
        seconds = float(np.mean(drafted * seconds_per_draft_token + passes))
        return Worth(seconds / tau, length, threshold, tau, float(np.mean(drafted)), agreement)

    settings = itertools.product(lengths, thresholds)
    return min(itertools.starmap(at, settings), key=lambda worth: worth.seconds_per_token)


def step_starts(
    emitted: Int[np.ndarray, "rows starts"], counted: Bool[np.ndarray, "rows starts"]
) -> Bool[np.ndarray, "rows starts"]:
    """Where the steps of decoding begin: each so many slots behind the last as that one emitted."""
    begins = np.zeros_like(counted)
    rooms = counted.sum(axis=1).tolist()
    for row, (steps, room) in enumerate(zip(emitted.tolist(), rooms, strict=True)):
        start = 0
        while start < room:
            begins[row, start] = True
            start += steps[start]
    return begins


class FixedText:
    """A window that sets draft on: what any set drafts there, by one compiled program for all.

    Attributes:
        starts: slots that drafts begin at.
        counted: `[rows, starts]`, whether a draft from there fits into the row.

    Raises:
        ValueError: drafts of `depth` tokens, or no draft at all, do not fit.
    """

    def __init__(self, target: Network, window: Window, depth: int):
        if depth < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {depth}.")
        self.target, self.window, self.depth = target, window, depth
        self.starts = np.arange(window.first, window.tokens.shape[1] - depth + 1)
        self.counted = self.starts[None] + depth <= window.lengths[:, None]
        if not self.counted.any():
            raise ValueError(
                f"num_speculative_tokens: no row of the window has room for a draft of {depth} "
                f"tokens after its first {window.first + 1}; use longer rows."
            )
        self._tokens = jnp.asarray(window.tokens)
        self._reading = read_window(target, self._tokens)

    def drafts(self, skip: Skips) -> Drafts:
        """What a set drafts from every slot, `[rows, starts, depth]`; see `counted`."""
        drafts = draft_everywhere(
            self.target,
            self._tokens,
            self._reading,
            jnp.asarray(self.starts),
            Skips(*(jnp.asarray(part, jnp.float32) for part in skip)),
            depth=self.depth,
        )
        return Drafts(*map(np.asarray, drafts))


class ExpectedSeconds:
    """The objective: a set to its `Worth`. Deterministic, one compiled program for all sets.

    Raises:
        ValueError: drafts of `depth` tokens, or no draft at all, do not fit; a threshold outside
            [0, 1].
    """

    def __init__(
        self,
        target: Network,
        window: Window,
        costs: Costs,
        depth: int,
        thresholds: Sequence[float],
    ):
        for threshold in thresholds:
            if not 0 <= threshold <= 1:
                raise ValueError(f"threshold must be in [0, 1], got {threshold}.")
        self.text, self.costs = FixedText(target, window, depth), costs
        self.thresholds = tuple(thresholds)

    def __call__(self, skip: Skips) -> Worth:
        kept = [len(part) - sum(part) for part in skip]
        return worth_of(
            self.text.drafts(skip),
            self.text.counted,
            self.costs.draft_token(*kept),
            self.costs,
            range(1, self.text.depth + 1),
            self.thresholds,
        )


class MeasuredSeconds:
    """The objective of the paper: seconds per token of decoding itself, each set compiled anew.

    Noisy, and a matter of the machine. The fastest of `repeats` runs counts.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        depth: int,
        threshold: float,
        repeats: int = 2,
    ):
        self.model, self.prompts, self.repeats = model, list(prompts), repeats
        self.config = GenerationConfig(max_new_tokens=max_new_tokens)
        self.settings = {"num_speculative_tokens": depth, "threshold": threshold}
        LayerSkip(None, **self.settings)  # refuses settings out of range now

    def __call__(self, skip: Skips) -> Worth:
        drafter = LayerSkip(skip, **self.settings, adaptive=None)

        def decode_all() -> list[Metrics]:
            # One at a time: speculation is for few sequences, the search for one.
            return [
                generate(self.model, prompt, self.config, drafter).metrics
                for prompt in self.prompts
            ]

        runs = [decode_all() for _ in range(self.repeats)]
        # Hundreds of programs would not fit into memory.
        jax.clear_caches()
        num_tokens, num_steps, num_drafted = (
            sum(getattr(metrics, name) for metrics in runs[0])
            for name in ("num_tokens", "num_verify_steps", "num_draft_tokens")
        )
        seconds = min(sum(metrics.seconds or 0.0 for metrics in run) for run in runs)
        return Worth(
            seconds / num_tokens,
            self.settings["num_speculative_tokens"],
            self.settings["threshold"],
            num_tokens / num_steps,
            num_drafted / num_steps,
        )
