"""Self-speculative decoding of diffusion language models (SSD, arXiv 2510.04147).

Of the two methods called SSD this is the one for DIFFUSION models; serving engines also call
Speculative Speculative Decoding so.

A stepwise decision depends on the canvas alone, so many of them can be checked in one pass. From
the prediction in hand the next N decisions are drafted; one pass reads the canvas as it is and the
N canvases that the drafts lead to; and as many drafts are kept as the stepwise decision on the
canvas before confirms, in position AND token. The next drafts are made from the pass's own
prediction for the last canvas kept, so a round costs one pass. What comes out is what stepwise
decoding gives. Stepwise decoding IS this step with no drafts.

Drafts form a chain, or on request a tree: then each canvas has several successors, the drafted
decision and those with another slot in place of its last, and of all that were read the longest
path of confirmed ones is kept.

A canvas cannot be checked from within another's pass, as a draft's prefix is in a causal network:
where every token sees all others, one token filled in changes all keys and values. So each canvas
is a row of its own. A network that is causal over blocks reads the blocks in which canvases differ
side by side, as it would read the nodes of a tree: what they have in common is read once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import append
from jaxspec.core.loop import run
from jaxspec.core.sampling import at_least_float32
from jaxspec.core.tree import tree_from_paths
from jaxspec.core.types import LanguageModel, Params, PyTree, Stop, Tree
from jaxspec.diffusion.denoise import (
    Blocks,
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
    advance,
    covers,
    look_up,
    nothing_known,
    with_another_last,
)


@dataclasses.dataclass(frozen=True)
class SelfSpeculation:
    """How to draft. Lossless with respect to stepwise decoding with the same settings.

    Attributes:
        num_drafts: decisions drafted ahead, at most.
        branch: drafted successors of each canvas. 1 is a chain; with more, a pass reads
            1 + branch + branch^2 + ... canvases, to be right where the order of slots is in doubt.
        lookup: draft tokens that followed the same two tokens earlier in the text, where there are
            such, in place of those that the last pass predicts.
        costs: what a pass with 0, 1, ..., `num_drafts` drafts costs, in any unit, as
            `jaxspec.denoising.measure_costs` measures it. A batch then drafts as many decisions as
            pay best by how often its rows' drafts were kept so far, which may be none. `None`
            drafts all it can.
        deterministic: every pass has one shape, whatever is drafted, so that no kernel is chosen by
            it. `stepwise` then gives the stepwise decoding of that shape.
        limit: so many of `num_drafts` are drafted, at most; `None` for all.
        lossy_top_k: LOSSY: keeps a draft if its tokens are among the k likeliest at its slots,
            whatever slots stepwise decoding would fill in (the paper's relaxed verification). The
            text is another one. `None` is the lossless rule.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    num_drafts: int = 4
    costs: Sequence[float] | None = None
    branch: int = 1
    lookup: bool = False
    deterministic: bool = False
    limit: int | None = None
    lossy_top_k: int | None = None

    def __post_init__(self):
        for name, least in (("num_drafts", 0), ("branch", 1), ("limit", 0), ("lossy_top_k", 1)):
            value = getattr(self, name)
            if value is None and name in ("limit", "lossy_top_k"):
                continue
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(
                    f"{name} must be a whole number of at least {least}, got {value!r}."
                )
        if self.branch > 1 and self.branch**self.num_drafts > _MOST_LEAVES:
            raise ValueError(
                f"branch: {self.branch} successors of each of {self.num_drafts} drafts give "
                f"{self.branch**self.num_drafts} ends, at most {_MOST_LEAVES} are possible; take "
                "fewer drafts."
            )
        if self.limit is not None and self.limit > self.num_drafts:
            raise ValueError(
                f"limit must be in 0..{self.num_drafts} (num_drafts), got {self.limit}."
            )
        if self.costs is not None:
            # What is static must hash.
            costs = tuple(float(cost) for cost in self.costs)
            object.__setattr__(self, "costs", costs)
            self._check_costs(costs)

    def _check_costs(self, costs: tuple[float, ...]) -> None:
        if self.deterministic:
            raise ValueError("costs: deterministic passes all cost the same; leave costs out.")
        if len(costs) != self.num_drafts + 1:
            raise ValueError(
                f"costs must have {self.num_drafts + 1} entries, one for each number of drafts "
                f"from 0 to {self.num_drafts}, got {len(costs)}."
            )
        if not all(0 < cost < np.inf for cost in costs):
            raise ValueError(f"costs must be positive and finite, got {costs}.")

    @property
    def stepwise(self) -> "SelfSpeculation":
        """The same passes without drafts."""
        return dataclasses.replace(self, limit=0, costs=None)

    @property
    def tree(self) -> Tree:
        """The canvases of a pass: node 0 is what is decided, each other one has one decision more.

        They are sorted by how many decisions are drafted in them.
        """
        return _complete_tree(self.branch, self.num_drafts)

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Canvases per row and pass worth compiling."""
        if self.costs is None:
            return (len(self.tree.parents),)
        if self.branch > 1:
            return tuple(int(n) for n in np.cumsum(np.bincount(self.tree.depths)))
        counts = [1]
        while counts[-1] < self.num_drafts + 1:
            counts.append(min(2 * counts[-1], self.num_drafts + 1))
        return tuple(counts)


_MOST_LEAVES = 256


@lru_cache
def _complete_tree(branch: int, depth: int) -> Tree:
    levels = (itertools.product(range(branch), repeat=length) for length in range(1, depth + 1))
    return tree_from_paths(list(itertools.chain.from_iterable(levels)))


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
    drafted, accepted: entry i counts the passes that i drafts, one after the other, came with, or
        were kept in.
    """

    num_calls: Int[Array, ""]
    num_canvases: Int[Array, ""]
    drafted: Int[Array, " levels"]
    accepted: Int[Array, " levels"]


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
        decision drafted than its parent in `SelfSpeculation.tree`.
    num_drafted, num_accepted: how many decisions of a path came along, and how many were kept.
    """

    canvases: Int[Array, "nodes slots"]
    num_drafted: Int[Array, ""]
    num_accepted: Int[Array, ""]


class Drafts(NamedTuple):
    """A row's canvases for one pass, as `SelfSpeculation.tree` has them.

    possible: False where nothing could be drafted.
    valid: those that are read.
    limit: how many decisions are worth drafting.
    """

    canvases: Canvas
    possible: Bool[Array, " nodes"]
    valid: Bool[Array, " nodes"]
    limit: Int[Array, ""]


def begin(
    params: Params, request: Request, *, plan: Plan, speculation: SelfSpeculation
) -> DenoiseState:
    """A row before its first pass: masks after the prompt."""
    network, block = params.target, plan.block
    mask = plan.rules.mask_token_id
    length = request.length
    slots = jnp.arange(plan.slots)
    start, wanted = length, length + plan.max_new
    end = wanted
    if plan.block_causal:
        # Blocks are whole, so the last one may hold more than was asked for.
        start, end = length - length % block, -(-wanted // block) * block
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
    none = jnp.zeros(speculation.num_drafts + 1, jnp.int32)
    return DenoiseState(
        row=Row(
            length,
            wanted,
            end,
            request.stop_ids,
            request.pace,
            request.temperature,
            request.guidance,
            key,
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


def decide(plan: Plan, row: Row, canvas: Canvas, prediction: Prediction) -> Canvas:
    """The stepwise decision of a row; drafts are made and checked by it alike."""
    until = row.wanted, row.end
    return advance(plan.rules, row.pace, row.stop_ids, row.length, *until, canvas, prediction)


def draft(
    plan: Plan, speculation: SelfSpeculation, limit: Int[Array, ""], state: DenoiseState
) -> Drafts:
    """The decisions that the prediction in hand leads to, as far as it reaches; `limit` of them."""
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
        fits = fits & _can_be_read(plan, state, drafted)
        canvases = jax.tree.map(lambda every, one: every.at[index].set(one), canvases, drafted)
        return (canvases, possible.at[index].set(fits)), None

    canvases = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], nodes, axis=0), state.canvas)
    possible = jnp.repeat(running, nodes)
    drafted = np.arange(1, nodes), tree.parents[1:], tree.ranks[1:]
    xs = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), drafted)
    (canvases, possible), _ = jax.lax.scan(extend, (canvases, possible), xs)
    valid = possible & (jnp.asarray(tree.depths) <= limit)
    return Drafts(canvases, possible, valid, limit)


def _can_be_read(plan: Plan, state: DenoiseState, canvas: Canvas) -> Bool[Array, ""]:
    """Whether a pass over drafts can read this one. Nothing is read of a canvas that has ended."""
    ended = canvas.stop != Stop.RUNNING
    if plan.reopens:
        return ended | (canvas.step > 0)
    if plan.cache == "blocks":
        return ended | (canvas.start <= state.kept.cache.length + plan.block)
    return jnp.bool_(True)


def _num_worth_drafting(
    plan: Plan, speculation: SelfSpeculation, states: DenoiseState
) -> Int[Array, ""]:
    """How many drafts cost least to the end, if each is kept as often as those before.

    One number for a batch: a pass is as wide as its widest row, whatever the others draft, and the
    end is that of the slowest: of the text, or of the block where rows open blocks together.
    """
    most = speculation.num_drafts if speculation.limit is None else speculation.limit
    if speculation.costs is None:
        return jnp.int32(most)
    kept = jnp.cumprod(
        jnp.repeat((states.hits / states.trials)[:, None], speculation.num_drafts, axis=1), axis=1
    )
    decided = 1.0 + jnp.pad(jnp.cumsum(kept, axis=1), ((0, 0), (1, 0)))
    canvas, slots = states.canvas, jnp.arange(plan.slots)
    ends = canvas.start + plan.block if plan.reopens else states.row.end
    masks = (canvas.tokens == plan.rules.mask_token_id) & (slots[None] < ends[:, None])
    left = jnp.where(canvas.stop == Stop.RUNNING, jnp.sum(masks, axis=1), 0)
    passes = jnp.max(left[:, None] / decided, axis=0)
    # `argmin` takes the first: no drafts, where it makes no difference.
    best = jnp.argmin(passes * jnp.asarray(speculation.costs, jnp.float32))
    return jnp.minimum(best, most).astype(jnp.int32)


def denoise_step(
    params: Params, states: DenoiseState, *, plan: Plan, speculation: SelfSpeculation = STEPWISE
) -> tuple[DenoiseState, DenoiseInfo]:
    """One round of a batch: drafts, one pass, as many decisions as it confirms.

    Under `"prefix"` and `"dual"` rows that open a block and rows within one need different passes:
    the former wait for the latter.
    """
    if not _adapts(speculation):
        return _round(plan, speculation, params, states)
    rounds = partial(_round, plan, speculation), partial(_round_without_drafts, plan, speculation)
    return jax.lax.cond(_num_worth_drafting(plan, speculation, states) > 0, *rounds, params, states)


def _adapts(speculation: SelfSpeculation) -> bool:
    return speculation.costs is not None and speculation.num_drafts > 0


def _round(
    plan: Plan, speculation: SelfSpeculation, params: Params, states: DenoiseState
) -> tuple[DenoiseState, DenoiseInfo]:
    limit = _num_worth_drafting(plan, speculation, states)
    drafts = jax.vmap(partial(draft, plan, speculation, limit))(states)
    found = _pass(params.target, plan, speculation.tree, states, drafts)
    return _accept_rows(plan, speculation, states, drafts, *found)


def _round_without_drafts(
    plan: Plan, speculation: SelfSpeculation, params: Params, states: DenoiseState
) -> tuple[DenoiseState, DenoiseInfo]:
    """The same for a batch in which no row drafts, without the work that drafts are.

    The first of them is made all the same, to be judged: it may be worth reading again.
    """
    first = dataclasses.replace(speculation, num_drafts=1, limit=None, costs=None)
    nodes, every = len(first.tree.parents), len(speculation.tree.parents)
    drafts = jax.vmap(partial(draft, plan, first, jnp.int32(0)))(states)
    alone = dataclasses.replace(plan, node_counts=(1,))
    if plan.cache == "none" and not plan.rules.allow_mask_token:
        # What lies beyond is for drafts alone, and half of what would be unembedded.
        alone = dataclasses.replace(alone, window=plan.block)
    kept, predictions, blocks = _pass(params.target, alone, first.tree, states, drafts)
    predictions = jax.tree.map(partial(_widen, axis=2, size=plan.window), predictions)
    predictions, blocks = _with_nodes((predictions, blocks), nodes)
    states, info = _accept_rows(plan, first, states, drafts, kept, predictions, blocks)
    return states, info._replace(canvases=_with_nodes(info.canvases, every))


def _pass(
    network: LanguageModel, plan: Plan, tree: Tree, states: DenoiseState, drafts: Drafts
) -> tuple[PyTree, Prediction, Finished | tuple[()]]:
    """What is kept, what is predicted for every canvas, and what blocks a pass finished of them."""
    if plan.cache == "blocks":
        return states.kept, *_pass_over_blocks(network, plan, tree, states, drafts)
    if plan.reopens:
        return *_pass_over_rest(network, plan, states, drafts), ()
    return states.kept, _pass_over_canvases(network, plan, states, drafts), ()


def _pass_over_canvases(
    network: LanguageModel, plan: Plan, states: DenoiseState, drafts: Drafts
) -> Prediction:
    def read(row: Row, canvas: Canvas) -> Prediction:
        return read_canvas(network, plan, row, canvas)[0]

    def branch(count: int, states: DenoiseState, drafts: Drafts) -> Prediction:
        return _of_nodes(read, count, plan, states.row, drafts)

    branches = [partial(branch, count) for count in plan.node_counts]
    return _switch(_needed(plan, drafts.valid), branches, states, drafts)


def _take_part(plan: Plan, states: DenoiseState) -> Bool[Array, " rows"]:
    """Which rows a pass is for: all that run. Rows that open a block wait for those within one.

    Drafts take rows to the ends of their blocks after different numbers of passes. Were a block
    opened whenever a row is ready, nearly every step of a large batch would read whole canvases.
    """
    running = states.canvas.stop == Stop.RUNNING
    if not plan.reopens:
        return running
    within = running & (states.canvas.step > 0)
    return jnp.where(jnp.any(within), within, running)


def _pass_over_rest(
    network: LanguageModel, plan: Plan, states: DenoiseState, drafts: Drafts
) -> tuple[PyTree, Prediction]:
    """The short pass, for rows within a block; if there are none, the one that opens a block."""
    takes_part = _take_part(plan, states)

    def reopen(states: DenoiseState, drafts: Drafts) -> tuple[PyTree, Prediction]:
        fresh, layers = jax.vmap(partial(read_canvas, network, plan))(states.row, states.canvas)
        return _choose(takes_part, layers, states.kept), _repeat_nodes(fresh, plan)

    def branch(count: int, states: DenoiseState, drafts: Drafts) -> Prediction:
        def read(row_and_kept: tuple[Row, PyTree], canvas: Canvas) -> Prediction:
            row, kept = row_and_kept
            return read_rest(network, plan, row, canvas, kept)

        return _of_nodes(read, count, plan, (states.row, states.kept), drafts)

    def within(states: DenoiseState, drafts: Drafts) -> tuple[PyTree, Prediction]:
        branches = [partial(branch, count) for count in plan.node_counts]
        needed = _needed(plan, drafts.valid & takes_part[:, None])
        return states.kept, _switch(needed, branches, states, drafts)

    is_within = jnp.any(takes_part & (states.canvas.step > 0))
    return jax.lax.cond(is_within, within, reopen, states, drafts)


def _pass_over_blocks(
    network: LanguageModel, plan: Plan, tree: Tree, states: DenoiseState, drafts: Drafts
) -> tuple[Prediction, Finished]:
    """Reads each canvas's first block that is not cached, and the next one where it is needed."""
    wanted = jax.vmap(partial(_blocks_wanted, plan, tree))(states, drafts)
    widths = _block_counts(tree, plan.node_counts)
    if plan.one_shape:
        widths = widths[-1:]

    def branch(width: int, states: DenoiseState, drafts: Drafts, wanted: tuple[Array, Array]):
        def read(row: Row, canvases: Canvas, kept: Finished, wanted: tuple[Array, Array]):
            return read_blocks(network, plan, row, canvases, kept, _listed(tree, width, *wanted))

        return jax.vmap(read)(states.row, drafts.canvases, states.kept, wanted)

    most = jnp.max(jnp.sum(jnp.stack(wanted), axis=(0, 2)))
    index = jnp.sum(most > jnp.asarray(widths[:-1], jnp.int32), dtype=jnp.int32)
    return _switch(index, [partial(branch, width) for width in widths], states, drafts, wanted)


def _blocks_wanted(
    plan: Plan, tree: Tree, state: DenoiseState, drafts: Drafts
) -> tuple[Bool[Array, " nodes"], Bool[Array, " nodes"]]:
    """Of which canvases to read the first block that is not cached, and of which the next one.

    A canvas whose parent has that block full already has the same one.
    """
    canvases, parents = drafts.canvases, np.maximum(tree.parents, 0)
    begin = state.kept.cache.length
    following = begin + plan.block
    reads = drafts.valid & (canvases.stop == Stop.RUNNING)
    is_past = reads & (canvases.start > begin)
    shares = is_past & is_past[parents] & (jnp.asarray(tree.parents) >= 0)
    # The next drafts may run on into the next block, most likely if all of a path is kept.
    slots = jnp.arange(canvases.tokens.shape[1])
    of_block = (slots >= begin) & (slots < following)
    left = jnp.sum((canvases.tokens == plan.rules.mask_token_id) & of_block[None], axis=1)
    is_child = tree.parents[:, None] == np.arange(len(parents))[None]
    is_last = reads & ~jnp.any(reads[:, None] & is_child, axis=0)
    runs_on = is_last & (left <= drafts.limit) & (following < state.row.end)
    return reads & ~shares, is_past | runs_on


def _block_counts(tree: Tree, node_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks per row and pass worth compiling: one of each canvas, and of each path's last two."""
    counts = set()
    for nodes in node_counts:
        num_leaves = nodes - len(set(tree.parents[1:nodes].tolist()))
        counts |= {nodes, nodes + num_leaves}
    return tuple(sorted(counts))


def _listed(
    tree: Tree, width: int, firsts: Bool[Array, " nodes"], nexts: Bool[Array, " nodes"]
) -> Blocks:
    """A list of the blocks that are wanted: the first ones, then the next ones."""
    nodes = len(tree.parents)
    index = jnp.arange(nodes)
    ancestors = jnp.asarray(tree.ancestors)
    # The nearest canvas on the path whose first block is read.
    holder = jnp.max(jnp.where(ancestors & firsts[None], index[None], 0), axis=1)
    # What is said of the next block for a canvas that is not there yet is there to draft from, and
    # what is said for one that comes after it will do.
    later = jnp.argmax(ancestors.T & nexts[None], axis=1)
    first_entries = jnp.cumsum(firsts) - 1
    next_entries = jnp.cumsum(nexts) - 1 + jnp.sum(firsts)
    entries = jnp.arange(width)
    is_first = firsts[None] & (first_entries[None] == entries[:, None])
    is_next = nexts[None] & (next_entries[None] == entries[:, None])
    canvas = jnp.argmax(is_first | is_next, axis=1)
    of_nodes = jnp.clip(jnp.stack([first_entries[holder], next_entries[later]]), 0, width - 1)
    return Blocks(
        canvas=canvas,
        is_next=jnp.any(is_next, axis=1),
        before=of_nodes[0][canvas],
        firsts=of_nodes[0],
        nexts=of_nodes[1],
        has_first=firsts | nexts,
        has_next=nexts[later],
    )


def _needed(plan: Plan, valid: Bool[Array, "rows nodes"]) -> Int[Array, ""]:
    """Index of the smallest of the plan's node counts that holds every row's valid nodes."""
    most = jnp.max(jnp.where(valid, jnp.arange(1, valid.shape[1] + 1), 0))
    return jnp.sum(most > jnp.asarray(plan.node_counts[:-1], jnp.int32), dtype=jnp.int32)


def _switch(index: Int[Array, ""], branches: list[Callable], *operands: Any) -> Any:
    # Outside of any map: under one, every branch would be computed.
    if len(branches) == 1:
        return branches[0](*operands)
    return jax.lax.switch(index, branches, *operands)


def _of_nodes(read: Callable, count: int, plan: Plan, rows: Any, drafts: Drafts) -> Any:
    """Reads the first `count` canvases of every row; of the others, zeros: nothing is known."""
    canvases = jax.tree.map(lambda leaf: leaf[:, :count], drafts.canvases)
    found = jax.vmap(jax.vmap(read, in_axes=(None, 0)))(rows, canvases)

    return _with_nodes(found, plan.num_nodes)


def _with_nodes(found: Any, num_nodes: int) -> Any:
    """Arrays of rows and nodes with more of the latter: zeros."""
    return jax.tree.map(partial(_widen, axis=1, size=num_nodes), found)


def _widen(leaf: Array, axis: int, size: int) -> Array:
    if axis >= leaf.ndim:
        return leaf
    return jnp.pad(
        leaf, [(0, size - leaf.shape[axis] if i == axis else 0) for i in range(leaf.ndim)]
    )


def _repeat_nodes(predictions: Prediction, plan: Plan) -> Prediction:
    nodes = plan.num_nodes
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], nodes, axis=1), predictions)


def _choose(rows: Bool[Array, " rows"], chosen: Any, others: Any) -> Any:
    def choose(one: Array, other: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(choose, chosen, others)


def _accept_rows(
    plan: Plan,
    speculation: SelfSpeculation,
    states: DenoiseState,
    drafts: Drafts,
    kept: PyTree,
    predictions: Prediction,
    blocks: Finished | tuple[()],
) -> tuple[DenoiseState, DenoiseInfo]:
    """`_accept` for every row that the pass was for; the others stay as they are."""
    accept = jax.vmap(partial(_accept, plan, speculation))
    after, info = accept(states._replace(kept=kept), drafts, predictions, blocks)
    if not plan.reopens:
        return after, info
    takes_part = _take_part(plan, states)
    changed = ("canvas", "prediction", "hits", "trials", "stats")
    moved, stayed = ({name: getattr(each, name) for name in changed} for each in (after, states))
    after = after._replace(**_choose(takes_part, moved, stayed))
    return after, info._replace(
        num_drafted=jnp.where(takes_part, info.num_drafted, 0),
        num_accepted=jnp.where(takes_part, info.num_accepted, 0),
    )


def _accept(
    plan: Plan,
    speculation: SelfSpeculation,
    state: DenoiseState,
    drafts: Drafts,
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
    # The first draft can be judged even if it was not read.
    first = drafts.possible & (depths == 1)
    looked_at = jnp.where(
        num_drafted > 0, jnp.minimum(num_accepted + 1, num_drafted), jnp.any(first)
    )
    right = jnp.where(num_drafted > 0, num_accepted, jnp.any(agrees & first))
    canvas, prediction, block = jax.tree.map(
        lambda leaf: leaf[node], (decided, predictions, blocks)
    )
    kept = state.kept
    if isinstance(block, Finished):
        read = jax.tree.map(lambda leaf: leaf[node], drafts.canvases)
        full = running & (read.start > kept.cache.length) & (read.stop == Stop.RUNNING)
        kept = Finished(
            append(kept.cache, block.cache.layers, jnp.where(full, plan.block, 0)),
            jnp.where(full, block.edge, kept.edge),
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
        hits=_FORGETTING * state.hits + right,
        trials=_FORGETTING * state.trials + looked_at,
        stats=stats,
    )
    return state, DenoiseInfo(drafts.canvases.tokens, num_drafted, num_accepted)


def _agrees(
    speculation: SelfSpeculation, canvases: Canvas, decided: Canvas, predictions: Prediction
) -> Bool[Array, " nodes"]:
    """Which canvases are what stepwise decoding makes of their parents; node 0 is, by itself."""
    parents = jnp.asarray(np.maximum(speculation.tree.parents, 0))
    if speculation.lossy_top_k is None:
        same = jnp.all(canvases.tokens == decided.tokens[parents], axis=1)
        same = same & (canvases.stop == decided.stop[parents])
    else:
        assert predictions.likeliest is not None, "rules list as many as are looked at"
        window = jnp.arange(predictions.tokens.shape[1])
        slots = predictions.start[parents][:, None] + window[None]
        drafted = jnp.take_along_axis(canvases.tokens, slots, axis=1)
        before = jnp.take_along_axis(canvases.tokens[parents], slots, axis=1)
        listed = jnp.any(predictions.likeliest[parents] == drafted[:, :, None], axis=2)
        same = jnp.all((drafted == before) | listed, axis=1)
    return same.at[0].set(True)


# What is left of a past draft's weight in the estimate after each round.
_FORGETTING = 0.95


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
    states = begin_rows(params, requests, plan=plan, speculation=speculation)
    if _adapts(speculation):
        # Rounds without drafts have a loop of their own, out of which XLA moves what is the same in
        # all of them, as it does in stepwise decoding; out of a conditional it does not.
        step = partial(_rounds_up_to_drafts, plan, speculation)
    states = run(step, params, states, unfinished)
    return Outcome(states.canvas, states.stats)


def _rounds_up_to_drafts(
    plan: Plan, speculation: SelfSpeculation, params: Params, states: DenoiseState
) -> tuple[DenoiseState, tuple[()]]:
    """Rounds without drafts for as long as no row drafts, then one with drafts."""

    def alone(states: DenoiseState) -> Bool[Array, ""]:
        return unfinished(states) & (_num_worth_drafting(plan, speculation, states) == 0)

    def with_drafts(states: DenoiseState) -> DenoiseState:
        return _round(plan, speculation, params, states)[0]

    without = partial(_round_without_drafts, plan, speculation)
    states = run(without, params, states, alone)
    return jax.lax.cond(unfinished(states), with_drafts, lambda states: states, states), ()


def unfinished(states: DenoiseState) -> Bool[Array, ""]:
    """True while any row is running."""
    return jnp.any(states.canvas.stop == Stop.RUNNING)


@partial(jax.jit, static_argnames=("plan", "speculation"))
def begin_rows(
    params: Params, requests: Request, *, plan: Plan, speculation: SelfSpeculation
) -> DenoiseState:
    """The states of a batch before the first pass."""
    start = partial(begin, plan=plan, speculation=speculation)
    return jax.vmap(start, in_axes=(None, 0))(params, requests)


@partial(jax.jit, static_argnames=("plan", "speculation", "most"))
def run_rounds(
    params: Params, states: DenoiseState, *, plan: Plan, speculation: SelfSpeculation, most: int
) -> tuple[DenoiseState, Int[Array, ""]]:
    """At most so many rounds of a batch, and how many there were before all rows had ended."""
    step = partial(denoise_step, plan=plan, speculation=speculation)

    def advance(held: tuple[DenoiseState, Array]) -> tuple[DenoiseState, Array]:
        states, count = held
        return step(params, states)[0], count + 1

    def goes_on(held: tuple[DenoiseState, Array]) -> Bool[Array, ""]:
        return unfinished(held[0]) & (held[1] < most)

    return jax.lax.while_loop(goes_on, advance, (states, jnp.int32(0)))


@partial(jax.jit, static_argnames=("plan", "speculation"), donate_argnames=("states",))
def step_stream(
    params: Params, states: DenoiseState, *, plan: Plan, speculation: SelfSpeculation
) -> tuple[DenoiseState, DenoiseInfo]:
    """One step; `states` is donated."""
    return denoise_step(params, states, plan=plan, speculation=speculation)
