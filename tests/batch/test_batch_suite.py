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
from jaxspec.checkpoint import save_eagle
from jaxspec.cli import main
from jaxspec.drafters import Eagle, LoadedDrafter
from tests.laws.drafters import FORKED, eagle_head

SMALL = BatchSuite(
    prompts_per_set=24,
    max_new_tokens=8,
    batch=8,
    rows_of_one=2,
    hashed=24,
    sizes=(2, 32),
    waves=2,
    fewest=3,
)


@pytest.mark.slow
def test_the_suite_measures_everything_once(model, folder, tmp_path):
    head = eagle_head(model.network)
    save_eagle(head, tmp_path / "head")
    (tmp_path / "tree.json").write_text(json.dumps(FORKED))
    drafter = LoadedDrafter(Eagle(FORKED), head)
    flags = ["--model", folder, "--drafter"]
    flags.append(f"eagle:head={tmp_path / 'head'},tree={tmp_path / 'tree.json'}")
    prompts = [list(range(1, 5 + i)) for i in range(24)]
    said = []
    figures = measure_batches(model, drafter, prompts, SMALL, 1, said.append, flags)
    assert figures.as_it_should
    assert len({way.digest for way in figures.ways}) == 1
    assert [way.name for way in figures.ways] == [
        "2 rows at once, plain",
        "1 row at once, drafted",
        "2 rows at once, drafted",
        "8 rows at once, drafted",
        "shuffled, drafted",
        "guarded",
        "stopped on the way and resumed, drafted",
        "on 8 virtual devices, drafted",
    ]
    assert [point.rows for point in figures.curve] == [2]  # there are no 32 prompts
    assert all(speed.ratio > 0 for speed in figures.speeds.values())
    assert {name: report.refilled.num_done for name, report in figures.speeds.items()} == {
        "plain": 24,
        "drafted": 24,
    }
    page = as_markdown(figures)
    assert "jaxspec bench --suite batch --prompts-per-set 24 --repeats 1" in page
    assert "24 prompts in 8 ways: 1 hash of all tokens" in page
    assert json.loads(json.dumps(as_dict(figures)))["num_prompts"] == 24
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
