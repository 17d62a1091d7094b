"""Draft & Verify against the recorded runs of the published program, and what it promises."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import Model
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.core.decode import prefill
from jaxspec.core.forms import exchanged
from jaxspec.core.masks import causal
from jaxspec.core.proposal import choose_children
from jaxspec.core.types import Context, Params, Recent, Warp
from jaxspec.core.verify import verify_chain
from jaxspec.decoding.request import prepare
from jaxspec.drafters import AdaptiveExit, LayerSkip, LoadedDrafter, NoDraft, growth
from jaxspec.drafters.layer_skip import CarriedSkip, LayerSkipState
from jaxspec.measure.step import begin_and_propose, repetitive_prompt
from jaxspec.models import Network, Skips
from tests.models.test_eagle import write_folder

NUM_LAYERS = 8
SETS = {
    "none": ([], []),
    "mid": ([2, 3, 5], [3, 6]),
    "layer0_attn": ([0, 4], [1]),
    "both_same_layer": ([3, 4, 5], [3, 4, 5]),
    "mlp_only": ([], [1, 2, 4, 6]),
    "all_mid": ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5]),
}
RELEASED = AdaptiveExit(rule="released")


def skips(attention, mlp) -> Skips:
    layers = range(NUM_LAYERS)
    return Skips(*(tuple(layer in part for layer in layers) for part in (attention, mlp)))


def as_arrays(skip: Skips) -> Skips:
    return Skips(*(jnp.asarray(part, jnp.float32) for part in skip))


@pytest.fixture(scope="module")
def golden(recorded_folder) -> Path:
    return recorded_folder("draft_verify")


@pytest.fixture(scope="module")
def target(golden, tmp_path_factory) -> Network:
    config = json.loads((golden / "dv_tiny_config.json").read_text())
    weights = np.load(golden / "dv_tiny_weights.npz")
    folder = tmp_path_factory.mktemp("draft_verify")
    return load_network(write_folder(folder / "target", config, weights, ""))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", [lambda skip: skip, as_arrays], ids=["static", "traced"])
def test_recorded_passes_with_skipped_sublayers(golden, target, name, form):
    recorded = np.load(golden / "dv_skip_forward.npz")
    for tokens, logits in zip(recorded["input_ids"], recorded[f"draft_logits/{name}"], strict=True):
        hidden = target.forward(
            jnp.asarray(tokens), jnp.arange(12), causal(12), None, skip=form(skips(*SETS[name]))
        )
        np.testing.assert_allclose(target.unembed(hidden.features), logits, atol=1e-4)


def test_a_static_set_is_absent_from_the_program(target):
    """An attention has products for its input, two scores (prefix and draft), two values, output.

    An MLP has two. Counted in the program of a draft, whose loop holds one pass.
    """
    states, _ = begin_and_propose(
        Params(target, ()), repetitive_prompt(target.vocab_size), drafter=NoDraft()
    )

    def dots(drafter: LayerSkip, params=()) -> int:
        context = jax.tree.map(lambda leaf: leaf[0], states.context)
        context = context._replace(recent=context.recent._replace(count=jnp.int32(0)))
        whole = Params(target, params)

        def propose(params, key, context):
            state = LayerSkipState(jnp.float32(0.5), jnp.float32(0), jnp.int32(0))
            return drafter.propose(params, key, state, context)[0]

        with exchanged({}):  # native code has no products to count
            lowered = jax.jit(propose).lower(whole, jax.random.key(0), context)
        return lowered.as_text().count("stablehlo.dot_general")

    nothing = dots(LayerSkip(skips([], []), 4))
    one_attention = nothing - dots(LayerSkip(skips([2], []), 4))
    one_mlp = nothing - dots(LayerSkip(skips([], [2]), 4))
    assert one_attention > one_mlp == 2
    assert dots(LayerSkip(skips([2, 3], []), 4)) == nothing - 2 * one_attention
    assert dots(LayerSkip(skips([], [1, 5, 6]), 4)) == nothing - 3 * one_mlp
    assert dots(LayerSkip(None, 4), as_arrays(skips([2, 3], [1]))) == nothing


def test_an_early_exit_shortens_the_draft_and_the_pass(target):
    """As many passes of the draft as tokens, and the narrowest target pass that holds them."""
    passes = []
    drafter = LayerSkip(skips(*SETS["mid"]), 6, threshold=0.5, adaptive=None)

    class Counted(Network):
        def forward(self, tokens, *args, skip=None, **kwargs):
            if skip is not None:
                jax.debug.callback(lambda: passes.append(1))
            return super().forward(tokens, *args, skip=skip, **kwargs)

    jax.tree_util.register_dataclass(Counted, data_fields=["params"], meta_fields=["config"])
    counted = Counted(target.params, target.config)
    (row,) = generate(
        Model(counted), [5, 17, 40, 8], GenerationConfig(24), drafter, return_trace=True
    )
    jax.effects_barrier()
    drafted = [int(np.sum(step.valid)) - 1 for step in row.trace]
    assert len(passes) == sum(drafted)
    assert len(set(drafted)) > 1
    for step, count in zip(row.trace, drafted, strict=True):
        assert step.width == min(width for width in drafter.widths if width > count)
    assert min(step.width for step in row.trace) < max(drafter.widths)


@pytest.mark.parametrize(
    "case",
    [
        "mid/K8_th0.8_autoTrue",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                "mid/K12_th0.2_autoTrue",
                "none/K12_th0.2_autoTrue",
                "none/K4_th0.0_autoFalse",
                "none/K6_th0.3_autoFalse",
            )
        ),
    ],
)
@pytest.mark.parametrize("form", ["static", "traced"])
def test_recorded_generations(golden, target, case, form):
    """The same text, and in every step as much drafted and accepted."""
    recorded = json.loads((golden / "dv_generate_greedy.json").read_text())[case]
    skip = skips(recorded["attn_skip"], recorded["mlp_skip"])
    settings = {
        "num_speculative_tokens": recorded["max_step_draft"],
        "threshold": recorded["th_init"],
        "adaptive": RELEASED if recorded["auto"] else None,
    }
    # `of` takes the bools of `skips_of` as well as arrays.
    drafter = (LayerSkip if form == "static" else LayerSkip.of)(skip, **settings)
    # The reference lets the whole model choose a token before it drafts for the first time.
    result = generate(
        Model(target),
        [*recorded["prompt"], recorded["output"][0]],
        GenerationConfig(max_new_tokens=recorded["max_new_tokens"] - 1),
        drafter,
        return_trace=True,
    )
    (row,) = result
    assert row.tokens.tolist() == recorded["output"][1:]
    if recorded["auto"]:
        request = prepare(
            Model(target),
            [*recorded["prompt"], recorded["output"][0]],
            GenerationConfig(max_new_tokens=recorded["max_new_tokens"] - 1),
            drafter,
            0,
        )
        # A threshold is moved where the next draft begins: the first state is that of no step.
        drafts = (states.draft for states, _ in request.decode_stream())
        moved = [(float(draft.threshold[0]), float(draft.rate[0])) for draft in drafts][2:]
        theirs = [(step["th_after"], step["ar_ema"]) for step in recorded["trace"]]
        # The result of the last step is only in the state that is carried on.
        (last,) = map(carried, result.drafters)
        moved.append((last.threshold, last.rate))
        np.testing.assert_allclose(moved[: len(theirs)], theirs, atol=1e-6)
        np.testing.assert_allclose(last.threshold, recorded["th_final"], atol=1e-6)
    ours = [(int(np.sum(step.valid)) - 1, len(step.path) - 1) for step in row.trace]
    assert sum(drafted for drafted, _ in ours) == recorded["num_drafted"]
    if recorded["auto"]:  # of a threshold that stands still only the total was recorded
        theirs = [(step["drafted"], step["accepted"]) for step in recorded["trace"]]
        # A last step with room for one token only drafts nothing here.
        assert ours[: len(theirs)] == theirs
        assert all(step == (0, 0) for step in ours[len(theirs) :])


def test_recorded_sampling_cycles(golden, target, monkeypatch):
    """Cycle by cycle: thresholds, exits, the laws of the draft, the target's, how many it accepts.

    The reference's draws are handed to the drafter in place of its own, for draws of two programs
    are never the same; the laws that they were drawn from must be. What is drawn after a rejection
    is compared in `tests/core/test_recorded_verification.py`.
    """
    (recorded,) = json.loads((golden / "dv_sampling_accept.json").read_text())
    greedy = json.loads((golden / "dv_generate_greedy.json").read_text())
    (prompt,) = {tuple(case["prompt"]) for case in greedy.values()}  # not recorded here
    arrays = np.load(golden / "dv_sampling_accept.npz")
    size, places = recorded["max_step_draft"], 64
    drafter = LayerSkip(
        skips(recorded["attn_skip"], recorded["mlp_skip"]),
        size,
        threshold=recorded["th_init"],
        adaptive=RELEASED,
    )
    params, warp, key = Params(target, ()), Warp(temperature=jnp.float32(1)), jax.random.key(0)

    @jax.jit
    def cycle(tokens, length, room, num_emitted, state, draws, uniforms):
        def choose(own_key, logits, warp, branch):
            _, laws = choose_children(own_key, logits, warp, branch)
            own, every = map(jax.random.key_data, (own_key, jax.random.split(key, size)))
            return draws[jnp.argmax(jnp.all(every == own[None], axis=1))][None, None], laws

        monkeypatch.setattr(growth, "choose_children", choose)
        _, cache = prefill(target, tokens, length, chunk=places)
        nothing = jnp.zeros((size + 1, 0))
        recent = Recent(jnp.zeros(size + 1, jnp.int32), nothing, nothing, num_emitted)
        context = Context(tokens, length, room, jnp.zeros(0, jnp.int32), warp, cache, recent)
        proposal, state = drafter.propose(params, key, state, context)
        hidden = target.forward(
            proposal.tokens,
            length - 1 + proposal.tree.depths,
            proposal.tree.ancestors & proposal.valid[None],
            cache,
        )
        logits = target.unembed(hidden.features)
        return proposal, state, logits, verify_chain(uniforms, proposal, logits)

    state = LayerSkipState(jnp.float32(recorded["th_init"]), jnp.float32(0), jnp.int32(0))
    emitted, num_emitted = 1, 1
    for step in recorded["cycles"]:
        of = {name: arrays[f"{step['key']}/{name}"] for name in ("draft_tokens", "q", "p")}
        drafted, accepted = step["drafted"], step["accepted"]
        text = [*prompt, *recorded["output"][:emitted]]
        draws = np.pad(of["draft_tokens"], (0, size - drafted))
        uniforms = np.concatenate([[0.5], arrays[f"{step['key']}/uniforms"]])
        proposal, state, logits, verdict = cycle(
            jnp.asarray([*text, *[0] * (places - len(text))], jnp.int32),
            jnp.int32(len(text)),
            jnp.int32(len(recorded["output"]) - emitted),
            jnp.int32(num_emitted),
            state,
            jnp.asarray(draws, jnp.int32),
            jnp.asarray(uniforms, jnp.float32),
        )
        np.testing.assert_allclose(state.threshold, step["th_before"], atol=1e-6)
        assert int(state.drafted) == np.sum(proposal.valid) - 1 == drafted
        np.testing.assert_allclose(jnp.exp(proposal.draft_logprobs[:drafted]), of["q"], atol=1e-4)
        raw = arrays[f"{step['key']}/raw_logits"]
        np.testing.assert_allclose(logits[: drafted + 1], raw, atol=1e-4)
        np.testing.assert_allclose(jax.nn.softmax(logits[: drafted + 1]), of["p"], atol=1e-4)
        assert verdict.num_emitted - 1 == accepted
        emitted, num_emitted = emitted + accepted + 1, accepted + 1
    assert emitted == len(recorded["output"])


@pytest.mark.parametrize("script", [0, 1])
def test_recorded_thresholds(golden, script):
    recorded = json.loads((golden / "dv_adaptive_threshold.json").read_text())[script]
    settings = recorded["auto_parameters"]
    exit_rule = AdaptiveExit(
        target_rate=settings["alpha"],
        step=settings["epsilon"],
        rate_memory=settings["beta1"],
        threshold_memory=settings["beta2"],
        rule="released",
    )
    threshold, rate = jnp.float32(recorded["th_init"]), jnp.float32(0)
    for number, step in enumerate(recorded["trace"]):
        scripted = recorded["script"][number % len(recorded["script"])]
        unsure = np.flatnonzero(np.array(scripted["conf"]) < float(threshold))
        drafted = min(*(unsure[:1] + 1), recorded["max_step_draft"], len(scripted["conf"]))
        assert step["drafted"] == drafted, number
        assert step["accepted"] == min(scripted["accept"], drafted)
        threshold, rate = exit_rule.update(
            threshold,
            rate,
            jnp.int32(step["accepted"]),
            jnp.int32(step["drafted"]),
            recorded["max_step_draft"],
        )
        np.testing.assert_allclose(rate, step["ar_ema"], atol=1e-6)
        np.testing.assert_allclose(threshold, step["th_after"], atol=1e-5)


def test_the_rules_differ_where_they_should():
    def moved(rule: str, rate: float, accepted: int, drafted: int) -> float:
        exit_rule = AdaptiveExit(0.5, rule=rule, rate_memory=1.0, threshold_memory=0.0)
        arguments = jnp.float32(0.3), jnp.float32(rate), jnp.int32(accepted), jnp.int32(drafted)
        return round(float(exit_rule.update(*arguments, longest=4)[0]), 4)

    assert moved("paper", 0.5, 1, 2) == 0.31
    assert moved("released", 0.5, 1, 2) == 0.29
    assert moved("paper", 0.9, 4, 4) == 0.29
    assert moved("released", 0.9, 4, 4) == 0.3
    assert moved("paper", 0.5, 0, 0) == 0.3  # nothing was drafted, nothing was learned


# Target rates, and how good a synthetic drafter is for which they can be reached: the probability
# that it gives its tokens is drawn from Beta(a, 1), so that a / (a + 1) of them are right.
REACHABLE = {0.7: 4, 0.8: 8, 0.9: 20}


@pytest.mark.parametrize("rule", ["paper", "released"])
@pytest.mark.parametrize("target_rate", REACHABLE)
def test_the_threshold_holds_the_acceptance_rate_near_its_target(target_rate, rule):
    exit_rule = AdaptiveExit(target_rate, step=0.05, rate_memory=0.98, rule=rule)
    rates = acceptance_rates(exit_rule, REACHABLE[target_rate], seed=0)
    assert abs(rates[1000:].mean() - target_rate) < 0.03


@pytest.mark.parametrize("target_rate", REACHABLE)
def test_the_settings_of_the_paper_hold_it_somewhat_lower(target_rate):
    """They remember two or three steps: see `AdaptiveExit`, which says how far off that is."""
    rates = acceptance_rates(AdaptiveExit(target_rate), REACHABLE[target_rate], seed=0)
    assert 0.0 < target_rate - rates[1000:].mean() < 0.1


@functools.cache
def controller(exit_rule: AdaptiveExit):
    return jax.jit(functools.partial(exit_rule.update, longest=8))


def acceptance_rates(
    exit_rule: AdaptiveExit, sureness: float, seed: int, num_steps: int = 4000
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    threshold, rate, rates = jnp.float32(0.2), jnp.float32(0), []
    for sure in rng.beta(sureness, 1, size=(num_steps, 8)):
        unsure = np.flatnonzero(sure < float(threshold))
        drafted = unsure[0] + 1 if unsure.size else 8
        wrong = np.flatnonzero(rng.uniform(size=drafted) >= sure[:drafted])
        accepted = wrong[0] if wrong.size else drafted
        threshold, rate = controller(exit_rule)(threshold, rate, accepted, drafted)
        rates.append(accepted / drafted)
    return np.array(rates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        ({"threshold": 1.2}, r"threshold must be in \[0, 1\], got 1.2"),
        ({"skip": Skips((0.5,), (1,))}, "skip must hold True or False"),
        ({"skip": Skips(np.zeros((2, 2)), np.zeros((2, 2)))}, "skip must hold True or False"),
        ({"skip": Skips((), (True,) * 5000)}, "skip.mlp must be of at most 4096 entries"),
        (
            {"skip": Skips((True,), (True, False))},
            "as many attention as MLP sub-layers, got 1 and 2",
        ),
        ({"adaptive": {"target_rate": 2.0}}, r"target_rate must be in \[0, 1\], got 2.0"),
        ({"adaptive": {"rule": "other"}}, "rule must be one of .'paper', 'released'., got 'other'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize("make", [LayerSkip, LayerSkip.of])
def test_a_bare_vector_is_refused(make):
    with pytest.raises(Exception, match="skip"):  # where types are checked, by that
        make([0, 1, 1, 0])


@pytest.mark.parametrize("make", [LayerSkip, LayerSkip.of])
def test_parts_that_are_no_sequences_are_refused(make):
    with pytest.raises(Exception, match="attention"):  # where types are checked, by that
        make(Skips(1, 2))


def make(adaptive=None, **settings):
    return LayerSkip(**settings, adaptive=AdaptiveExit(**(adaptive or {})))


def test_a_set_for_another_depth_is_refused(target):
    drafter = LayerSkip(Skips((True,) * 3, (False,) * 3))
    with pytest.raises(ValueError, match="must have 8 entries, one per layer of the target, got 3"):
        generate(Model(target), [1, 2], GenerationConfig(max_new_tokens=4), drafter)


def test_an_array_that_is_not_of_zeros_and_ones_is_refused(target):
    drafter = LayerSkip.of(Skips(jnp.zeros(8), jnp.full(8, 0.5)))
    with pytest.raises(ValueError, match=r"skip.mlp must hold 0 or 1 for each layer"):
        generate(Model(target), [1, 2], GenerationConfig(max_new_tokens=4), drafter)


def test_rows_have_thresholds_of_their_own(target):
    """In one batch, and the same as alone."""
    drafter = LayerSkip(skips(*SETS["mid"]), threshold=0.3, adaptive=AdaptiveExit(step=0.3))
    config = GenerationConfig(max_new_tokens=24)
    prompts = [[5, 17, 40, 8, 22, 53], [3, 3, 9], [60, 1, 2, 7, 7]]
    together = generate(Model(target), prompts, config, drafter, return_trace=True)
    for prompt, row in zip(prompts, together, strict=True):
        alone_result = generate(Model(target), prompt, config, drafter, return_trace=True)
        (alone,) = alone_result
        assert [(step.tokens.tolist(), step.valid.tolist()) for step in row.trace] == [
            (step.tokens.tolist(), step.valid.tolist()) for step in alone.trace
        ]
        # The state that is carried on does not depend on which row ended first.
        assert carried(together.drafters[row.prompt_index]) == carried(alone_result.drafters[0])
    assert len({carried(each).threshold for each in together.drafters}) > 1


def carried(drafter: LoadedDrafter) -> CarriedSkip:
    """Plain numbers, to compare."""
    return drafter.params._replace(
        threshold=float(drafter.params.threshold), rate=float(drafter.params.rate)
    )


@pytest.mark.parametrize("form", ["static", "traced"])
def test_a_threshold_is_carried_to_the_next_prompt(target, form):
    settings = {"threshold": 0.3, "adaptive": AdaptiveExit(step=0.3)}
    skip = skips(*SETS["mid"])
    if form == "static":
        drafter, own = LayerSkip(skip, **settings), None
    else:
        drafter = LayerSkip.of(as_arrays(skip), **settings)
        own = drafter.params
    config = GenerationConfig(max_new_tokens=8)

    def run(drafter):
        result = generate(Model(target), [5, 17, 40, 8, 22, 53], config, drafter)
        return result.drafters[0]

    first = run(drafter)
    second = run(first)
    assert first.params.threshold not in (0.3, second.params.threshold)
    # With nothing remembered of the rate it is a start at that threshold.
    begun = first._replace(params=CarriedSkip(own, jnp.float32(0.6), jnp.float32(0)))
    method = dataclasses.replace(first.drafter, threshold=0.6)
    plain = method if own is None else LoadedDrafter(method, own)
    assert run(begun).params.threshold == run(plain).params.threshold


def test_a_threshold_that_stands_still_carries_nothing(target):
    drafter = LayerSkip(skips(*SETS["mid"]), adaptive=None)
    result = generate(Model(target), [5, 17], GenerationConfig(max_new_tokens=4), drafter)
    assert result.drafters == (LoadedDrafter(drafter, ()),)
    assert generate(Model(target), [5, 17], GenerationConfig(4)).drafters == (None,)


def test_two_sets_live_in_one_process(target):
    """Neither changes what the other drafts."""
    config = GenerationConfig(max_new_tokens=12)

    def drafts(drafter):
        (row,) = generate(Model(target), [5, 17, 40, 8, 22, 53], config, drafter, return_trace=True)
        return [step.tokens.tolist() for step in row.trace]

    one, other = (LayerSkip(skips(*SETS[name]), adaptive=None) for name in ("mid", "none"))
    first, second = drafts(one), drafts(other)
    assert first != second
    assert drafts(one) == first
