"""Suites of single costs."""

import dataclasses

import pytest

import jaxspec
from benchmarks.harness import measure
from benchmarks.suites import costs
from benchmarks.suites.costs import COST_SUITES, PassCosts, StepCost, measure_rows
from jaxspec.measure.passes import NUM_TOKENS
from tests.benchmarks.conftest import TIMES


def test_a_batch_is_compared_with_one_row(model):
    found = measure_rows(model, num_rows=2, repeats=1)
    assert found.ratio == pytest.approx(found.batch / found.one)
    assert min(found.batch, found.one) > 0
    assert found.num_rows == 2


def test_passes_are_measured_at_the_widths_asked_for(monkeypatch):
    def made_up(network, repeats):
        assert repeats == 2
        return {n: 0.1 * n for n in NUM_TOKENS}

    monkeypatch.setattr(costs, "measure_passes", made_up)
    page = measure("passes", COST_SUITES["passes"], repeats=2, dims="64,320", progress=False)
    assert [cost.embed_dim for cost in page.figures["passes"]] == [64, 320]
    assert page.sections[0].rows[0][-1] == "32.00"
    with pytest.raises(ValueError, match="dims must be widths"):
        measure("passes", COST_SUITES["passes"], dims="wide", progress=False)


def test_passes_are_set_against_reading_the_weights():
    costs = PassCosts(320, 10, 100.0, {1: 0.1, 8: 0.2})
    assert (costs.over_reading, costs.ratio(8)) == (1.0, 2.0)


def test_steps_are_set_against_their_parts(model, tmp_path, monkeypatch):
    jaxspec.save(model, tmp_path / "tiny")
    monkeypatch.setattr(costs, "measure_drafter", lambda *_: TIMES)
    names = {"model": str(tmp_path / "tiny"), "draft_model": str(tmp_path / "tiny")}
    page = measure("step", COST_SUITES["step"], progress=False, **names)
    found = page.figures["steps"]
    assert len(found) == len(page.sections[0].rows) == 4 * 3
    assert isinstance(found[0], StepCost)
    assert found[0].ratio == pytest.approx(8 / 7)


def test_rows_are_at_least_one(model, tmp_path):
    jaxspec.save(model, tmp_path / "tiny")
    with pytest.raises(ValueError, match=r"rows must be 1, 2, 6 or a multiple of 8.*got 0"):
        measure("rows", COST_SUITES["rows"], model=str(tmp_path / "tiny"), rows=0)


@pytest.mark.slow
def test_the_start_is_measured(model, tmp_path):
    jaxspec.save(model, tmp_path / "tiny")
    names = {"model": str(tmp_path / "tiny"), "draft_model": str(tmp_path / "tiny")}
    page = measure("startup", COST_SUITES["startup"], repeats=1, progress=False, **names)
    assert page.figures["seconds"].keys() == costs.START_AIMS.keys()
    assert min(page.figures["seconds"].values()) > 0


@pytest.mark.usefixtures("shipped")
def test_rounded_weights_are_set_against_float32(data_folder):
    suite = dataclasses.replace(COST_SUITES["weights"], max_new_tokens=8, needs=("demo",))
    page = measure("weights", suite, data_folder, 1, progress=False)
    assert [row[:2] for row in page.sections[0].rows] == [
        ["demo", part] for part in costs.TEXT_PARTS
    ]
    for found in page.figures["agreement"]["demo"].values():
        assert found.positions > 0
        assert 0 < found.kl < 0.1
        assert 0.5 < found.top1 <= 1
