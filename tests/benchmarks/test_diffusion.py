"""Suites of diffusion language models, with tiny networks in place of the shipped ones."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.harness import SuiteRun, measure
from benchmarks.page import Page
from benchmarks.suites import diffusion
from benchmarks.suites.diffusion import (
    BLOCKS,
    BOTH_SIDES,
    DIFFUSION_SUITES,
    JUDGE,
    Setting,
    Texts,
    next_to_stepwise,
    samples_of,
)
from jaxspec import DenoiseConfig, SelfSpeculation
from jaxspec.checkpoint import Model
from jaxspec.decoding.denoise import Denoised
from jaxspec.decoding.metrics import Counts
from jaxspec.measure.figures import Sample
from tests.measure.models import filling_model, tiny_model

CONFIG = DenoiseConfig(8, 4, stop_token_ids=())


def load(name: str, dtype: str | None = None) -> Model:
    """In place of the shipped ones."""
    if name == JUDGE:
        return tiny_model()
    return filling_model(name, 4 if name == BLOCKS else None)


@pytest.fixture
def tiny(monkeypatch):
    """Suites of a minute."""
    blocks = Setting("blocks", BLOCKS, CONFIG)
    dual = Setting("dual", BOTH_SIDES, dataclasses.replace(CONFIG, cache="dual"))
    monkeypatch.setattr(diffusion, "load", load)
    diffusion._loaded.cache_clear()
    monkeypatch.setattr(diffusion, "_MOST_DRAFTS", 1)
    monkeypatch.setattr(diffusion, "_DRAFTS", 1)
    monkeypatch.setattr(diffusion, "_LONG", 12)
    monkeypatch.setattr(diffusion, "_BLOCK_CAUSAL", blocks)
    for name in ("_DUAL", "_DUAL_32", "_PREFIX", "_UNCACHED"):
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
def test_a_suite_is_measured(name, data_folder, tmp_path):
    suite = dataclasses.replace(DIFFUSION_SUITES[name], needs=())
    page = measure(name, suite, data_folder, 2, progress=False)
    assert page.agree
    cells = [cell for section in page.sections for row in section.rows for cell in row]
    assert "N = 1" in cells or "threshold 0.5, LOSSY, N = 1" in cells
    json.dumps(page.as_dict(), allow_nan=False)
    for file, draw in page.plots.items():
        draw(tmp_path / file)
        assert "<svg" in (tmp_path / file).read_text()


def test_a_model_that_is_asked_for_is_measured_where_it_fits(monkeypatch):
    monkeypatch.setattr(diffusion, "load", load)
    diffusion._loaded.cache_clear()
    settings = [Setting("blocks", BLOCKS, CONFIG), Setting("dual", BOTH_SIDES, CONFIG)]
    suite = DIFFUSION_SUITES["diffusion"]

    def asked(model: str | None) -> list[tuple[str, str]]:
        run = SuiteRun(suite, Path(), 1, 1, {"model": model})
        return [(each.name, each.model) for each in diffusion.settings_of(run, *settings)]

    assert asked(None) == [("blocks", BLOCKS), ("dual", BOTH_SIDES)]
    assert asked("other") == [("dual", "other")]
    with pytest.raises(ValueError, match="--model: demo is causal; give a diffusion"):
        asked(JUDGE)


def test_weights_have_the_type_asked_for(monkeypatch, data_folder):
    loaded = []
    monkeypatch.setattr(diffusion, "load", lambda *asked: loaded.append(asked) or load(BLOCKS))
    settings = {"model": "other", "dtype": "bfloat16"}
    run = SuiteRun(DIFFUSION_SUITES["diffusion"], data_folder, 1, 1, settings)
    diffusion._loaded.cache_clear()
    diffusion._load(run, Setting("blocks", "other", CONFIG))
    assert loaded == [("other", "bfloat16")]


def test_texts_are_no_headings_of_the_page():
    written = dataclasses.replace(row([1], 1, [1], [1]), text="# a comment\n\n# another\n")
    section = samples_of(Setting("blocks", BLOCKS, CONFIG), [("# asked\n", written)])
    page = Page([section], {}, title="Suite").as_markdown()
    assert "\n    # asked\n" in page
    assert "\n    # a comment\n    \n    # another" in page
    assert [line for line in page.splitlines() if line.startswith("# ")] == ["# Suite"]


def row(tokens: list[int], calls: int, drafted: list[int], accepted: list[int]) -> Denoised:
    arrays = [np.asarray(each) for each in ([1], tokens)]
    counts = [np.asarray(each) for each in (drafted, accepted)]
    return Denoised(*arrays, None, "length", calls, calls, *counts)


def sample(*rows: Denoised) -> Sample:
    return Sample(rows, 1.0, sum((row.counts for row in rows), Counts()))


def test_figures_by_hand():
    stepwise = sample(row([1, 2, 3, 4], 4, [4], [4]), row([5, 6], 2, [2], [2]))
    # Two passes with 1 draft each and one with 2: of these 4 drafts, 1 + 2 are kept.
    rows = [row([1, 2, 9, 4], 3, [0, 2, 1], [1, 1, 1]), row([5], 1, [1, 0], [1, 0])]
    found = Texts("found", 2, sample(*rows), stepwise)
    assert found.saved() == pytest.approx(1 - 4 / 6)
    assert found.saved([1]) == pytest.approx(1 / 2)
    assert found.acceptance == pytest.approx(3 / 4)
    assert found.bound == pytest.approx(2 / 3)
    assert found.num_same == 0
    assert found.agreement == pytest.approx(4 / 6)


@pytest.mark.usefixtures("tiny")
def test_texts_that_differ_are_listed_with_their_gaps():
    """Those of a relaxed rule, here."""
    setting, model = Setting("blocks", BLOCKS, CONFIG), load(BLOCKS)
    lossy = {"lossy": SelfSpeculation(3, lossy_top_k=200)}
    prompts = ["How many?", "How far is it?"]
    _, (found,) = next_to_stepwise(setting, model, prompts, lossy)
    assert found.num_same < 2
    assert len(found.divergences) == found.num_wrong == 2 - found.num_same
    assert "DIFFER" in found.same_texts
