"""Self-speculative decoding of diffusion language models (SSD, arXiv 2510.04147).

Of the two methods called SSD this is the one for DIFFUSION models; serving engines also call
Speculative Speculative Decoding so.

A stepwise decision depends on the canvas alone, so many of them can be checked in one pass. From
the prediction in hand the next N decisions are drafted; one pass reads the canvas as it is and the
N canvases that the drafts lead to; and as many drafts are kept as the stepwise decision on the
canvas before confirms, in position AND token. The next drafts are made from the pass's own
prediction for the last canvas kept, so a round costs one pass. What comes out is what stepwise
decoding gives. Stepwise decoding IS this step with no drafts.

A canvas cannot be checked from within another's pass, as a draft's prefix is in a causal network:
where every token sees all others, one token filled in changes all keys and values. So each canvas
is a row of its own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import append
from jaxspec.core.loop import run
from jaxspec.core.sampling import at_least_float32
from jaxspec.core.types import LanguageModel, Params, PyTree, Stop
from jaxspec.diffusion.denoise import (
    Finished,
    Plan,
    Row,
    read_blocks,
    read_canvas,
    read_prompt,
    read_rest,
)
from jaxspec.diffusion.unmask import (
    Canvas,
    Pace,
    Prediction,
    Rules,
    advance,
    covers,
    nothing_known,
)

AcceptFn = Callable[[Rules, Canvas, Canvas, Canvas, Prediction], Bool[Array, ""]]


def same_decision(
    rules: Rules, before: Canvas, drafted: Canvas, decided: Canvas, prediction: Prediction
) -> Bool[Array, ""]:
    """The lossless rule: the decision fills in the same slots with the same tokens."""
    del rules, before, prediction  # The canvases say it all.
    return jnp.all(drafted.tokens == decided.tokens) & (drafted.stop == decided.stop)


@dataclasses.dataclass(frozen=True)
class SelfSpeculation:
    """How to draft. Lossless with respect to stepwise decoding with the same settings.

    Attributes:
        num_drafts: decisions drafted ahead, at most.
        costs: what a pass over 1, 2, ..., `num_drafts` + 1 canvases per row costs, in any unit, as
            `jaxspec.denoising.measure_costs` measures it. Each row then drafts as many decisions as
            pay best by how often its drafts were kept so far, which may be none. `None` drafts all
            it can.
        accept: the rule; anything but `same_decision` gives up the equality.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    num_drafts: int = 4
    costs: tuple[float, ...] | None = None
    accept: AcceptFn = same_decision

    def __post_init__(self):
        if self.num_drafts < 0:
            raise ValueError(f"num_drafts must be at least 0, got {self.num_drafts}.")
        if self.costs is None:
            return
        if len(self.costs) != self.num_drafts + 1:
            raise ValueError(
                f"costs must have {self.num_drafts + 1} entries, one for each number of drafts "
                f"from 0 to {self.num_drafts}, got {len(self.costs)}."
            )
        if min(self.costs) <= 0:
            raise ValueError(f"costs must be positive, got {min(self.costs)}.")

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Canvases per row and pass worth compiling."""
        if self.costs is None:
            return (self.num_drafts + 1,)
        counts = [1]
        while counts[-1] < self.num_drafts + 1:
            counts.append(min(2 * counts[-1], self.num_drafts + 1))
        return tuple(counts)


STEPWISE = SelfSpeculation(0)


class Request(NamedTuple):
    """What one row is asked for.

    tokens: the prompt, right-padded to a bucket; `length` >= 1 of them are real.
    seed: numbers that name the randomness, see `core.decode.Prompt`.
    """

    tokens: Int[Array, " bucket"]
    length: Int[Array, ""]
    seed: Int[Array, " numbers"]
    stop_ids: Int[Array, " stop_ids"]
    pace: Pace
    temperature: Float[Array, ""] | None = None
    guidance: Float[Array, ""] | None = None


class DenoiseStats(NamedTuple):
    """Counters of one row. Reading the prompt's whole blocks is not counted.

    num_calls: passes it took part in.
    num_canvases: canvases that those read.
    drafted, accepted: entry i counts the passes that i drafts came with, or were kept in.
    """

    num_calls: Int[Array, ""]
    num_canvases: Int[Array, ""]
    drafted: Int[Array, " nodes"]
    accepted: Int[Array, " nodes"]


class DenoiseState(NamedTuple):
    """Everything one row carries from step to step.

    prediction: in hand, from the last pass.
    kept: keys and values, as `Plan.cache` asks for.
    hits, trials: drafts confirmed, and drafts looked at; the past counts for less and less.
    """

    row: Row
    canvas: Canvas
    prediction: Prediction
    kept: PyTree
    hits: Float[Array, ""]
    trials: Float[Array, ""]
    stats: DenoiseStats


class DenoiseInfo(NamedTuple):
    """What is worth seeing of one step of one row.

    canvases: tokens as the pass read them; node 0 is what was decided, each other one has one more
        decision drafted.
    num_drafted, num_accepted: how many of those came along, and how many were kept.
    """

    canvases: Int[Array, "nodes slots"]
    num_drafted: Int[Array, ""]
    num_accepted: Int[Array, ""]


class Chain(NamedTuple):
    """A row's canvases for one pass: the one it has, then the drafted ones, each from the last.

    possible: False where nothing could be drafted.
    valid: those that are read.
    """

    canvases: Canvas
    possible: Bool[Array, " nodes"]
    valid: Bool[Array, " nodes"]


def begin(params: Params, request: Request, *, plan: Plan) -> DenoiseState:
    """A row before its first pass: masks after the prompt."""
    network, block = params.target, plan.block
    mask = plan.rules.mask_token_id
    length = request.length
    slots = jnp.arange(plan.slots)
    start, end = length, length + plan.max_new
    if plan.block_causal:
        # Blocks are whole, so the last one may hold more than was asked for.
        start, end = length - length % block, -(-end // block) * block
    prompt = jnp.pad(request.tokens, (0, plan.slots - request.tokens.shape[0]))
    tokens = jnp.where(slots < length, prompt, jnp.where(slots < end, mask, 0))
    of_block = (slots >= start) & (slots < start + block)
    canvas = Canvas(
        tokens=tokens,
        start=start,
        step=jnp.int32(0),
        num_masks=jnp.sum((tokens == mask) & of_block, dtype=jnp.int32),
        stop=jnp.int32(Stop.RUNNING),
    )
    key = jax.random.key(request.seed[0])
    for number in request.seed[1:]:
        key = jax.random.fold_in(key, number)
    kept = ()
    if plan.cache == "blocks":
        kept = read_prompt(network, plan, request.tokens, length)
    elif plan.reopens:
        kept = network.empty_cache(plan.slots).layers
    wide = at_least_float32(jnp.zeros((), _dtype_of(network))).dtype
    none = jnp.zeros(plan.max_drafts + 1, jnp.int32)
    return DenoiseState(
        row=Row(
            length,
            end,
            request.stop_ids,
            request.pace,
            request.temperature,
            request.guidance,
            key,
        ),
        canvas=canvas,
        prediction=nothing_known(plan.window, wide),
        kept=kept,
        # As if one of two drafts had been kept.
        hits=jnp.float32(1.0),
        trials=jnp.float32(2.0),
        stats=DenoiseStats(jnp.int32(0), jnp.int32(0), none, none),
    )


def _dtype_of(network: LanguageModel) -> jnp.dtype:
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 1), bool)
    return jax.eval_shape(
        lambda tokens, mask: network.forward(tokens, tokens, mask, None).features, one, mask
    ).dtype


def decide(plan: Plan, row: Row, canvas: Canvas, prediction: Prediction) -> Canvas:
    """The stepwise decision of a row; drafts are made and checked by it alike."""
    return advance(plan.rules, row.pace, row.stop_ids, row.length, row.end, canvas, prediction)


def draft(plan: Plan, speculation: SelfSpeculation, state: DenoiseState) -> Chain:
    """The decisions that the prediction in hand leads to, as far as it reaches."""
    running = state.canvas.stop == Stop.RUNNING
    limit = _num_worth_drafting(speculation, state)

    def extend(before: tuple[Canvas, Array], depth: Int[Array, ""]):
        canvas, possible = before
        drafted = decide(plan, state.row, canvas, state.prediction)
        possible = possible & (canvas.stop == Stop.RUNNING)
        possible = possible & covers(state.prediction, canvas, plan.block)
        possible = possible & _can_be_read(plan, state, drafted)
        return (drafted, possible), (drafted, possible, possible & (depth <= limit))

    depths = jnp.arange(1, plan.max_drafts + 1)
    first = (state.canvas, running, running)
    _, drafted = jax.lax.scan(extend, first[:2], depths)
    chain = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), first, drafted)
    return Chain(*chain)


def _can_be_read(plan: Plan, state: DenoiseState, canvas: Canvas) -> Bool[Array, ""]:
    """Whether a pass over drafts can read this one. Nothing is read of a canvas that has ended."""
    ended = canvas.stop != Stop.RUNNING
    if plan.reopens:
        return ended | (canvas.step > 0)
    if plan.cache == "blocks":
        return ended | (canvas.start <= state.kept.cache.length + plan.block)
    return jnp.bool_(True)


def _num_worth_drafting(speculation: SelfSpeculation, state: DenoiseState) -> Int[Array, ""]:
    """How many drafts give most decisions per cost, if each is kept as often as those before."""
    if speculation.costs is None:
        return jnp.int32(speculation.num_drafts)
    rate = state.hits / state.trials
    kept = jnp.cumprod(jnp.full(speculation.num_drafts, rate))
    decisions = 1.0 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(kept)])
    # `argmax` takes the first: no drafts, where it makes no difference.
    return jnp.argmax(decisions / jnp.asarray(speculation.costs, jnp.float32)).astype(jnp.int32)


def denoise_step(
    params: Params, states: DenoiseState, *, plan: Plan, speculation: SelfSpeculation = STEPWISE
) -> tuple[DenoiseState, DenoiseInfo]:
    """One round of every row of a batch: drafts, one pass, as many decisions as it confirms.

    Under `"prefix"` and `"dual"` rows that open a block and rows within one take different passes,
    so a batch in which both occur makes two.
    """
    chains = jax.vmap(partial(draft, plan, speculation))(states)
    network = params.target
    if plan.cache == "blocks":
        predictions, blocks = _pass_over_blocks(network, plan, states, chains)
    elif plan.reopens:
        predictions, layers = _pass_over_rest(network, plan, states, chains)
        states, blocks = states._replace(kept=layers), ()
    else:
        predictions, blocks = _pass_over_canvases(network, plan, states, chains), ()
    return jax.vmap(partial(_accept, plan, speculation))(states, chains, predictions, blocks)


def _pass_over_canvases(
    network: LanguageModel, plan: Plan, states: DenoiseState, chains: Chain
) -> Prediction:
    def read(row: Row, canvas: Canvas) -> Prediction:
        return read_canvas(network, plan, row, canvas)[0]

    def branch(count: int, states: DenoiseState, chains: Chain) -> Prediction:
        return _of_nodes(read, count, plan, states.row, chains)

    branches = [partial(branch, count) for count in plan.node_counts]
    return _switch(_needed(plan, chains.valid), branches, states, chains)


def _pass_over_rest(
    network: LanguageModel, plan: Plan, states: DenoiseState, chains: Chain
) -> tuple[Prediction, PyTree]:
    """The pass that opens a block for rows at its beginning, the short one for the others."""
    running = states.canvas.stop == Stop.RUNNING
    opens = running & (states.canvas.step == 0)
    unknown = _repeat_nodes(states.prediction, plan)

    def reopen(states: DenoiseState) -> tuple[Prediction, PyTree]:
        fresh, layers = jax.vmap(partial(read_canvas, network, plan))(states.row, states.canvas)
        return _repeat_nodes(fresh, plan), _choose(opens, layers, states.kept)

    def stay_shut(states: DenoiseState) -> tuple[Prediction, PyTree]:
        return unknown, states.kept

    def branch(count: int, states: DenoiseState, chains: Chain) -> Prediction:
        def read(row_and_kept: tuple[Row, PyTree], canvas: Canvas) -> Prediction:
            row, kept = row_and_kept
            return read_rest(network, plan, row, canvas, kept)

        return _of_nodes(read, count, plan, (states.row, states.kept), chains)

    def within(states: DenoiseState, chains: Chain) -> Prediction:
        branches = [partial(branch, count) for count in plan.node_counts]
        needed = _needed(plan, chains.valid & ~opens[:, None])
        return _switch(needed, branches, states, chains)

    rest = jax.lax.cond(
        jnp.any(running & ~opens), within, lambda states, chains: unknown, states, chains
    )
    opened, layers = jax.lax.cond(jnp.any(opens), reopen, stay_shut, states)
    return _choose(opens, opened, rest), layers


def _pass_over_blocks(
    network: LanguageModel, plan: Plan, states: DenoiseState, chains: Chain
) -> tuple[Prediction, Finished]:
    """Reads the first block that is not cached, and the next one too where a row needs it."""

    def needs_next(state: DenoiseState, chain: Chain) -> Bool[Array, ""]:
        begin = state.kept.cache.length
        following = begin + plan.block
        reads = chain.valid & (chain.canvases.stop == Stop.RUNNING)
        is_past = jnp.any(reads & (chain.canvases.start > begin))
        # The last canvas may be kept, and then drafts will run on into the next block.
        last = chain.canvases.tokens[jnp.sum(chain.valid) - 1]
        slots = jnp.arange(last.shape[0])
        left = jnp.sum((last == plan.rules.mask_token_id) & (slots >= begin) & (slots < following))
        runs_on = (left <= plan.max_drafts) & (following < state.row.end) & jnp.any(reads)
        return is_past | (runs_on if plan.max_drafts else False)

    def branch(width: int, count: int, states: DenoiseState, chains: Chain):
        def read(row_and_kept: tuple[Row, Finished], canvas: Canvas):
            row, kept = row_and_kept
            return read_blocks(network, plan, row, canvas, kept, width)

        return _of_nodes(read, count, plan, (states.row, states.kept), chains)

    branches = [
        partial(branch, width, count)
        for count in plan.node_counts
        for width in (plan.block, 2 * plan.block)
    ]
    wide = jnp.any(jax.vmap(needs_next)(states, chains))
    return _switch(2 * _needed(plan, chains.valid) + wide, branches, states, chains)


def _needed(plan: Plan, valid: Bool[Array, "rows nodes"]) -> Int[Array, ""]:
    """Index of the smallest of the plan's node counts that holds every row's valid nodes."""
    most = jnp.max(jnp.sum(valid, axis=1))
    return jnp.sum(most > jnp.asarray(plan.node_counts[:-1], jnp.int32), dtype=jnp.int32)


def _switch(index: Int[Array, ""], branches: list[Callable], *operands: Any) -> Any:
    # Outside of any map: under one, every branch would be computed.
    if len(branches) == 1:
        return branches[0](*operands)
    return jax.lax.switch(index, branches, *operands)


def _of_nodes(read: Callable, count: int, plan: Plan, rows: Any, chains: Chain) -> Any:
    """Reads the first `count` canvases of every row; of the others, zeros: nothing is known."""
    canvases = jax.tree.map(lambda leaf: leaf[:, :count], chains.canvases)
    found = jax.vmap(jax.vmap(read, in_axes=(None, 0)))(rows, canvases)

    def widen(leaf: Array) -> Array:
        others = [(0, 0), (0, plan.max_drafts + 1 - count)] + [(0, 0)] * (leaf.ndim - 2)
        return jnp.pad(leaf, others)

    return jax.tree.map(widen, found)


def _repeat_nodes(predictions: Prediction, plan: Plan) -> Prediction:
    nodes = plan.max_drafts + 1
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], nodes, axis=1), predictions)


def _choose(rows: Bool[Array, " rows"], chosen: Any, others: Any) -> Any:
    def choose(one: Array, other: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(choose, chosen, others)


def _accept(
    plan: Plan,
    speculation: SelfSpeculation,
    state: DenoiseState,
    chain: Chain,
    predictions: Prediction,
    blocks: Finished | tuple[()],
) -> tuple[DenoiseState, DenoiseInfo]:
    """Keeps the drafts that stepwise decoding would have decided, then decides once more."""
    running = state.canvas.stop == Stop.RUNNING
    decided = jax.vmap(partial(decide, plan, state.row))(chain.canvases, predictions)
    befores, afters = [
        jax.tree.map(lambda leaf, part=part: leaf[part], (chain.canvases, decided, predictions))
        for part in (slice(None, -1), slice(1, None))
    ]
    agrees = jax.vmap(partial(speculation.accept, plan.rules))(
        befores[0], afters[0], befores[1], befores[2]
    )
    num_drafted = jnp.sum(chain.valid[1:], dtype=jnp.int32)
    num_accepted = jnp.sum(jnp.cumprod((agrees & chain.valid[1:]).astype(jnp.int32)))
    # The first draft can be judged even if it was not read.
    looked_at = jnp.where(
        num_drafted > 0, jnp.minimum(num_accepted + 1, num_drafted), jnp.any(chain.possible[1:])
    )
    right = jnp.where(num_drafted > 0, num_accepted, jnp.any(agrees[:1] & chain.possible[1:2]))
    canvas, prediction, block = jax.tree.map(
        lambda leaf: leaf[num_accepted], (decided, predictions, blocks)
    )
    kept = state.kept
    if isinstance(block, Finished):
        read = jax.tree.map(lambda leaf: leaf[num_accepted], chain.canvases)
        full = running & (read.start > kept.cache.length) & (read.stop == Stop.RUNNING)
        kept = Finished(
            append(kept.cache, block.cache.layers, jnp.where(full, plan.block, 0)),
            jnp.where(full, block.edge, kept.edge),
        )
    counts = jnp.arange(plan.max_drafts + 1)
    stats = DenoiseStats(
        num_calls=state.stats.num_calls + running,
        num_canvases=state.stats.num_canvases + jnp.sum(chain.valid, dtype=jnp.int32),
        drafted=state.stats.drafted + (running & (counts == num_drafted)),
        accepted=state.stats.accepted + (running & (counts == num_accepted)),
    )
    state = state._replace(
        canvas=canvas,
        prediction=prediction,
        kept=kept,
        hits=_FORGETTING * state.hits + right,
        trials=_FORGETTING * state.trials + looked_at,
        stats=stats,
    )
    return state, DenoiseInfo(chain.canvases.tokens, num_drafted, num_accepted)


# What is left of a past draft's weight in the estimate after each round.
_FORGETTING = 0.9


class Outcome(NamedTuple):
    """What is left of a row when it has ended."""

    canvas: Canvas
    stats: DenoiseStats


@partial(jax.jit, static_argnames=("plan", "speculation"))
def denoise_rows(
    params: Params, requests: Request, *, plan: Plan, speculation: SelfSpeculation
) -> Outcome:
    """Fills in a batch of rows to the end: one program."""
    step = partial(denoise_step, plan=plan, speculation=speculation)
    states = jax.vmap(partial(begin, plan=plan), in_axes=(None, 0))(params, requests)
    states = run(step, params, states, unfinished)
    return Outcome(states.canvas, states.stats)


def unfinished(states: DenoiseState) -> Bool[Array, ""]:
    """True while any row is running."""
    return jnp.any(states.canvas.stop == Stop.RUNNING)


@partial(jax.jit, static_argnames=("plan",))
def begin_stream(params: Params, requests: Request, *, plan: Plan) -> DenoiseState:
    """The states before the first pass, for a host loop over `step_stream`."""
    return jax.vmap(partial(begin, plan=plan), in_axes=(None, 0))(params, requests)


@partial(jax.jit, static_argnames=("plan", "speculation"), donate_argnames=("states",))
def step_stream(
    params: Params, states: DenoiseState, *, plan: Plan, speculation: SelfSpeculation
) -> tuple[DenoiseState, DenoiseInfo]:
    """One step; `states` is donated."""
    return denoise_step(params, states, plan=plan, speculation=speculation)
