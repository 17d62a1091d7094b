"""The step's bench: what it leaves out, and that it repeats what it says it times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LayerSkip, NoDraft, PromptLookup
from jaxspec.core.types import Params, Stop, Warp
from jaxspec.drafters import AdaptiveExit
from jaxspec.measure.step import (
    begin_and_propose,
    draft_loop,
    measure_drafter,
    record_drafting,
    repeat_drafting,
    repetitive_prompt,
    step_loop,
    target_loop,
    widths_used,
)
from jaxspec.models import Skips

NUM_STEPS = 3


def test_widths_are_those_that_the_drafts_needed():
    drafter = PromptLookup(4)
    assert drafter.widths == (1, 2, 5)
    drafted = np.asarray([6, 1, 0, 2, 1])  # steps by depth
    assert widths_used(drafted, drafter) == {1: 0.6, 2: 0.1, 5: 0.3}
    assert widths_used(np.asarray([10]), NoDraft()) == {1: 1.0}


@pytest.fixture(scope="module")
def begun(model):
    params = Params(model.network, ())
    prompts = repetitive_prompt(model.vocab_size)
    return params, *begin_and_propose(params, prompts, drafter=PromptLookup())


def test_every_step_of_a_loop_counts_and_none_stops(begun):
    params, states, _ = begun
    last = step_loop(params, states, drafter=PromptLookup(), num_steps=NUM_STEPS)
    assert last.stats.num_steps.tolist() == [NUM_STEPS]
    assert last.stop.tolist() == [Stop.RUNNING]


def test_a_target_pass_alone_is_the_pass_of_the_first_step(begun):
    params, states, proposals = begun
    logits, _ = target_loop(
        params,
        states.context.cache,
        proposals,
        drafter=PromptLookup(),
        width=1,
        num_steps=NUM_STEPS,
    )
    last = step_loop(params, states, drafter=PromptLookup(), num_steps=NUM_STEPS)
    assert last.context.tokens[0, states.context.length[0]] == jnp.argmax(logits[0, 0])


def test_nothing_of_a_draft_is_left_uncomputed(begun):
    """A loop hands over whole proposals: of what nobody reads, no time would be measured."""
    params, states, proposals = begun
    for num_steps in (1, 3):
        drafting = repeat_drafting(states, num_steps)
        _, kept = draft_loop(params, states.draft, drafting, drafter=PromptLookup())
        jax.tree.map(np.testing.assert_array_equal, kept, proposals)


def test_drafts_alone_are_those_of_decoding(model):
    """Exits as early, with the same state at the end."""
    depth = model.network.num_layers
    leaps = AdaptiveExit(step=1.0, threshold_memory=0.0)
    drafter = LayerSkip(Skips((False,) * depth, (True,) * depth), 4, 0.0, leaps)
    params = Params(model.network, ())
    states, _ = begin_and_propose(params, repetitive_prompt(model.vocab_size), drafter=drafter)
    counts = set()
    for num_steps in range(1, 5):
        last, drafting = record_drafting(params, states, drafter=drafter, num_steps=num_steps)
        draft, proposals = draft_loop(params, states.draft, drafting, drafter=drafter)
        jax.tree.map(np.testing.assert_array_equal, draft, last.draft)
        assert last.draft.drafted[0] == proposals.valid[0].sum() - 1
        counts.add(int(last.draft.drafted[0]))
    assert len(counts) > 1


def test_all_parts_take_time(begun):
    times = measure_drafter(begun[0], PromptLookup(), Warp(), NUM_STEPS, repeats=1)
    assert min(times.step, times.draft, times.target) > 0
    assert 1 <= times.width <= 5
