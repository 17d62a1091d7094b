"""`compare`: one counter, an exact gate, and every prompt accounted for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import DenoiseConfig, SelfSpeculation
from jaxspec.checkpoint import Model
from jaxspec.core.types import Stop
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig, prepare
from jaxspec.diffusion.unmask import Canvas, EvenPace, Prediction, Rules, ThresholdPace
from jaxspec.measure import denoising
from jaxspec.measure.compare import find_divergence
from jaxspec.measure.comparison import TIE_GAP
from jaxspec.measure.denoising import DenoiseRunner
from jaxspec.measure.figures import LOW_REPETITION
from jaxspec.models import Network
from tests.measure.models import WrongRoot, filling_model

PROMPTS = ["one, two, one", "abc", "x" * 3000, "to be, or not"]
CONFIG = GenerationConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def comparison(model):
    drafters = {"lookup": jaxspec.PromptLookup(2), "liar": WrongRoot()}
    categories = ["numbers", "letters", "letters", None]
    return jaxspec.compare(
        model, PROMPTS, drafters, CONFIG, repeats=2, categories=categories, progress=False
    )


def test_plain_decoding_comes_first_and_is_its_own_baseline(comparison):
    assert [row.name for row in comparison.rows] == ["plain", "lookup", "liar"]
    plain = comparison.plain.overall
    assert plain.speedup == 1.0
    assert plain.mean_acceptance_length == 1.0
    assert plain.mean_accepted_tokens == 0.0


def test_figures_count_what_generate_counts(comparison, model):
    config = GenerationConfig(max_new_tokens=12, logprobs=True)
    results = [
        generate(model, PROMPTS[index], config, jaxspec.PromptLookup(2))
        for index in comparison.prompt_indices
    ]
    lookup = comparison["lookup"].overall
    assert lookup.num_tokens == sum(result.metrics.num_tokens for result in results) == 36
    steps = sum(result.metrics.num_verify_steps for result in results)
    assert lookup.num_verify_steps == steps
    assert lookup.mean_acceptance_length == pytest.approx(36 / steps)
    accepted = sum(row.from_draft.sum() for result in results for row in result)
    assert lookup.mean_accepted_tokens == pytest.approx(accepted / steps)
    logprobs = np.concatenate([result[0].logprobs for result in results])
    assert lookup.mean_logprob == pytest.approx(logprobs.mean(), abs=1e-4)
    assert lookup.tokens_per_second == pytest.approx(36 / lookup.seconds)


def test_an_honest_drafter_agrees_and_a_liar_does_not(comparison):
    assert comparison["lookup"].num_identical == 3
    assert comparison["lookup"].divergences == ()
    assert comparison["liar"].num_identical < 3
    assert comparison.differences["liar"]
    assert not comparison.outputs_agree


def test_a_prompt_that_does_not_fit_is_a_failure_and_in_no_figure(comparison):
    (failure,) = comparison.failures
    assert failure.prompt_index == 2
    assert "3000 tokens" in failure.reason
    assert comparison.prompt_indices == (0, 1, 3)
    assert all(row.overall.num_prompts == 3 for row in comparison.rows)


def test_subsets_are_chosen_by_the_plain_output(comparison):
    repetitions = [sample.repeated_ngrams for sample in comparison.plain.samples]
    expected = sum(share < LOW_REPETITION for share in repetitions)
    for row in comparison.rows:
        assert (row.low_repetition.num_prompts if row.low_repetition else 0) == expected
        assert {c: f.num_prompts for c, f in row.by_category.items()} == {
            "numbers": 1,
            "letters": 1,
        }


def test_memory_covers_the_weights(comparison, model):
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert comparison.weight_bytes == weights
    assert all(row.peak_bytes > weights for row in comparison.rows)
    assert all(row.first_token_seconds > 0 for row in comparison.rows)
    assert comparison.bound_tokens_per_second > 0


def test_json_holds_every_row_and_prompt(comparison):
    plain = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert plain["outputs_agree"] is False
    assert plain["tie_gap"] == TIE_GAP
    assert plain["machine"]["jax"] == jax.__version__
    assert plain["dtype"] == "float32"
    assert plain["failures"][0]["prompt_index"] == 2
    lookup = plain["rows"][1]
    assert len(lookup["overall"]["acceptance_per_position"]) == 2
    assert [prompt["prompt_index"] for prompt in lookup["prompts"]] == [0, 1, 3]
    assert all(not divergence["is_tie"] for divergence in plain["rows"][2]["divergences"])


def test_the_table_states_its_conventions_and_fits(comparison):
    text = str(comparison)
    assert repr(comparison) == text
    for part in ("bonus token INCLUDED", "bonus token EXCLUDED", "DIFFER", "FAILED: prompt 2"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_sampled_outputs_are_not_compared(model):
    config = GenerationConfig(max_new_tokens=4, temperature=1.0)
    sampled = jaxspec.compare(model, ["abc"], {}, config, repeats=1, progress=False)
    assert sampled.plain.num_identical is None
    assert sampled.outputs_agree
    assert sampled.plain.overall.speedup_interval is None
    assert "sampled" in str(sampled)


@pytest.fixture(scope="module")
def plain(model):
    return generate(model, "abc", CONFIG)[0]


class TestDivergence:
    """The place at which outputs part, and whether rounding explains it."""

    def changed(self, row, tokens, reason="length"):
        return dataclasses.replace(row, tokens=np.asarray(tokens), finish_reason=reason)

    def find(self, model, plain, other):
        request = prepare(model, "abc", CONFIG, None, 0)
        return find_divergence(model, request, 7, plain, other)

    def test_equal_outputs_have_none(self, model, plain):
        assert self.find(model, plain, plain) is None

    def test_another_token_is_found_with_its_gap(self, model, plain):
        tokens = plain.tokens.copy()
        tokens[5] = (tokens[5] + 1) % model.vocab_size
        found = self.find(model, plain, self.changed(plain, tokens))
        assert found[:4] == (7, 5, plain.tokens[5], tokens[5])
        logits = jaxspec.score(model, [*plain.prompt_tokens, *plain.tokens[:5]]).logits[-1]
        assert found.gap == pytest.approx(logits.max() - logits[tokens[5]])
        assert not found.is_tie

    def test_tokens_with_equal_logits_are_a_tie(self, model, plain):
        head = jnp.zeros_like(model.params["head"]["kernel"])
        network = type(model.network)({**model.params, "head": {"kernel": head}}, model.config)
        indifferent = Model(network, model.tokenizer, "indifferent")
        tokens = plain.tokens.copy()
        tokens[0] = (tokens[0] + 1) % model.vocab_size
        found = self.find(indifferent, plain, self.changed(plain, tokens))
        assert found.gap == 0
        assert found.is_tie

    def test_an_output_that_ends_early_is_no_tie(self, model, plain):
        found = self.find(model, plain, self.changed(plain, plain.tokens[:4]))
        assert found[:4] == (7, 4, plain.tokens[4], None)
        assert not found.is_tie

    def test_another_reason_to_end_is_a_difference(self, model, plain):
        found = self.find(model, plain, self.changed(plain, plain.tokens, "stop_token"))
        assert found is not None
        assert not found.is_tie


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafters": {"plain": WrongRoot()}}, "drafters: 'plain' names plain decoding"),
        ({"drafters": [WrongRoot()]}, "drafters: give a dictionary of drafters by name.*got list"),
        ({"model": "demo"}, "model must be a Model, got str"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"repeats": "3"}, "repeats must be a whole number, got '3'"),
        ({"categories": ["a"]}, "categories: got 1 for 2 prompts"),
        ({"categories": ["a", 5]}, r"categories\[1\] must be a text, got 5"),
        ({"categories": 5}, "categories must be a sequence, got 5"),
        ({"drafters": {5: WrongRoot()}}, "drafters: each key must be a text, got 5"),
        ({"config": 5, "top_k": 3}, "config must be a GenerationConfig, got int"),
        ({"config": GenerationConfig(num_samples=2)}, "num_samples must be 1"),
        ({"config": GenerationConfig(temperature=[0.0, 1.0])}, "temperature must be one value"),
        ({"config": GenerationConfig(max_new_tokens=0)}, "max_new_tokens must be at least 1"),
        ({"prompts": ["y" * 5000]}, "none of 1 can be decoded"),
    ],
)
def test_bad_arguments_are_named(model, arguments, message):
    defaults = {"model": model, "prompts": ["a", "b"], "drafters": {}, "progress": False}
    with pytest.raises(ValueError, match=message):
        jaxspec.compare(**{**defaults, **arguments})


def test_drafts_of_a_diffusion_model_are_compared_with_stepwise_decoding():
    model = filling_model("filling", None)
    prompts = [[1, 2, 3], [4] * 40, "x" * 5000]
    drafters = {"two": SelfSpeculation(2), "relaxed": SelfSpeculation(2, lossy_top_k=5)}
    config = DenoiseConfig(8, 4)
    found = jaxspec.compare(model, prompts, drafters, config, repeats=1, progress=False)
    assert [row.name for row in found.rows] == ["stepwise", "two", "relaxed"]
    assert found.prompt_indices == (0, 1)
    assert "5000 tokens" in found.failures[0].reason
    texts = [jaxspec.denoise(model, [prompt], config)[0] for prompt in prompts[:2]]
    assert [sample.texts for sample in found.plain.samples] == [
        [text.tokens.tolist()] for text in texts
    ]
    assert found.plain.overall.num_verify_steps == sum(text.num_calls for text in texts)
    assert found["two"].num_identical == 2
    assert found.outputs_agree
    assert found["relaxed"].divergences
    assert all(each.gap is None for each in found["relaxed"].divergences)
    assert not found.differences["relaxed"]
    shown = repr(found)
    assert "saved: share of stepwise decoding's calls" in shown
    assert "Stepwise decoding reaches" in shown
    assert json.dumps(found.as_dict())


def test_sampled_texts_of_a_diffusion_model_are_compared():
    model, config = filling_model("filling", None), DenoiseConfig(8, 4, temperature=1.0)
    drafters = {"two": SelfSpeculation(2), "relaxed": SelfSpeculation(2, lossy_top_k=5)}
    found = jaxspec.compare(model, [[1, 2, 3]], drafters, config, repeats=1, progress=False)
    assert found["two"].num_identical == 1
    assert found["relaxed"].num_identical == 0
    assert found.outputs_agree


def test_a_text_that_is_not_stepwise_decodings_is_a_difference():
    model, config = filling_model("filling", None), DenoiseConfig(8, 4)
    runner = DenoiseRunner(model, {"two": SelfSpeculation(2)}, config)
    request = runner.request("two", [1, 2, 3])
    (row,) = runner.decode("two", [1, 2, 3], 0).rows
    tokens = row.tokens.copy()
    tokens[5] += 1
    wrong = dataclasses.replace(row, tokens=tokens)
    assert runner.divergence(0, "two", request, 0, row, row) is None
    found = runner.divergence(7, "two", request, 0, row, wrong)
    assert found[:4] == (7, 5, row.tokens[5], tokens[5])
    assert found.gap > TIE_GAP
    assert not found.is_tie


@pytest.mark.parametrize("settings", [{}, {"threshold": 0.02}])
def test_a_token_with_an_equal_twin_is_a_tie(settings):
    """Nothing but rounding tells the twins apart; in no other text is a decision that close."""
    model, config = filling_model("filling", None), DenoiseConfig(8, 4, **settings)
    (row,) = jaxspec.denoise(model, [[1, 2, 3]], config)
    token = int(np.bincount(row.tokens).argmax())
    twin = next(each for each in range(token + 1, 255) if each not in row.tokens)
    other = np.where(row.tokens == token, twin, row.tokens)
    texts = row.tokens, other
    assert not denoising.divergence_of_canvas(model, 0, [1, 2, 3], config, *texts).is_tie
    table, head = model.params["embed"]["embedding"], model.params["head"]["kernel"]
    alike = {
        "embed": {"embedding": table.at[twin].set(table[token])},
        "head": {"kernel": head.at[:, twin].set(head[:, token])},
    }
    network = Network({**model.params, **alike}, model.config)
    twins = dataclasses.replace(model, network=network)
    (row,) = jaxspec.denoise(twins, [[1, 2, 3]], config)
    texts = row.tokens, np.where(row.tokens == token, twin, row.tokens)
    assert token in row.tokens
    assert denoising.divergence_of_canvas(twins, 0, [1, 2, 3], config, *texts).is_tie


EVEN = EvenPace(np.int32(4))


@pytest.mark.parametrize(
    ("settings", "scores", "lead", "gap"),
    [
        ({}, (-0.3, -0.1, -0.2, -0.4), 1.0, 0.5),  # -0.1 before -0.2
        ({}, (-0.3, -0.1, -0.2, -0.4), 0.3, 0.3),
        ({}, (-0.1, -1.0e-8, -1.5e-8, -1.0), 1.0, 1 / 3),  # probabilities that both round to 1
        ({"pace": ThresholdPace(np.float32(-0.16))}, (-0.3, -0.1, -0.2, -0.4), 1.0, 0.2),
        # Both lie below the threshold: one is filled in nevertheless.
        ({"pace": ThresholdPace(np.float32(-0.01))}, (-0.9, -0.8, -1.0, -2.0), 1.0, 0.1 / 0.9),
        ({"order": "random"}, (-0.3, -0.1, -0.11, -0.4), 1.0, 1.0),
        ({"opens_with_first": True}, (-0.3, -0.1, -0.2, -0.4), 1.0, 0.5),
        ({"opens_with_first": True, "step": 0}, (-0.3, -0.1, -0.2, -0.4), 1.0, 1.0),
        ({"allow_mask_token": True}, (-0.3, -0.1, -0.2, -0.4), 0.3, 0.3),
    ],
)
def test_the_gap_of_a_decision_by_hand(settings, scores, lead, gap):
    """A block of four masks, of which one is filled in: the mask itself, if it may be."""
    mask, settings = 9, dict(settings)
    step, pace = np.int32(settings.pop("step", 1)), settings.pop("pace", EVEN)
    rules = Rules(4, **{"order": "low_confidence", **settings}, mask_token_id=mask, num_tokens=mask)
    canvas = Canvas(
        np.asarray([5, *[mask] * 5]), np.int32(1), step, np.int32(4), np.int32(Stop.RUNNING)
    )
    tokens = np.asarray([mask if rules.allow_mask_token else 7] * 4)
    values = np.repeat([[2.0, 2.0 - lead]], 4, axis=0)
    every = np.ones(4, bool)
    said = Prediction(
        np.int32(1), tokens, np.asarray(scores, np.float32), every, every, None, values
    )
    assert denoising.closest_decision(rules, pace, canvas, said) == pytest.approx(gap, rel=1e-5)


def test_the_decisions_up_to_a_contradiction_by_hand():
    """Decisions 0, 1 and 2 fill in places 1, 0 and 2."""
    gaps, text, filled_by = map(np.asarray, ([3.0, 2.0, 1.0], [7, 8, 9], [1, 0, 2]))
    path = denoising.StepwisePath(gaps, text, filled_by)
    assert path.least_gap([7, 5, 9]) == 3.0
    assert path.least_gap([5, 8, 5]) == 2.0
    assert path.least_gap([7, 8, 5]) == path.least_gap([7, 8, 9]) == path.least_gap([7]) == 1.0


def test_a_prompt_is_followed_once_for_all_methods(monkeypatch):
    model, config = filling_model("filling", None), DenoiseConfig(8, 4)
    runner = DenoiseRunner(model, {"one": SelfSpeculation(1), "two": SelfSpeculation(2)}, config)
    followed, follow = [], denoising._follow
    monkeypatch.setattr(denoising, "_follow", lambda each: followed.append(0) or follow(each))
    request = runner.request("one", [1, 2, 3])
    (row,) = runner.decode("one", [1, 2, 3], 0).rows
    for method, place in (("one", 2), ("two", 5)):
        tokens = row.tokens.copy()
        tokens[place] += 1
        wrong = dataclasses.replace(row, tokens=tokens)
        assert runner.divergence(0, method, request, 0, row, wrong).position == place
    assert len(followed) == 1


def test_where_one_text_ends_rounding_explains_nothing():
    model, config = filling_model("filling", None), DenoiseConfig(8, 4)
    (row,) = jaxspec.denoise(model, [[1, 2, 3]], config)
    found = denoising.divergence_of_canvas(model, 0, [1, 2, 3], config, row.tokens, row.tokens[:5])
    assert found == (0, 5, row.tokens[5], None, None)
    assert not found.is_tie


def test_a_sharper_distribution_makes_rounding_larger():
    configs = [DenoiseConfig(4, 4, guidance=scale) for scale in (0.0, 2.0)]
    assert [denoising._sharpness(config) for config in configs] == [1.0, 0.2]
    assert denoising._sharpness(DenoiseConfig(4, 4, temperature=0.1)) == pytest.approx(0.1)
    assert denoising._sharpness(DenoiseConfig(4, 4, temperature=3.0)) == 1.0
