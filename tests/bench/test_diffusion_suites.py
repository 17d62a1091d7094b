"""`jaxspec bench --suite diffusion...`, with tiny networks in place of the shipped ones."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec import DenoiseConfig, SelfSpeculation
from jaxspec.bench import diffusion
from jaxspec.bench.diffusion import (
    BLOCKS,
    BOTH_SIDES,
    DIFFUSION_SUITES,
    JUDGE,
    Setting,
    Texts,
    _samples,
    beside_stepwise,
    measure_diffusion,
)
from jaxspec.bench.page import write_part
from jaxspec.bench.shipped import SuitePrompt
from jaxspec.checkpoint import Model
from jaxspec.denoising import Denoised
from tests.bench.models import filling_model, tiny_model

CONFIG = DenoiseConfig(8, 4, stop_token_ids=())


def load(name: str) -> Model:
    """In place of the shipped ones."""
    if name == JUDGE:
        return tiny_model()
    return filling_model(name, 4 if name == BLOCKS else None)


@pytest.fixture
def tiny(monkeypatch):
    """Suites of a minute."""
    blocks = Setting("blocks", BLOCKS, CONFIG)
    dual = Setting("dual", BOTH_SIDES, dataclasses.replace(CONFIG, cache="dual"))
    rows = [SuitePrompt("GSM8K", "How many?"), SuitePrompt("GSM8K", "How far is it?")]
    monkeypatch.setattr(diffusion, "load", load)
    monkeypatch.setattr(diffusion, "shipped_models", lambda: {BLOCKS, BOTH_SIDES, JUDGE})
    monkeypatch.setattr(diffusion, "read_prompt_set", lambda group, folder: rows)
    monkeypatch.setattr(diffusion, "_MOST_DRAFTS", 1)
    monkeypatch.setattr(diffusion, "_DRAFTS", 1)
    monkeypatch.setattr(diffusion, "_LONG", 12)
    monkeypatch.setattr(diffusion, "_BLOCK_CAUSAL", blocks)
    for name in ("_DUAL", "_DUAL_32", "_UNCACHED"):
        monkeypatch.setattr(diffusion, name, dual)
    variants = {"N = 1": SelfSpeculation(1), "top 2, LOSSY": SelfSpeculation(1, lossy_top_k=2)}
    monkeypatch.setattr(diffusion, "_VARIANTS", variants)
    monkeypatch.setattr(diffusion, "_THRESHOLDS", (0.5,))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", DIFFUSION_SUITES)
def test_a_suite_writes_its_part(name, tmp_path):
    measured = measure_diffusion(name, tmp_path, 2, progress=False)
    assert measured.as_it_should
    suite = DIFFUSION_SUITES[name]
    assert measured.markdown.startswith(f"# {suite.title}\n")
    assert f"jaxspec bench --suite {name} --prompts-per-set 2" in measured.markdown
    assert "N = 1" in measured.markdown
    assert _ONE_OF[name] in measured.markdown


_ONE_OF = {
    "diffusion": f"## Texts by {BLOCKS}",
    "diffusion-variants": "threshold 0.5, LOSSY, N = 1",
    "diffusion-times": "No draft saves them: at most",
}


def test_texts_are_no_headings_of_the_page(tmp_path):
    written = row([1], 1, [1], [1])
    written = dataclasses.replace(written, text="# a comment\n\n# another\n")
    part = _samples(Setting("blocks", BLOCKS, CONFIG), [("# asked\n", written)])
    write_part(f"# Suite\n\n{part}", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "\n    # asked\n" in page
    assert "\n    # a comment\n    \n    # another" in page
    write_part("# Other", tmp_path / "page.md")
    assert "\n    # another" in (tmp_path / "page.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("# ")] == ["# Suite"]


@pytest.mark.usefixtures("tiny")
def test_what_is_missing_or_wrong_is_said(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="prompts_per_set must be at least 1, got 0"):
        measure_diffusion("diffusion", tmp_path, 0)
    monkeypatch.setattr(diffusion, "shipped_models", lambda: {BLOCKS, JUDGE})
    with pytest.raises(ValueError, match=f"that are not here: {BOTH_SIDES}"):
        measure_diffusion("diffusion", tmp_path, 1)


def row(tokens: list[int], calls: int, drafted: list[int], accepted: list[int]) -> Denoised:
    arrays = [np.asarray(each) for each in ([1], tokens)]
    counts = [np.asarray(each) for each in (drafted, accepted)]
    return Denoised(*arrays, None, "length", calls, calls, *counts)


def test_figures_by_hand():
    stepwise = Texts("stepwise", 0, [row([1, 2, 3, 4], 4, [4], [4]), row([5, 6], 2, [2], [2])])
    # Of 2 passes with 1 draft each and one with 2: 1 + 2 kept, of 4.
    found = Texts(
        "found", 2, [row([1, 2, 9, 4], 3, [0, 2, 1], [1, 1, 1]), row([5], 1, [1, 0], [1, 0])]
    )
    assert found.saved(stepwise) == pytest.approx(1 - 4 / 6)
    assert found.saved(stepwise, [1]) == pytest.approx(1 / 2)
    assert found.acceptance == pytest.approx(3 / 4)
    assert found.num_same(stepwise) == 0
    assert found.agreement(stepwise) == pytest.approx(4 / 6)


@pytest.mark.usefixtures("tiny")
def test_texts_that_differ_are_decoded_again_with_one_shape(monkeypatch):
    """A relaxed rule differs in either, and is counted."""
    setting, model = Setting("blocks", BLOCKS, CONFIG), load(BLOCKS)
    lossy = {"lossy": SelfSpeculation(3, lossy_top_k=200)}
    prompts = ["How many?", "How far is it?"]
    stepwise, (found,) = beside_stepwise(setting, model, prompts, lossy)
    assert found.num_same(stepwise) < 2
    assert found.still_different == 2 - found.num_same(stepwise)
