"""Self-speculative decoding of diffusion language models (SSD, arXiv 2510.04147).

Two methods are called SSD; this is the one for DIFFUSION models, not Speculative Speculative
Decoding.

A stepwise decision depends on the canvas alone, so several of them can be checked in one pass:

1. The last prediction drafts the next N decisions.
2. One pass reads the canvas as it is, and the N canvases that the drafts lead to.
3. A draft is kept if the stepwise decision on the canvas before it confirms it, in position AND
   token, and all drafts before it are kept.
4. The pass's prediction for the last canvas kept drafts the next round, so a round costs one pass.

The text is that of stepwise decoding, which IS this step with no drafts.

Drafts form a chain, or on request a tree: each canvas then has several successors, the drafted
decision and those with another position in place of its last. The longest confirmed path is kept.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import append
from jaxspec.core.decode import named_key
from jaxspec.core.loop import placed, run
from jaxspec.core.sampling import at_least_float32
from jaxspec.core.types import LanguageModel, Params, PyTree, StepFn, Stop
from jaxspec.diffusion.canvases import choose_rows, pass_over_rows, take_part, widen, with_nodes
from jaxspec.diffusion.passes import CanvasSettings, DenoisePlan, Finished, read_prompt
from jaxspec.diffusion.speculation import (
    FORGETTING,
    STEPWISE,
    CanvasDrafts,
    DenoiseState,
    DenoiseStats,
    SelfSpeculation,
    adapts,
    worth_drafting,
)
from jaxspec.diffusion.unmask import (
    Canvas,
    Pace,
    Prediction,
    advance,
    covers,
    look_up,
    nothing_known,
    with_another_last,
)


class DenoisePrompt(NamedTuple):
    """Prompt and settings of one row.

    Attributes:
        tokens: the prompt, right-padded to a bucket.
        length: ids of the prompt, at least 1.
        seed: numbers that name the randomness, see `core.decode.Prompt`.
        stop_ids: ids that end the text; -1 for unused entries.
        pace: number of positions that each step fills in.
        temperature: `None` if no row of the batch draws.
        guidance: see `CanvasSettings`.
    """

    tokens: Int[Array, " bucket"]
    length: Int[Array, ""]
    seed: Int[Array, " numbers"]
    stop_ids: Int[Array, " stop_ids"]
    pace: Pace
    temperature: Float[Array, ""] | None = None
    guidance: Float[Array, ""] | None = None


class DenoiseInfo(NamedTuple):
    """Record of one step of one row.

    Attributes:
        canvases: tokens as the pass read them; node 0 is the decided canvas, each other one has one
            more decision drafted than its parent in `SelfSpeculation.tree`.
        num_drafted: drafted decisions of the longest path that was read.
        num_accepted: drafted decisions that were kept.
    """

    canvases: Int[Array, "nodes positions"]
    num_drafted: Int[Array, ""]
    num_accepted: Int[Array, ""]


Round = StepFn[DenoiseState, DenoiseInfo]


def begin(
    params: Params, prompt: DenoisePrompt, *, plan: DenoisePlan, speculation: SelfSpeculation
) -> DenoiseState:
    """Returns a row before its first pass: masks after the prompt."""
    network, block = params.target, plan.block
    mask = plan.rules.mask_token_id
    length = prompt.length
    positions = jnp.arange(plan.canvas_size)
    start, wanted = length, length + plan.max_new
    end = wanted
    if plan.block_causal:
        # Blocks are whole, so the last one may be longer than the text asked for.
        start, end = length - length % block, -(-wanted // block) * block
    given = jnp.pad(prompt.tokens, (0, plan.canvas_size - prompt.tokens.shape[0]))
    tokens = jnp.where(positions < length, given, jnp.where(positions < end, mask, 0))
    of_block = (positions >= start) & (positions < start + block)
    canvas = Canvas(
        tokens=tokens,
        start=start,
        step=jnp.int32(0),
        num_masks=jnp.sum((tokens == mask) & of_block, dtype=jnp.int32),
        stop=jnp.int32(Stop.RUNNING),
    )
    kept = ()
    if plan.cache == "blocks":
        kept = read_prompt(network, plan, prompt.tokens, length)
    elif plan.reopens:
        kept = network.empty_cache(plan.canvas_size).layers
    wide = at_least_float32(jnp.zeros((), _dtype_of(network))).dtype
    none = jnp.zeros(speculation.num_drafts + 1, jnp.int32)
    return DenoiseState(
        row=CanvasSettings(
            length,
            wanted,
            end,
            prompt.stop_ids,
            prompt.pace,
            prompt.temperature,
            prompt.guidance,
            named_key(prompt.seed),
        ),
        canvas=canvas,
        prediction=nothing_known(plan.rules, plan.window, wide),
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


def decide(
    plan: DenoisePlan, row: CanvasSettings, canvas: Canvas, prediction: Prediction
) -> Canvas:
    """Makes the stepwise decision of a row; drafting and checking both use it."""
    until = row.wanted, row.end
    return advance(plan.rules, row.pace, row.stop_ids, row.length, *until, canvas, prediction)


def draft(
    plan: DenoisePlan, speculation: SelfSpeculation, limit: Int[Array, ""], state: DenoiseState
) -> CanvasDrafts:
    """Drafts up to `limit` decisions from the last prediction, as far as it reaches."""
    running = state.canvas.stop == Stop.RUNNING
    tree, row = speculation.tree, state.row
    nodes = len(tree.parents)

    def extend(held: tuple[Canvas, Array], node: tuple[Array, Array, Array]):
        (canvases, possible), (index, parent, rank) = held, node
        canvas, fits = jax.tree.map(lambda leaf: leaf[parent], held)
        said = state.prediction
        if speculation.lookup:
            said = look_up(plan.rules, canvas, said)
        drafted = decide(plan, row, canvas, said)
        if speculation.branch > 1:
            said, exists = with_another_last(plan.rules, canvas, drafted, said, rank)
            drafted, fits = decide(plan, row, canvas, said), fits & exists
        fits = fits & (canvas.stop == Stop.RUNNING)
        fits = fits & covers(state.prediction, canvas, plan.block)
        fits = fits & _can_be_read(plan, state, drafted, index)
        canvases = jax.tree.map(lambda every, one: every.at[index].set(one), canvases, drafted)
        return (canvases, possible.at[index].set(fits)), None

    canvases = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], nodes, axis=0), state.canvas)
    possible = jnp.repeat(running, nodes)
    drafted = np.arange(1, nodes), tree.parents[1:], tree.ranks[1:]
    xs = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), drafted)
    (canvases, possible), _ = jax.lax.scan(extend, (canvases, possible), xs)
    valid = possible & (jnp.asarray(tree.depths) <= limit)
    return CanvasDrafts(canvases, possible, valid, limit)


def _can_be_read(
    plan: DenoisePlan, state: DenoiseState, canvas: Canvas, index: Int[Array, ""]
) -> Bool[Array, ""]:
    """Returns whether a pass can read drafted canvas `index`; one that has ended is not read."""
    ended = canvas.stop != Stop.RUNNING
    if plan.reopens:
        # The pass that opens a block reads drafts in that block, and no pass opens two.
        same = (canvas.start == state.canvas.start) & (canvas.step > 0)
        return ended | (same & ((state.canvas.step > 0) | (index < plan.opening_nodes)))
    if plan.cache == "blocks":
        return ended | (canvas.start < state.kept.cache.length + plan.window)
    return jnp.bool_(True)


def denoise_step(
    params: Params,
    states: DenoiseState,
    *,
    plan: DenoisePlan,
    speculation: SelfSpeculation = STEPWISE,
) -> tuple[DenoiseState, DenoiseInfo]:
    """Runs one round of a batch: drafts, one pass, and the decisions that it confirms.

    With the `"prefix"` and `"dual"` caches, rows that open a block and rows within one need
    different passes: the former wait for the latter.
    """
    rounds = _rounds(plan, speculation)
    if len(rounds) == 1:
        return rounds[0](params, states)
    return jax.lax.switch(worth_drafting(plan, speculation, states), rounds, params, states)


def _rounds(plan: DenoisePlan, speculation: SelfSpeculation) -> list[Round]:
    """Returns a round for each entry of `draft_counts`, with no more canvases than it needs."""
    if not adapts(speculation):
        return [partial(_round, plan, speculation)]
    with_drafts = [partial(_round_of, n, plan, speculation) for n in speculation.draft_counts[1:]]
    return [partial(round_without_drafts, plan, speculation), *with_drafts]


def _round(
    plan: DenoisePlan, speculation: SelfSpeculation, params: Params, states: DenoiseState
) -> tuple[DenoiseState, DenoiseInfo]:
    (limit,) = speculation.draft_counts
    drafts = jax.vmap(partial(draft, plan, speculation, jnp.int32(limit)))(states)
    found = pass_over_rows(params.target, plan, speculation.tree, states, drafts)
    return _accept_rows(plan, speculation, states, drafts, *found)


def _round_of(
    num_drafts: int,
    plan: DenoisePlan,
    speculation: SelfSpeculation,
    params: Params,
    states: DenoiseState,
) -> tuple[DenoiseState, DenoiseInfo]:
    """Runs a round of a batch in which every row drafts `num_drafts` decisions at most."""
    fewer = dataclasses.replace(speculation, num_drafts=num_drafts, limit=None, costs=None)
    narrow = dataclasses.replace(plan, num_nodes=len(fewer.tree.parents))
    states, info = _round(narrow, fewer, params, states)
    return states, info._replace(canvases=with_nodes(info.canvases, plan.num_nodes))


def round_without_drafts(
    plan: DenoisePlan, speculation: SelfSpeculation, params: Params, states: DenoiseState
) -> tuple[DenoiseState, DenoiseInfo]:
    """Runs a round of a batch in which no row drafts, without the work of drafting.

    The first draft is made nevertheless, to be checked: drafting may pay again.
    """
    first = dataclasses.replace(speculation, num_drafts=1, limit=None, costs=None)
    nodes = len(first.tree.parents)
    drafts = jax.vmap(partial(draft, plan, first, jnp.int32(0)))(states)
    # Positions past the block serve drafts alone, and are half of the unembedding.
    narrow = plan.cache == "none" and not plan.rules.allow_mask_token
    alone = dataclasses.replace(plan, num_nodes=1, window=plan.block if narrow else plan.window)
    kept, predictions, blocks = pass_over_rows(params.target, alone, first.tree, states, drafts)
    if narrow:
        predictions = jax.vmap(jax.vmap(partial(_in_whole_window, plan)))(predictions)
    predictions, blocks = with_nodes((predictions, blocks), nodes)
    states, info = _accept_rows(plan, first, states, drafts, kept, predictions, blocks)
    return states, info._replace(canvases=with_nodes(info.canvases, plan.num_nodes))


def _in_whole_window(plan: DenoisePlan, prediction: Prediction) -> Prediction:
    """Puts a prediction for one block into the window of all drafts.

    That window begins earlier where it would end behind the canvas.
    """
    wide = jax.tree.map(partial(widen, axis=0, size=plan.window), prediction)
    earlier = jnp.maximum(prediction.start - (plan.canvas_size - plan.window), 0)
    moved = jax.tree.map(lambda leaf: jnp.roll(leaf, earlier, axis=0) if leaf.ndim else leaf, wide)
    return moved._replace(start=prediction.start - earlier)


def _accept_rows(
    plan: DenoisePlan,
    speculation: SelfSpeculation,
    states: DenoiseState,
    drafts: CanvasDrafts,
    kept: PyTree,
    predictions: Prediction,
    blocks: Finished | tuple[()],
) -> tuple[DenoiseState, DenoiseInfo]:
    """Applies `_accept` to the rows that the pass was for; the others stay as they are."""
    accept = jax.vmap(partial(_accept, plan, speculation))
    after, info = accept(states._replace(kept=kept), drafts, predictions, blocks)
    if not plan.reopens:
        return after, info
    takes_part = take_part(plan, states)
    changed = ("canvas", "prediction", "hits", "trials", "stats")
    moved, stayed = ({name: getattr(each, name) for name in changed} for each in (after, states))
    after = after._replace(**choose_rows(takes_part, moved, stayed))
    return after, info._replace(
        num_drafted=jnp.where(takes_part, info.num_drafted, 0),
        num_accepted=jnp.where(takes_part, info.num_accepted, 0),
    )


def _accept(
    plan: DenoisePlan,
    speculation: SelfSpeculation,
    state: DenoiseState,
    drafts: CanvasDrafts,
    predictions: Prediction,
    blocks: Finished | tuple[()],
) -> tuple[DenoiseState, DenoiseInfo]:
    """Keeps the drafts that stepwise decoding would have decided, then decides once more."""
    running = state.canvas.stop == Stop.RUNNING
    tree = speculation.tree
    depths = jnp.asarray(tree.depths)
    decided = jax.vmap(partial(decide, plan, state.row))(drafts.canvases, predictions)
    agrees = _agrees(speculation, drafts.canvases, decided, predictions)
    stands = jnp.all((agrees & drafts.valid)[None] | ~jnp.asarray(tree.ancestors), axis=1)
    # The first of the deepest nodes all of whose ancestors stand.
    node = jnp.argmax(jnp.where(stands, depths, -1))
    num_accepted = depths[node]
    num_drafted = jnp.max(jnp.where(drafts.valid, depths, 0))
    # The first draft can be checked even if it was not read. A draft that was asked for and could
    # not be made counts as rejected: it saves no pass either. In a pass without drafts, one that
    # could not be made says nothing.
    first = drafts.possible & (depths == 1)
    is_judged = (drafts.limit > 0) | jnp.any(first)
    looked_at = jnp.minimum(num_accepted + 1, jnp.maximum(drafts.limit, 1))
    right = jnp.where(drafts.limit > 0, num_accepted, jnp.any(agrees & first))
    canvas, prediction, block = jax.tree.map(
        lambda leaf: leaf[node], (decided, predictions, blocks)
    )
    kept = state.kept
    if isinstance(block, Finished):
        read = jax.tree.map(lambda leaf: leaf[node], drafts.canvases)
        reads = running & (read.stop == Stop.RUNNING)
        full = jnp.where(reads, read.start - kept.cache.length, 0)
        edge = block.edge[jnp.maximum(full // plan.block - 1, 0)]
        kept = Finished(
            append(kept.cache, block.cache.layers, full), jnp.where(full > 0, edge, kept.edge)
        )
    counts = jnp.arange(state.stats.drafted.shape[0])
    stats = DenoiseStats(
        num_calls=state.stats.num_calls + running,
        num_canvases=state.stats.num_canvases + jnp.sum(drafts.valid, dtype=jnp.int32),
        drafted=state.stats.drafted + (running & (counts == num_drafted)),
        accepted=state.stats.accepted + (running & (counts == num_accepted)),
    )
    state = state._replace(
        canvas=canvas,
        prediction=prediction,
        kept=kept,
        hits=jnp.where(is_judged, FORGETTING * state.hits + right, state.hits),
        trials=jnp.where(is_judged, FORGETTING * state.trials + looked_at, state.trials),
        stats=stats,
    )
    return state, DenoiseInfo(drafts.canvases.tokens, num_drafted, num_accepted)


def _agrees(
    speculation: SelfSpeculation, canvases: Canvas, decided: Canvas, predictions: Prediction
) -> Bool[Array, " nodes"]:
    """True for canvases that stepwise decoding makes of their parents; node 0 is always True."""
    parents = jnp.asarray(np.maximum(speculation.tree.parents, 0))
    if speculation.lossy_top_k is None:
        same = jnp.all(canvases.tokens == decided.tokens[parents], axis=1)
        same = same & (canvases.stop == decided.stop[parents])
    else:
        assert predictions.likeliest is not None, "`Rules.num_likeliest` is `lossy_top_k`"
        window = jnp.arange(predictions.tokens.shape[1])
        positions = predictions.start[parents][:, None] + window[None]
        drafted = jnp.take_along_axis(canvases.tokens, positions, axis=1)
        before = jnp.take_along_axis(canvases.tokens[parents], positions, axis=1)
        listed = jnp.any(predictions.likeliest[parents] == drafted[:, :, None], axis=2)
        same = jnp.all((drafted == before) | listed, axis=1)
    return same.at[0].set(True)


class DenoiseOutcome(NamedTuple):
    """Canvas and counters of a row that has ended.

    Attributes:
        canvas: the text, and why it ended.
        stop_ids: ids that end the text; -1 for unused entries.
        stats: counters.
    """

    canvas: Canvas
    stop_ids: Int[Array, " stop_ids"]
    stats: DenoiseStats


def outcome_of(states: DenoiseState) -> DenoiseOutcome:
    """Returns the part of states that texts are made from."""
    return DenoiseOutcome(states.canvas, states.row.stop_ids, states.stats)


@partial(jax.jit, static_argnames=("plan", "speculation"))
def denoise_rows(
    params: Params, prompts: DenoisePrompt, *, plan: DenoisePlan, speculation: SelfSpeculation
) -> DenoiseOutcome:
    """Fills in a batch of rows to the end, in one program."""
    step = partial(denoise_step, plan=plan, speculation=speculation)
    states = begin_rows(params, prompts, plan=plan, speculation=speculation)
    if adapts(speculation):
        step = partial(_loops, plan, speculation)
    return outcome_of(run(step, params, states, unfinished))


def _loops(
    plan: DenoisePlan, speculation: SelfSpeculation, params: Params, states: DenoiseState
) -> tuple[DenoiseState, tuple[()]]:
    """Runs rounds with each number of drafts, in a loop of its own, as long as it pays best.

    XLA moves work that is the same in all rounds out of a loop, but not out of a conditional.
    """

    def pays_best(index: int, states: DenoiseState) -> Bool[Array, ""]:
        return unfinished(states) & (worth_drafting(plan, speculation, states) == index)

    for index, step in enumerate(_rounds(plan, speculation)):
        states = run(step, params, states, partial(pays_best, index))
    return states, ()


def unfinished(states: DenoiseState) -> Bool[Array, ""]:
    """Returns True while any row is running."""
    return jnp.any(states.canvas.stop == Stop.RUNNING)


@partial(jax.jit, static_argnames=("plan", "speculation"))
def begin_rows(
    params: Params, prompts: DenoisePrompt, *, plan: DenoisePlan, speculation: SelfSpeculation
) -> DenoiseState:
    """Returns the states of a batch before the first pass."""
    start = partial(begin, plan=plan, speculation=speculation)
    return placed(jax.vmap(start, in_axes=(None, 0))(params, prompts))


@partial(jax.jit, static_argnames=("plan", "speculation", "most"))
def run_rounds(
    params: Params,
    states: DenoiseState,
    *,
    plan: DenoisePlan,
    speculation: SelfSpeculation,
    most: int,
) -> tuple[DenoiseState, Int[Array, ""]]:
    """Runs at most `most` rounds; returns the states and the number of rounds that ran."""
    step = partial(denoise_step, plan=plan, speculation=speculation)

    def advance(held: tuple[DenoiseState, Array]) -> tuple[DenoiseState, Array]:
        states, count = held
        return step(params, states)[0], count + 1

    def continues(held: tuple[DenoiseState, Array]) -> Bool[Array, ""]:
        return unfinished(held[0]) & (held[1] < most)

    return jax.lax.while_loop(continues, advance, (states, jnp.int32(0)))


@partial(jax.jit, static_argnames=("plan", "speculation"), donate_argnames=("states",))
def step_stream(
    params: Params, states: DenoiseState, *, plan: DenoisePlan, speculation: SelfSpeculation
) -> tuple[DenoiseState, DenoiseInfo]:
    """Runs one step; `states` is donated."""
    return denoise_step(params, states, plan=plan, speculation=speculation)
