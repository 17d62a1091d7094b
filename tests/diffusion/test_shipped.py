"""The shipped diffusion models on held-out prompts: texts are those of stepwise decoding."""

import pytest

from benchmarks.prompts import PROMPT_SETS, first_that_fit, read_prompt_set
from benchmarks.suites.diffusion import BLOCKS, BOTH_SIDES, Setting, next_to_stepwise
from jaxspec import DenoiseConfig, SelfSpeculation, denoise, load
from jaxspec.checkpoint import shipped_models

pytestmark = pytest.mark.slow
GENERATED, ROOM = 64, 320


def shipped(name: str):
    if name not in shipped_models():
        pytest.skip(f"needs checkpoints/{name}, which is not here")
    return load(name)


def held_out(data_folder, model, per_set: int) -> list[str]:
    folder = data_folder("eval")
    sets = [read_prompt_set(group, folder) for group in PROMPT_SETS]
    return [prompt.text for rows in sets for prompt in first_that_fit(rows, model, ROOM, per_set)]


SETTINGS = {
    "blocks": Setting("blocks", BLOCKS, DenoiseConfig(GENERATED)),
    "dual, 8": Setting("dual, 8", BOTH_SIDES, DenoiseConfig(GENERATED, 8, cache="dual")),
    "dual, 32": Setting("dual, 32", BOTH_SIDES, DenoiseConfig(GENERATED, 32, cache="dual")),
    "no cache": Setting("no cache", BOTH_SIDES, DenoiseConfig(16, 8)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafting_changes_no_text(data_folder, name):
    setting = SETTINGS[name]
    model = shipped(setting.model)
    prompts = held_out(data_folder, model, 1 if name == "no cache" else 2)
    chains = {f"N = {count}": SelfSpeculation(count) for count in (1, 4)}
    stepwise, found = next_to_stepwise(setting, model, prompts, chains)
    for texts in found:
        assert texts.num_wrong == 0
        assert texts.num_calls < stepwise.num_calls


@pytest.mark.parametrize("name", ["blocks", "dual, 8"])
def test_a_batch_equals_each_alone(data_folder, name):
    setting = SETTINGS[name]
    model = shipped(setting.model)
    prompts = held_out(data_folder, model, 1)
    together = denoise(model, prompts, setting.config, SelfSpeculation(4))
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = denoise(model, prompt, setting.config, SelfSpeculation(4))
        assert alone.tokens.tolist() == row.tokens.tolist()


def test_drafts_are_as_many_as_pay(data_folder):
    """Drafts are many if memory bounds a pass, and none if each canvas costs a whole pass."""
    model = shipped(BLOCKS)
    prompts, config = held_out(data_folder, model, 1)[:1], DenoiseConfig(GENERATED)
    cheap, dear = (1.0, 1.05, 1.1, 1.15, 1.2), (1.0, 2.0, 3.0, 4.0, 5.0)
    (drafting,) = denoise(model, prompts, config, SelfSpeculation(4, costs=cheap))
    (stepwise,) = denoise(model, prompts, config, SelfSpeculation(4, costs=dear))
    assert drafting.tokens.tolist() == stepwise.tokens.tolist()
    assert drafting.num_calls < 0.7 * stepwise.num_calls
    assert stepwise.num_canvases == stepwise.num_calls
