"""Figures that the shipped diffusion models must reach on held-out prompts."""

import dataclasses

import jax
import pytest

from benchmarks.prompts import PROMPT_SETS, first_that_fit, read_prompt_set
from benchmarks.suites.diffusion import BLOCKS, BOTH_SIDES, Setting, next_to_stepwise
from jaxspec import DenoiseConfig, SelfSpeculation, denoise, load
from jaxspec.checkpoint import shipped_models
from jaxspec.decoding.denoise import measure_costs, prepare_denoising
from jaxspec.decoding.metrics import repeated_ngrams
from jaxspec.measure.figures import LOW_REPETITION
from jaxspec.measure.timing import time_in_turns

pytestmark = pytest.mark.slow
GENERATED, ROOM = 64, 320


def shipped(name: str):
    if name not in shipped_models():
        pytest.skip(f"needs checkpoints/{name}, which is not here")
    return load(name)


def held_out(shared_folder, model, per_set: int) -> list[str]:
    folder = shared_folder("data", "eval")
    sets = [read_prompt_set(group, folder) for group in PROMPT_SETS]
    return [prompt.text for rows in sets for prompt in first_that_fit(rows, model, ROOM, per_set)]


SETTINGS = {
    "blocks": Setting("blocks", BLOCKS, DenoiseConfig(GENERATED)),
    "dual, 8": Setting("dual, 8", BOTH_SIDES, DenoiseConfig(GENERATED, 8, cache="dual")),
    "dual, 32": Setting("dual, 32", BOTH_SIDES, DenoiseConfig(GENERATED, 32, cache="dual")),
    "no cache": Setting("no cache", BOTH_SIDES, DenoiseConfig(GENERATED, 8)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafting_changes_no_text(data_folder, name):
    """60 prompts, or 12 without a cache, N = 1..5.

    Near ties, which kernels of another shape may decide in another way, must agree in passes of
    one shape.
    """
    setting = SETTINGS[name]
    model = shipped(setting.model)
    prompts = held_out(data_folder, model, 4 if name == "no cache" else 20)
    chains = {f"N = {count}": SelfSpeculation(count) for count in range(1, 6)}
    stepwise, found = next_to_stepwise(setting, model, prompts, chains)
    for texts in found:
        assert texts.still_different == 0
        assert texts.num_same >= len(prompts) - 2
        assert texts.num_calls < stepwise.num_calls


@pytest.mark.parametrize("name", ["blocks", "dual, 8"])
def test_a_batch_of_eight_equals_each_alone(data_folder, name):
    setting = SETTINGS[name]
    model = shipped(setting.model)
    prompts = held_out(data_folder, model, 3)[:8]
    together = denoise(model, prompts, setting.config, SelfSpeculation(4))
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = denoise(model, prompt, setting.config, SelfSpeculation(4))
        assert alone.tokens.tolist() == row.tokens.tolist()


@pytest.mark.parametrize("only_low_repetition", [False, True])
@pytest.mark.parametrize("model_name", [BLOCKS, BOTH_SIDES])
def test_calls_saved_with_four_drafts(data_folder, model_name, only_low_repetition):
    """At least a half on GSM8K, also where the text repeats little."""
    model = shipped(model_name)
    prompts = held_out(data_folder, model, 20)[:20]
    cache = None if model_name == BLOCKS else "none"
    config = DenoiseConfig(GENERATED, 8, cache=cache)
    stepwise = denoise(model, prompts, config)
    drafted = denoise(model, prompts, config, SelfSpeculation(4))
    pairs = [
        (one, other)
        for one, other in zip(drafted, stepwise, strict=True)
        if not only_low_repetition or repeated_ngrams([other.tokens.tolist()]) < LOW_REPETITION
    ]
    if not pairs:
        pytest.skip("every text repeats itself")
    calls = sum(one.num_calls for one, _ in pairs)
    saved = 1 - calls / sum(other.num_calls for _, other in pairs)
    assert saved >= 0.5, f"{saved:.1%} of the calls of {len(pairs)} texts"


def seconds_of(model, prompts, config, ways) -> dict[str, float]:
    requests = {n: prepare_denoising(model, prompts, config, way, 0) for n, way in ways.items()}
    found = time_in_turns({name: each.denoise for name, each in requests.items()}, 15)
    return {name: float(min(times)) for name, times in found.items()}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="figures are of a CPU")
def test_drafting_pays_where_blocks_are_cached(data_folder):
    model = shipped(BLOCKS)
    prompts, config = held_out(data_folder, model, 1)[:1], DenoiseConfig(GENERATED)
    ways = {str(count): SelfSpeculation(count) for count in range(6)}
    costs = measure_costs(model, prompts, config, SelfSpeculation(4))
    ways["as pays"] = dataclasses.replace(SelfSpeculation(4), costs=costs)
    seconds = seconds_of(model, prompts, config, ways)
    best = min(time for name, time in seconds.items() if name != "0")
    assert seconds["0"] / best >= 1.3
    adaptive = denoise(model, prompts, config, ways["as pays"])
    assert adaptive[0].num_canvases > adaptive[0].num_calls


def test_drafts_are_as_many_as_pay(data_folder):
    """Drafts are many if memory bounds a pass, and none if each canvas costs a whole pass."""
    model = shipped(BLOCKS)
    prompts, config = held_out(data_folder, model, 1)[:1], DenoiseConfig(GENERATED)
    cheap, dear = (1.0, 1.05, 1.1, 1.15, 1.2), (1.0, 2.0, 3.0, 4.0, 5.0)
    (drafting,) = denoise(model, prompts, config, SelfSpeculation(4, costs=cheap))
    (stepwise,) = denoise(model, prompts, config, SelfSpeculation(4, costs=dear))
    assert drafting.num_calls < 0.7 * stepwise.num_calls
    assert stepwise.num_canvases == stepwise.num_calls


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="figures are of a CPU")
def test_drafting_is_left_where_it_does_not_pay(data_folder):
    """Without a cache a CPU has no time to spare: a further canvas costs as much as the first."""
    model = shipped(BOTH_SIDES)
    prompts, config = held_out(data_folder, model, 1)[:1], DenoiseConfig(32, 8)
    costs = measure_costs(model, prompts, config, SelfSpeculation(4))
    ways = {
        "stepwise": SelfSpeculation(0),
        "as pays": dataclasses.replace(SelfSpeculation(4), costs=costs),
    }
    (row,) = denoise(model, prompts, config, ways["as pays"])
    assert row.num_canvases == row.num_calls
    seconds = seconds_of(model, prompts, config, ways)
    assert seconds["as pays"] <= 1.03 * seconds["stepwise"]
