"""Self-speculative decoding gives what stepwise decoding gives, in fewer passes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import DenoiseConfig, DenoiseResult, SelfSpeculation, denoise, denoise_stream
from jaxspec.checkpoint import Model
from jaxspec.core.types import Params, Stop
from jaxspec.decoding.denoise import DenoiseRequest, measure_costs, prepare_denoising
from jaxspec.diffusion import canvases, self_speculative
from jaxspec.diffusion.passes import Blocks, read_blocks, read_canvas
from jaxspec.diffusion.self_speculative import (
    begin,
    denoise_rows,
    draft,
    outcome_of,
    step_stream,
)
from jaxspec.diffusion.speculation import worth_drafting
from jaxspec.diffusion.unmask import Canvas, Prediction, Rules, look_up
from jaxspec.models import Network
from tests.diffusion.networks import BLOCK, MASK, tiny_model

PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6])
PLAIN = DenoiseConfig(max_new_tokens=12, block_length=BLOCK, stop_token_ids=())
# By name: changes of the network, changes of the settings.
CASES = {
    "whole canvases": ({}, {}),
    "shifted": ({"shift": True}, {}),
    "two tokens per step": ({}, {"steps": 6}),
    "sampling": ({}, {"temperature": 0.8}),
    "random order": ({}, {"order": "random"}),
    "threshold": ({}, {"threshold": 0.3}),
    "linear time": ({}, {"schedule": "linear", "order": "entropy"}),
    "guidance": ({}, {"guidance": 0.5}),
    "masks allowed": ({}, {"allow_mask_token": True}),
    "stops": ({}, {"stop_token_ids": (2, 5, 11)}),
    "prefix": ({}, {"cache": "prefix"}),
    "dual": ({}, {"cache": "dual"}),
    "prefix, shifted": ({"shift": True}, {"cache": "prefix"}),
    "dual, shifted": ({"shift": True}, {"cache": "dual"}),
    "blocks": ({"block": BLOCK}, {}),
    "blocks, shifted": ({"block": BLOCK, "shift": True}, {"temperature": 0.5}),
    "blocks, two tokens per step": ({"block": BLOCK, "seed": 1}, {"steps": 6}),
    "blocks, whole ones": ({"block": BLOCK, "shift": True, "seed": 7}, {"steps": 3}),
    "blocks, threshold": ({"block": BLOCK}, {"threshold": 0.1}),
    "blocks, linear time": ({"block": BLOCK}, {"schedule": "linear", "steps": 6}),
    "blocks, nothing kept": ({"block": BLOCK, "shift": True}, {"cache": "none"}),
}
SLOW = pytest.mark.slow
EVERY_DAY = ("whole canvases", "sampling", "prefix", "dual", "blocks", "two tokens per step")


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """Compiling takes longer than running here, and no law depends on how well it is done."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def config(**changes) -> DenoiseConfig:
    return DenoiseConfig(**{**vars(PLAIN), **changes})


def tokens(result) -> list[list[int]]:
    return [row.tolist() for row in result.tokens]


def now_and_then(name: str):
    return name if name in EVERY_DAY else pytest.param(name, marks=SLOW)


@pytest.mark.parametrize("name", [now_and_then(name) for name in CASES])
def test_output_equals_stepwise_decoding(name):
    network, changes = CASES[name]
    model = tiny_model(**network)
    stepwise = denoise(model, PROMPTS, config(**changes))
    drafted = denoise(model, PROMPTS, config(**changes), SelfSpeculation(3))
    assert tokens(drafted) == tokens(stepwise)
    pairs = list(zip(drafted, stepwise, strict=True))
    for one, other in pairs:
        assert one.finish_reason == other.finish_reason
        assert one.num_calls <= other.num_calls
        assert other.num_canvases == other.num_calls
    assert any(one.num_calls < other.num_calls for one, other in pairs)


def whole_stream(steps) -> tuple[list, DenoiseResult]:
    """Returns all that a stream yields, and its return value."""
    seen = []
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as ended:
            return seen, ended.value


def test_accepting_by_the_token_alone_is_caught():
    """The faulty rule: the token is what is predicted there, whatever place would be filled in."""
    model = tiny_model(seed=2)  # one whose text depends on the order in which it is filled in
    stepwise = denoise(model, PROMPTS, PLAIN)
    faulty = denoise(model, PROMPTS, PLAIN, SelfSpeculation(3, lossy_top_k=1))
    assert tokens(faulty) != tokens(stepwise)
    assert tokens(denoise(model, PROMPTS, PLAIN, SelfSpeculation(3))) == tokens(stepwise)


def test_relaxed_verification_keeps_more_the_more_tokens_it_takes():
    model = tiny_model(seed=2)
    calls = [
        sum(row.num_calls for row in denoise(model, PROMPTS, PLAIN, SelfSpeculation(3, **lossy)))
        for lossy in ({}, {"lossy_top_k": 1}, {"lossy_top_k": 4}, {"lossy_top_k": 23})
    ]
    assert calls == sorted(calls, reverse=True)
    # Every draft is among all tokens: four decisions a pass, but for the first pass's one.
    assert calls[-1] == len(PROMPTS) * (1 + -(-11 // 4))


DRAFTS = {
    "more than a block": SelfSpeculation(2 * BLOCK - 1),
    "two successors": SelfSpeculation(2, branch=2),
    "three successors": SelfSpeculation(2, branch=3),
    "looked up": SelfSpeculation(3, lookup=True),
    "looked up, two successors": SelfSpeculation(2, branch=2, lookup=True),
    "as pays": SelfSpeculation(2, branch=2, costs=(1.0, 1.1, 1.2)),
    "as pays, a chain": SelfSpeculation(4, costs=(1.0, 1.05, 1.1, 1.15, 1.2)),
}


@pytest.mark.parametrize(
    "cache", ["none", "blocks", *(pytest.param(one, marks=SLOW) for one in ("prefix", "dual"))]
)
@pytest.mark.parametrize("name", DRAFTS)
def test_other_drafts_give_the_same_text(name, cache):
    model = tiny_model(block=BLOCK if cache == "blocks" else None)
    stepwise = denoise(model, PROMPTS, config(cache=cache))
    drafted = denoise(model, PROMPTS, config(cache=cache), DRAFTS[name])
    assert tokens(drafted) == tokens(stepwise)
    assert sum(row.num_calls for row in drafted) < sum(row.num_calls for row in stepwise)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "changes"),
    [
        (None, {"steps": 6}),
        (None, {"threshold": 0.3}),
        (BLOCK, {"threshold": 0.1}),
        (None, {"cache": "dual"}),
    ],
)
@pytest.mark.parametrize("name", DRAFTS)
def test_other_drafts_of_other_decisions_give_the_same_text(name, block, changes):
    model = tiny_model(block=block)
    stepwise = denoise(model, PROMPTS, config(**changes))
    drafted = denoise(model, PROMPTS, config(**changes), DRAFTS[name])
    assert tokens(drafted) == tokens(stepwise)


def test_a_tree_needs_no_more_passes_than_its_first_path():
    """Its canvases hold those of the chain, so wherever that is right, so is the tree."""
    calls = []
    for branch in (1, 2):
        found = [
            denoise(tiny_model(seed=seed), PROMPTS, PLAIN, SelfSpeculation(2, branch=branch))
            for seed in range(3)
        ]
        calls.append(sum(row.num_calls for result in found for row in result))
    assert calls[1] < calls[0]


def test_successors_differ_in_the_last_place():
    request = prepare_denoising(
        tiny_model(), [1], config(max_new_tokens=2 * BLOCK), SelfSpeculation(2, branch=2), 0
    )
    state, M = first_state(request), MASK
    in_hand = says([5, 6, 7, 8, 1, 1, 1, 1], [0.5, 0.9, 0.8, 0.1, 0.99, 0.99, 0.99, 0.99])
    state = state._replace(prediction=in_hand)
    drafts = draft(request.plan, request.speculation, jnp.int32(2), state)
    assert drafts.canvases.tokens[:, 1:5].tolist() == [
        [M, M, M, M],
        *([M, 6, M, M], [M, M, 7, M]),
        *([M, 6, 7, M], [5, 6, M, M], [M, 6, 7, M], [5, M, 7, M]),
    ]
    assert drafts.valid.tolist() == [True] * 7


def test_what_followed_the_same_two_tokens_is_drafted():
    rules = Rules(BLOCK, "low_confidence", MASK, MASK)
    text = jnp.asarray([4, 5, 6, 4, 5, 7, 1, 4, 5, MASK, MASK, 5], jnp.int32)
    places = jnp.int32(8)
    canvas = Canvas(text, places, jnp.int32(1), jnp.int32(4), jnp.int32(Stop.RUNNING))
    said = says([9, 9, 9, 9], [0.5] * 4)._replace(start=places)
    # At 9 the latest of two; at 8 there is none, and further on the places before are open.
    assert look_up(rules, canvas, said).tokens.tolist() == [9, 7, 9, 9]


@pytest.mark.parametrize("network", [{}, {"block": BLOCK}], ids=["canvases", "blocks"])
def test_passes_of_one_shape_agree_in_half_precision(network):
    """The baseline reads as many canvases, so that its kernels are the same ones."""
    model = tiny_model(**network)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    model = Model(Network(half, model.config), name="half")
    fixed = SelfSpeculation(3, deterministic=True)
    stepwise = denoise(model, PROMPTS, PLAIN, fixed.stepwise)
    drafted = denoise(model, PROMPTS, PLAIN, fixed)
    assert all(row.num_canvases == row.num_calls for row in stepwise)
    assert sum(row.num_calls for row in drafted) < sum(row.num_calls for row in stepwise)
    assert tokens(drafted) == tokens(stepwise)


@pytest.mark.parametrize("shift", [False, True])
def test_blocks_side_by_side_say_what_whole_canvases_say(shift):
    """Four canvases of a path over three blocks; later ones share full blocks before theirs."""
    model = tiny_model(block=BLOCK, shift=shift)
    request = prepare_denoising(model, PROMPTS[0], PLAIN, SelfSpeculation(BLOCK), 0)
    state, M = first_state(request), MASK
    texts = [
        [5, 7, 8, M, *[M] * 4, *[M] * 4],
        [5, 7, 8, 9, M, M, M, M, *[M] * 4],
        [5, 7, 8, 9, M, 2, M, M, *[M] * 4],
        [5, 7, 8, 9, 3, 2, 6, 4, *[M] * 4],
    ]
    later = [state.canvas.tokens.at[BLOCK : 4 * BLOCK].set(jnp.asarray(text)) for text in texts]
    canvases = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state.canvas)
    canvases = canvases._replace(tokens=jnp.stack(later), start=jnp.asarray([4, 8, 8, 12]))
    # Entries: block 0 of canvases 0 and 1, block 1 of canvases 1, 2 and 3, block 2 of canvas 3.
    blocks = Blocks(
        canvas=jnp.asarray([0, 1, 1, 2, 3, 3]),
        level=jnp.asarray([0, 0, 1, 1, 1, 2]),
        of_nodes=jnp.asarray([[0, 1, 1, 1], [0, 2, 3, 4], [0, 0, 0, 5]]),
        is_read=jnp.asarray([[True] * 4, [False, True, True, True], [False] * 3 + [True]]),
    )
    network, plan, row = request.params.target, request.plan, state.row
    said, finished = read_blocks(network, plan, row, canvases, state.kept, blocks)
    known = [[True] * 4 + [False] * 8, *[[True] * 8 + [False] * 4] * 2, [True] * 12]
    assert said.known.tolist() == known
    for node in range(4):
        canvas = jax.tree.map(lambda leaf, node=node: leaf[node], canvases)
        alone, layers = read_canvas(network, plan, row, canvas)
        inside, whole = canvas.start - said.start[node], canvas.start - alone.start
        for entries, others in zip(said[1:3], alone[1:3], strict=True):
            np.testing.assert_allclose(
                entries[node][inside : inside + BLOCK], others[whole : whole + BLOCK], rtol=1e-5
            )
        full = int(canvas.start) - BLOCK
        for one, other in zip(finished.cache.layers, layers, strict=True):
            ours, theirs = one.values[node][:, :full], other.values[:, BLOCK : BLOCK + full]
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def first_state(request):
    first = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], request.prompts)
    return begin(request.params, first, plan=request.plan, speculation=request.speculation)


def says(text: list[int], probs: list[float]) -> Prediction:
    """A prediction from place 1 on."""
    scores, every = jnp.log(jnp.asarray(probs, jnp.float32)), jnp.ones(len(text), bool)
    return Prediction(jnp.int32(1), jnp.asarray(text, jnp.int32), scores, every, every)


A, B, C, D = 10, 11, 12, 13


def test_the_worked_example_of_the_paper():
    """Two blocks, N = 3.

    In the current block A is sure (.95) and B less (.6); C (.75) lies in the next, so it comes
    after B. The pass confirms A and has D for B's place: D is put there, and C dropped.
    """
    request = prepare_denoising(
        tiny_model(), [1], config(max_new_tokens=2 * BLOCK), SelfSpeculation(3), 0
    )
    plan, speculation = request.plan, request.speculation
    state, M = first_state(request), MASK
    # The second half of the current block is filled in already.
    filled = state.canvas.tokens.at[1:9].set(jnp.asarray([M, M, 7, 7, M, M, M, M]))
    in_hand = says([A, B, 7, 7, 1, C, 1, 1], [0.95, 0.6, 0.1, 0.1, 0.2, 0.75, 0.3, 0.1])
    canvas = state.canvas._replace(tokens=filled, step=jnp.int32(2))
    state = state._replace(canvas=canvas, prediction=in_hand)
    chain = draft(plan, speculation, jnp.int32(speculation.num_drafts), state)
    assert chain.valid.tolist() == [True] * 4
    assert chain.canvases.tokens[:, 1:9].tolist() == [
        [M, M, 7, 7, M, M, M, M],
        [A, M, 7, 7, M, M, M, M],
        [A, B, 7, 7, M, M, M, M],
        [A, B, 7, 7, M, C, M, M],
    ]
    rest = [0.1] * 6
    passes = [
        says([A, B, 7, 7, 1, C, 1, 1], [0.9, 0.5, *rest]),
        says([A, D, 7, 7, 1, C, 1, 1], [0.9, 0.8, *rest]),
        says([A, B, 7, 7, 1, C, 1, 1], [0.9, 0.8, 0.1, 0.1, 0.1, 0.9, 0.1, 0.1]),
        says([A, B, 7, 7, 1, C, 1, 1], [0.9, 0.8, *rest]),
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *passes)
    after, info = self_speculative._accept(plan, speculation, state, chain, stacked, ())
    assert (info.num_drafted, info.num_accepted) == (3, 1)
    assert after.canvas.tokens[1:9].tolist() == [A, D, 7, 7, M, M, M, M]
    assert after.canvas.start == 1 + BLOCK


EIGHT = [[int(token) for token in range(1, 2 + length)] for length in range(8)]


@pytest.mark.parametrize("cache", ["none", "blocks", "dual"])
def test_a_row_depends_on_itself_only(cache):
    """Its place among the prompts is part of its seed, so the greedy row is compared."""
    model = tiny_model(block=BLOCK if cache == "blocks" else None)
    together = denoise(model, EIGHT, config(cache=cache), SelfSpeculation(3))
    assert len({row.num_calls for row in together}) > 1
    for prompt, row in zip(EIGHT, together, strict=True):
        (alone,) = denoise(model, prompt, config(cache=cache), SelfSpeculation(3))
        assert alone.tokens.tolist() == row.tokens.tolist()
        assert (alone.num_calls, alone.num_canvases) == (row.num_calls, row.num_canvases)


@pytest.mark.parametrize("shift", [False, True])
def test_keeping_finished_blocks_changes_nothing(shift):
    """One of the prompts is shorter than a block, so that the first one begins with it."""
    model = tiny_model(block=BLOCK, shift=shift)
    kept = denoise(model, PROMPTS, PLAIN)
    whole = denoise(model, PROMPTS, config(cache="none"))
    assert tokens(kept) == tokens(whole)
    assert [row.num_calls for row in kept] == [row.num_calls for row in whole]


@pytest.mark.parametrize("length", [1, 32])
@pytest.mark.parametrize("drafts", [1, 3])
def test_rounds_without_drafts_decide_the_last_block(length, drafts):
    """The window of drafts would end behind the canvas there, and begins before the block."""
    model, prompt = tiny_model(), [1 + place % 20 for place in range(length)]
    config = DenoiseConfig(max_new_tokens=64, block_length=32, stop_token_ids=())
    never = SelfSpeculation(drafts, costs=(1.0, *[99.0] * drafts))
    (stepwise,), (row,) = (denoise(model, prompt, config, each) for each in (None, never))
    assert row.tokens.tolist() == stepwise.tokens.tolist()
    assert model.config.diffusion.mask_token_id not in row.tokens


def test_drafts_that_do_not_pay_are_not_made():
    """Passes as dear as their canvases leave nothing to gain; passes as dear as one, everything."""
    model = tiny_model()
    dear = denoise(model, PROMPTS, PLAIN, SelfSpeculation(3, costs=(1.0, 2.0, 3.0, 4.0)))
    assert all(row.num_canvases == row.num_calls for row in dear)
    flat = denoise(model, PROMPTS, PLAIN, SelfSpeculation(3, costs=(1.0, 1.0, 1.0, 1.0)))
    assert all(row.num_canvases > row.num_calls for row in flat)
    assert tokens(dear) == tokens(flat) == tokens(denoise(model, PROMPTS, PLAIN))


def test_a_batch_drafts_what_pays_for_it():
    """Alone some draft and some do not; together they draft alike, as copies of one do alone."""
    model, speculation = tiny_model(), SelfSpeculation(2, costs=(1.0, 1.6, 2.2))
    every = [denoise(model, prompt, PLAIN, speculation)[0] for prompt in EIGHT]
    drafting = [row.num_canvases > row.num_calls for row in every]
    assert any(drafting)
    assert not all(drafting)
    for alone in (every[drafting.index(True)], every[drafting.index(False)]):
        for row in denoise(model, [alone.prompt_tokens.tolist()] * 3, PLAIN, speculation):
            assert row.drafted.tolist() == alone.drafted.tolist()
            assert row.accepted.tolist() == alone.accepted.tolist()
    together = denoise(model, EIGHT, PLAIN, speculation)
    assert tokens(together) == [row.tokens.tolist() for row in every]
    most = [int(np.flatnonzero(row.drafted)[-1]) for row in together]
    assert len(set(most)) == 1


def test_the_slowest_row_says_what_pays():
    """9 masks at 1 + 0.1 a pass outlast 9 at 1 + 0.9, but not where only 3 are left of them."""
    speculation = SelfSpeculation(1, costs=(1.0, 1.5))
    request = prepare_denoising(tiny_model(), [[1, 2], [3]], config(cache="none"), speculation, 0)
    states, plan = request.begin(), request.plan

    def number(rates, masks, running=(True, True)):
        places = np.arange(plan.canvas_size)
        tokens = np.where(
            (places >= 2) & (places < 2 + np.asarray(masks)[:, None]), plan.rules.mask_token_id, 5
        )
        stop = np.where(running, Stop.RUNNING, Stop.LENGTH)
        canvas = states.canvas._replace(tokens=jnp.asarray(tokens), stop=jnp.asarray(stop))
        given = states._replace(
            canvas=canvas, hits=jnp.asarray(rates), trials=jnp.ones(2, jnp.float32)
        )
        return int(worth_drafting(plan, request.speculation, given))

    assert number((0.9, 0.9), (9, 9)) == 1
    assert number((0.1, 0.9), (9, 9)) == 0
    assert number((0.1, 0.9), (3, 9)) == 1
    assert number((0.1, 0.9), (9, 9), (False, True)) == 1
    # The last mask leaves nothing to draft, whatever it costs.
    assert number((0.9, 0.9), (1, 1)) == 0
    assert number((0.9, 0.9), (1, 9)) == 1


def test_rows_open_their_blocks_together():
    """Whole canvases are read once for each block, however far drafts take which row."""
    model = tiny_model()
    request = prepare_denoising(model, EIGHT, config(cache="dual"), SelfSpeculation(3), 0)
    states, static = request.begin(), {"plan": request.plan, "speculation": request.speculation}
    openings = 0
    while (running := np.asarray(states.canvas.stop) == Stop.RUNNING).any():
        before = jax.device_get(states.canvas)
        states, _ = step_stream(request.params, states, **static)
        moved = (before.tokens != np.asarray(states.canvas.tokens)).any(axis=1)
        assert moved.any()
        opens = moved & (before.step == 0)
        openings += opens.any()
        assert not opens.any() or (opens == running).all()
    assert openings == PLAIN.max_new_tokens // BLOCK


@pytest.mark.parametrize(
    ("settings", "num_drafts", "opening_nodes"),
    [
        ({"cache": "prefix"}, 3, 4),
        ({"cache": "dual"}, 3, 4),
        # Not all fit: a canvas has 128 positions, and a drafted one adds 96.
        ({"cache": "prefix", "max_new_tokens": 96}, 4, 3),
    ],
)
def test_drafts_go_on_in_the_block_that_a_pass_opens(settings, num_drafts, opening_nodes):
    """Only passes of one shape end them with the block: the opening one has another."""
    model = tiny_model()

    def kept_when_opening(speculation: SelfSpeculation, nodes: int) -> int:
        request = prepare_denoising(model, EIGHT, config(**settings), speculation, 0)
        assert request.plan.opening_nodes == nodes
        states, kept = request.begin(), 0
        while (np.asarray(states.canvas.stop) == Stop.RUNNING).any():
            opens = np.asarray(states.canvas.step) == 0
            states, info = request.step(states)
            kept += int(np.asarray(info.num_accepted)[opens].sum())
        assert tokens(request.result(outcome_of(states))) == tokens(
            denoise(model, EIGHT, config(**settings))
        )
        return kept

    assert kept_when_opening(SelfSpeculation(num_drafts), opening_nodes) > 0
    assert kept_when_opening(SelfSpeculation(num_drafts, deterministic=True), 1) == 0


def test_passes_get_narrower_towards_the_end_of_a_text(monkeypatch):
    """Passes of one shape read all that any block may have after it, and see the same."""
    widths, read = [], canvases.read_rest

    def recorded(*arguments):
        jax.debug.callback(lambda: widths.append(arguments[-1]))
        return read(*arguments)

    monkeypatch.setattr(canvases, "read_rest", recorded)
    # No other test has these settings, so their programs are compiled here.
    model, settings = tiny_model(), config(cache="prefix", max_new_tokens=96, order="topk_margin")
    alike = SelfSpeculation(2, deterministic=True)
    plans = [prepare_denoising(model, EIGHT, settings, s, 0).plan for s in (None, alike)]
    assert [plan.rest_widths for plan in plans] == [(24, 48, 96), (96,)]
    found = tokens(denoise(model, EIGHT, settings))
    assert sorted(set(widths)) == [24, 48, 96]
    assert widths == sorted(widths, reverse=True)
    assert tokens(denoise(model, EIGHT, settings, alike.stepwise)) == found


@pytest.mark.parametrize(("costs", "known"), [((1.0, 2.0, 3.0, 4.0), 1), (None, 2)])
def test_a_row_that_drafts_nothing_reads_one_block(costs, known):
    """Only drafts may need the next one before this one is full."""
    request = prepare_denoising(
        tiny_model(block=BLOCK), [1] * BLOCK, PLAIN, SelfSpeculation(3, costs), 0
    )
    states, static = request.begin(), {"plan": request.plan, "speculation": request.speculation}
    for _ in range(2):
        states, _ = step_stream(request.params, states, **static)
    assert int(jnp.sum(states.prediction.known)) == known * BLOCK


def test_equal_settings_share_a_program_and_the_stream_is_the_same():
    model = tiny_model()
    result = denoise(model, PROMPTS, PLAIN, SelfSpeculation(3))
    programs = denoise_rows._cache_size()
    denoise(model, PROMPTS, config(temperature=0.0), SelfSpeculation(3))
    assert denoise_rows._cache_size() == programs
    seen, streamed = whole_stream(denoise_stream(model, PROMPTS, PLAIN, SelfSpeculation(3)))
    assert tokens(streamed) == tokens(result)
    assert seen[0][0].tokens.tolist() == [MASK] * 12
    for row, found in enumerate(result):
        mine = [step[row] for step in seen if step[row] is not None]
        assert len(mine) == found.num_calls
        assert sum(step.num_accepted for step in mine) == found.accepted @ np.arange(4)


def test_a_row_ends_with_its_first_stop_id():
    model = tiny_model()
    whole = denoise(model, PROMPTS, PLAIN)
    stop = int(whole[0].tokens[BLOCK])
    first = whole[0].tokens.tolist().index(stop)
    cut = denoise(model, PROMPTS, config(stop_token_ids=(stop,)))
    assert cut[0].tokens.tolist() == whole[0].tokens[: first + 1].tolist()
    assert cut[0].finish_reason == "stop_token"
    assert cut[0].num_calls < whole[0].num_calls


def test_a_row_does_not_wait_for_what_will_be_cut():
    """The last block reaches three places behind what was asked for: no pass is for them alone."""
    request = prepare_denoising(tiny_model(block=BLOCK), [1], PLAIN, None, 0)
    outcome = request.denoise()
    (row,) = request.result(outcome)
    assert (len(row.tokens), row.finish_reason) == (12, "length")
    filled = np.asarray(outcome.canvas.tokens[0, 1:16])
    assert MASK not in filled[:12]
    assert MASK in filled[12:]
    assert row.num_calls == np.sum(filled != MASK)


def test_weights_that_are_not_finite_end_a_row():
    model = tiny_model()
    params = {**model.params, "norm": {"scale": model.params["norm"]["scale"] * jnp.nan}}
    network = type(model.network)(params, model.config)
    request = prepare_denoising(model, PROMPTS, PLAIN, None, 0)
    outcome = denoise_rows(
        Params(network, ()), request.prompts, plan=request.plan, speculation=request.speculation
    )
    assert outcome.canvas.stop.tolist() == [Stop.NOT_FINITE] * 2
    rows = request.result(outcome)
    assert [(len(row.tokens), row.finish_reason) for row in rows] == [(0, "not_finite")] * 2


def test_costs_are_measured_on_canvases_of_one_size(monkeypatch):
    """Drafts of whole blocks reach further than the canvas of passes without drafts."""
    plans = []

    def timed(request, most):
        plans.append(request.plan)
        return lambda: float(most)

    monkeypatch.setattr(DenoiseRequest, "timed", timed)
    settings = DenoiseConfig(max_new_tokens=64, threshold=0.9)
    measure_costs(tiny_model(block=32), [[1]], settings, SelfSpeculation(5), repeats=1)
    assert [plan.num_nodes for plan in plans] == [1, 2, 3, 4, 5, 6]
    assert len({(plan.window, plan.canvas_size) for plan in plans}) == 1


@pytest.mark.parametrize(
    "changes",
    [{"threshold": 0.01}, pytest.param({"schedule": "linear", "steps": 3}, marks=SLOW)],
    ids=["threshold", "linear time"],
)
def test_decisions_that_fill_whole_blocks_are_drafted_in_every_pass_but_the_first(changes):
    """The prompt ends with a block: no pass leaves masks from which drafts could begin."""
    model, prompt = tiny_model(block=BLOCK), list(range(1, 1 + BLOCK))
    stepwise = denoise(model, prompt, config(**changes))[0]
    assert stepwise.num_calls == PLAIN.max_new_tokens // BLOCK
    drafted = denoise(model, prompt, config(**changes), SelfSpeculation(1))[0]
    assert drafted.drafted[0] == 1


def test_without_drafts_only_those_that_could_be_made_say_how_often_they_are_right():
    """Rounds without drafts read no later block, so none can be made where one begins."""
    model, prompt = tiny_model(block=BLOCK), list(range(1, 1 + BLOCK))
    never = SelfSpeculation(1, costs=(1.0, 9.0))
    request = prepare_denoising(model, prompt, PLAIN, never, 0)
    states, static = request.begin(), {"plan": request.plan, "speculation": never}
    judged = []
    for _ in range(PLAIN.max_new_tokens):
        before = float(states.trials[0])
        states, info = step_stream(request.params, states, **static)
        judged.append(float(states.trials[0]) != before)
        assert info.num_drafted[0] == 0
    assert judged == [False, True, True, True] * 3


def blocks_read(monkeypatch) -> list[tuple[int, int]]:
    """Returns a list that passes fill with the blocks they want and those they have room for."""
    counted = []
    listed = canvases._listed

    def listing(tree, width, wanted):
        jax.debug.callback(lambda most: counted.append((int(most), width)), jnp.sum(wanted))
        return listed(tree, width, wanted)

    monkeypatch.setattr(canvases, "_listed", listing)
    return counted


def decode_anew(request: DenoiseRequest) -> None:
    """Decodes to the end with a program that is traced anew."""
    settings = {"plan": request.plan, "speculation": request.speculation}
    step, states = jax.jit(partial(self_speculative.denoise_step, **settings)), request.begin()
    while (np.asarray(states.canvas.stop) == Stop.RUNNING).any():
        states, _ = step(request.params, states)
    jax.effects_barrier()


def test_a_threshold_that_no_token_passes_reads_hardly_more_than_single_steps(monkeypatch):
    """No token's probability reaches 1, so a decision fills in the surest position alone.

    There is room for drafts of whole blocks, so drafts may reach one block further, and run on.
    """
    counted, model = blocks_read(monkeypatch), tiny_model(block=BLOCK, seed=1)
    read = []
    for changes in ({}, {"threshold": 1.0}):
        counted.clear()
        asked = config(max_new_tokens=32, **changes)
        decode_anew(prepare_denoising(model, PROMPTS[:1], asked, SelfSpeculation(BLOCK + 1), 0))
        read.append([most for most, _ in counted])
    assert len(read[0]) == len(read[1]) > 0
    assert all(other <= one + 2 for one, other in zip(*read, strict=True))


@pytest.mark.parametrize(
    "speculation",
    [SelfSpeculation(BLOCK + 1, costs=(1.0,) * (BLOCK + 2)), SelfSpeculation(2, branch=2)],
    ids=["chain", "tree"],
)
@pytest.mark.parametrize(
    "changes", [{}, *(pytest.param(one, marks=SLOW) for one in ({"steps": 6}, {"threshold": 0.3}))]
)
def test_every_wanted_block_has_room_in_the_widest_pass(speculation, changes, monkeypatch):
    """Also in rounds that draft less than the window is made for."""
    counted = blocks_read(monkeypatch)
    model = tiny_model(block=BLOCK, seed=1)
    request = prepare_denoising(model, PROMPTS, config(**changes), speculation, 0)
    for index in range(len(speculation.draft_counts)):
        always = jnp.int32(index)
        monkeypatch.setattr(self_speculative, "worth_drafting", lambda *_, always=always: always)
        decode_anew(request)
    assert len({width for _, width in counted}) > 1
    assert all(most <= width for most, width in counted)


def test_costs_are_measured_for_every_number_of_drafts():
    one = SelfSpeculation(1)
    costs = measure_costs(tiny_model(), PROMPTS, PLAIN, one, repeats=1)
    assert len(costs) == 2
    assert SelfSpeculation(1, costs).draft_counts == (0, 1)
    assert SelfSpeculation(9, (1.0,) * 10).draft_counts == (0, 1, 3, 7, 9)
    assert SelfSpeculation(9, (1.0,) * 10, limit=3).draft_counts == (0, 1, 3)
    assert SelfSpeculation(9, limit=3).draft_counts == (3,)
    assert hash(SelfSpeculation(1, list(costs))) == hash(SelfSpeculation(1, costs))
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        measure_costs(tiny_model(), PROMPTS, PLAIN, repeats=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_drafts": -1}, "num_drafts must be at least 0, got -1"),
        ({"num_drafts": 2, "costs": (1.0, 2.0)}, "costs must have 3 entries.*got 2"),
        (
            {"num_drafts": 1, "costs": (1.0, 0.0)},
            r"costs\[1\] must be above 0, got 0.0",
        ),
        ({"num_drafts": 1, "costs": (1.0, np.nan)}, r"costs\[1\] must be a finite number, got"),
        ({"branch": 0}, "branch must be at least 1, got 0"),
        (
            {"num_drafts": 9, "branch": 2},
            r"branch: 2 successors of each of 9 drafts give 2\*\*9 ends",
        ),
        ({"num_drafts": 4096, "branch": 2**30}, r"drafts give 1073741824\*\*4096 ends"),
        ({"num_drafts": 2**31 - 1, "branch": 2}, "num_drafts must be at most 4096, got 2147483647"),
        ({"num_drafts": 2, "limit": 3}, r"limit must be in 0..2 \(num_drafts\), got 3"),
        ({"lossy_top_k": 0}, "lossy_top_k must be at least 1, got 0"),
        ({"num_drafts": 0, "costs": (1.0,), "deterministic": True}, "costs: deterministic passes"),
    ],
)
def test_bad_speculation_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        SelfSpeculation(**values)
