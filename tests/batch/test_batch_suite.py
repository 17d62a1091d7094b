"""`jaxspec bench --suite batch`, on a tiny model: what the page says, and what is refused."""

import json

import pytest

from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.suite import (
    BATCH_SUITES,
    BatchSuite,
    CurvePoint,
    as_dict,
    as_markdown,
    measure_batches,
    plot_curve,
    plot_place,
)
from jaxspec.cli import main
from jaxspec.drafters import Eagle, LoadedDrafter
from tests.laws.drafters import FORKED, eagle_head

SMALL = BatchSuite(
    prompts_per_set=10,
    max_new_tokens=8,
    batch=4,
    rows_of_one=2,
    hashed=5,
    sizes=(1, 2),
    waves=2,
    fewest=3,
)


@pytest.mark.slow
def test_the_suite_measures_everything_once(model):
    drafter = LoadedDrafter(Eagle(FORKED, chunk=8), eagle_head(model.network))
    prompts = [list(range(1, 5 + 3 * i)) for i in range(10)]
    said = []
    figures = measure_batches(model, drafter, prompts, SMALL, 1, said.append)
    assert figures.as_it_should
    assert len({way.digest for way in figures.ways}) == 1
    assert len(figures.ways) == 7
    assert [point.rows for point in figures.curve] == [1, 2]
    assert all(speed.ratio > 0 for speed in figures.speeds.values())
    assert {name: report.refilled.num_done for name, report in figures.speeds.items()} == {
        "plain": 10,
        "drafted": 10,
    }
    page = as_markdown(figures)
    assert "jaxspec bench --suite batch --prompts-per-set 10 --repeats 1" in page
    assert "5 prompts in 7 ways: 1 hash of all tokens" in page
    assert json.loads(json.dumps(as_dict(figures)))["num_prompts"] == 10
    assert any("refilled slots, drafted" in doing for doing in said)


def test_the_curve_is_drawn_beside_the_docs(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plots: pip install '.[plots]'")
    (tmp_path / "checkpoints").mkdir()
    page = tmp_path / "checkpoints" / "RESULTS.md"
    assert plot_place(page) == page.parent / "batch.png"
    (tmp_path / "docs").mkdir()
    assert plot_place(page) == tmp_path / "docs" / "batch.png"
    points = [CurvePoint(n, 10.0, 20.0 / n, 15.0, 16.0, 0.5, 0.5) for n in (1, 2, 4)]
    plot_curve(points, plot_place(page))
    assert (tmp_path / "docs" / "batch.png").stat().st_size > 1000


def test_a_curve_says_what_the_guard_begins_with():
    point = CurvePoint(4, 10.0, 8.0, 9.9, 10.0, 0.1, 0.0)
    assert GuardSettings(expected=point.speedup).expected == 0.8


def test_what_the_suite_lacks_is_named(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra plots: pip install '.[plots]'")
    argv = ["bench", "--suite", "batch", "--out", str(tmp_path / "x.md")]
    assert main([*argv, "--data-folder", str(tmp_path)]) == 2
    assert BATCH_SUITES["batch"].prompt_set.file in capsys.readouterr().err
    assert main([*argv, "--repeats", "0"]) == 2
    assert "repeats must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
