"""Loops over a step: `run` on the device, `stream` from the host. Any decoder's step will do.

`decode` and `decode_stream` put prefill before them. The whole of `decode` is one program: one
compilation and one dispatch per shape of request, however many rows, whatever they accept.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core.cache import pad_caches
from jaxspec.core.decode import Prompt, begin, samples_of, speculative_step
from jaxspec.core.forms import exchangeable
from jaxspec.core.grammar import Grammar
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import DecodeState, Drafter, Info, Params, StateT, StepFn, Stop

CAPACITY_MULTIPLE = 64
CHUNK = 256
"""Tokens of a prompt that are read in one pass, at most; see `places_at_once`."""

# One fetch of a host loop after each step: whether any row is running, the longest row's length.
Progress = tuple[Bool[Array, ""], Int[Array, ""]]


@exchangeable
def placed(states: StateT) -> StateT:
    """A batch of rows where it is to lie: on one device there is nothing to do."""
    return states


def run(
    step: StepFn,
    params: Params,
    states: StateT,
    goes_on: Callable[[StateT], Bool[Array, ""]],
) -> StateT:
    """Repeats `step` on a batch of rows while `goes_on(states)`: any decoder's step and states.

    The loop stays outside every map: a map over it would select whole caches at each step.
    """

    def advance(states: StateT) -> StateT:
        states, _ = step(params, states)
        return states

    return jax.lax.while_loop(goes_on, advance, states)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Static settings of a decoding program, except the drafter and the models' settings.

    Attributes:
        capacities: of the caches, ascending. Rows are decoded in the smallest cache that holds
            them, which grows between loops. So attention reads little more than the places in use.
        chunk: tokens per pass over a prompt.
        num_samples: rows per prompt; they lie side by side and share one prefill.
    """

    capacities: tuple[int, ...]
    chunk: int
    num_samples: int = 1
    logprobs: bool = False
    warped_logprobs: bool = False


def plan_decoding(
    bucket: int,
    max_new_tokens: int,
    drafter: Drafter,
    *,
    num_samples: int = 1,
    logprobs: bool = False,
    warped_logprobs: bool = False,
) -> DecodePlan:
    """Chooses cache capacities for prompts of up to `bucket` tokens.

    The last capacity holds everything with one step's overhang; before it come its halves, for as
    long as they leave room to decode a while in.
    """
    overhang = drafter.tree_shape[1] + 1
    capacities = [round_up(bucket + max_new_tokens + overhang)]
    while (half := round_up(capacities[0] // 2)) >= bucket + overhang + CAPACITY_MULTIPLE and (
        half < capacities[0]
    ):
        capacities.insert(0, half)
    return DecodePlan(tuple(capacities), min(CHUNK, bucket), num_samples, logprobs, warped_logprobs)


def round_up(size: int, multiple: int = CAPACITY_MULTIPLE) -> int:
    """Returns the next multiple; caches come in multiples of 64.

    Example:
        >>> round_up(65), round_up(65, 32)
        (128, 96)
    """
    return -(-size // multiple) * multiple


def unfinished(states: DecodeState) -> Bool[Array, ""]:
    """True while any row is running."""
    return jnp.any(states.stop == Stop.RUNNING)


def _longest(states: DecodeState) -> Int[Array, ""]:
    """Length of the longest running row: the next step needs that many places and the depth.

    A stopped row still writes its overhang, past what it holds: where, no longer matters.
    """
    return jnp.max(jnp.where(states.stop == Stop.RUNNING, states.context.length, 0))


@partial(jax.jit, static_argnames=("drafter", "plan"))
def decode(
    params: Params,
    prompts: Prompt,
    automaton: StopAutomaton | None = None,
    grammar: Grammar | None = None,
    *,
    drafter: Drafter,
    plan: DecodePlan,
) -> DecodeState:
    """Prefills and decodes a batch of rows to the end.

    Args:
        params: target and draft model.
        prompts: a `Prompt` whose arrays have a leading batch axis; each makes `plan.num_samples`
            rows.
        automaton: stop strings, shared by the batch.
        grammar: texts that rows may emit; each begins in the state `prompts.grammar`.
        drafter: the method; static, so equal settings share one program.
        plan: see `plan_decoding`.

    Returns:
        The final states: text, lengths, reasons, log-probabilities, counters.
    """
    step = partial(speculative_step, drafter=drafter, automaton=automaton, grammar=grammar)
    states = _begin_batch(params, prompts, drafter, plan)
    for capacity in plan.capacities:

        def goes_on(states: DecodeState, capacity: int = capacity) -> Bool[Array, ""]:
            return unfinished(states) & (_longest(states) + drafter.tree_shape[1] <= capacity)

        states = run(step, params, pad_caches(states, capacity), goes_on)
    return states


def decode_stream(
    params: Params,
    prompts: Prompt,
    automaton: StopAutomaton | None = None,
    grammar: Grammar | None = None,
    *,
    drafter: Drafter,
    plan: DecodePlan,
) -> Iterator[tuple[DecodeState, Info | None]]:
    """The same decoding from a host loop: yields each step's state and `Info` as it happens.

    First comes the state after prefill, with `None`. A yielded state is donated to the next step:
    read what you need before asking for more.
    """
    capacity, *larger = plan.capacities
    states, progress = _begin_stream(params, prompts, drafter=drafter, plan=plan)
    running, length = jax.device_get(progress)
    yield states, None
    while running:
        if larger and length + drafter.tree_shape[1] > capacity:
            capacity = larger.pop(0)
            states = _grow_stream(states, capacity=capacity)
        states, info, progress = _step_stream(params, states, automaton, grammar, drafter=drafter)
        running, length = jax.device_get(progress)
        yield states, info


def bytes_of_row(params: Params, prompts: Prompt, drafter: Drafter, plan: DecodePlan) -> int:
    """Returns the bytes that one row holds while it is decoded, found by tracing.

    They are the caches, the text, what the drafter keeps, and of one pass the logits, the mask of
    the nodes, and what `nodes_picked` says.
    """
    first = jax.tree.map(lambda leaf: leaf[:1], prompts)
    plan = dataclasses.replace(plan, num_samples=1)
    leaves = jax.tree.leaves(_largest_states.eval_shape(params, first, drafter=drafter, plan=plan))
    nodes = max(drafter.widths)
    scores = nodes * (params.target.vocab_size + nodes)
    place = jax.tree.leaves(jax.eval_shape(lambda: params.target.empty_cache(1).layers))
    picked = nodes_picked(drafter) * sum(leaf.size * leaf.dtype.itemsize for leaf in place)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + 4 * scores + picked


def nodes_picked(drafter: Drafter) -> int:
    """Returns the places of a cache that are held while the accepted path is picked.

    On CPUs the products of `core.cache.select_nodes` are held: each node once for each level. A
    step of one node picks nothing.
    """
    nodes, depth = drafter.tree_shape
    on_cpu = jax.default_backend() == "cpu"
    return nodes * (depth + 1) if on_cpu and depth else 0


def shape_of_info(
    params: Params,
    prompts: Prompt,
    automaton: StopAutomaton | None,
    grammar: Grammar | None,
    *,
    drafter: Drafter,
    plan: DecodePlan,
) -> Info:
    """Returns the shapes of the `Info` that `decode_stream` yields, found by tracing."""
    states, _ = _begin_stream.eval_shape(params, prompts, drafter=drafter, plan=plan)
    _, info, _ = _step_stream.eval_shape(params, states, automaton, grammar, drafter=drafter)
    return info


@partial(jax.jit, static_argnames=("drafter", "plan"))
def _largest_states(
    params: Params, prompts: Prompt, *, drafter: Drafter, plan: DecodePlan
) -> DecodeState:
    states = _begin_batch(params, prompts, drafter, plan)
    return pad_caches(states, plan.capacities[-1])


def _begin_batch(
    params: Params, prompts: Prompt, drafter: Drafter, plan: DecodePlan
) -> DecodeState:
    row = partial(
        begin,
        drafter=drafter,
        text_capacity=plan.capacities[-1],
        chunk=plan.chunk,
        logprobs=plan.logprobs,
        warped_logprobs=plan.warped_logprobs,
    )
    states = jax.vmap(row, in_axes=(None, 0))(params, prompts)
    samples = jax.vmap(partial(samples_of, num_samples=plan.num_samples))(states)
    return placed(jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), samples))


@partial(jax.jit, static_argnames=("drafter", "plan"))
def _begin_stream(
    params: Params, prompts: Prompt, *, drafter: Drafter, plan: DecodePlan
) -> tuple[DecodeState, Progress]:
    states = pad_caches(_begin_batch(params, prompts, drafter, plan), plan.capacities[0])
    return states, (unfinished(states), _longest(states))


@partial(jax.jit, static_argnames=("drafter",), donate_argnames=("states",))
def _step_stream(
    params: Params,
    states: DecodeState,
    automaton: StopAutomaton | None,
    grammar: Grammar | None,
    *,
    drafter: Drafter,
) -> tuple[DecodeState, Info, Progress]:
    states, info = speculative_step(
        params, states, drafter=drafter, automaton=automaton, grammar=grammar
    )
    return states, info, (unfinished(states), _longest(states))


_grow_stream = jax.jit(pad_caches, static_argnames=("capacity",))
