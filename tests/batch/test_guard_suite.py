"""`jaxspec bench --suite batch-guard`, on a tiny model and on made-up speeds."""

import json
from statistics import median

import pytest

from jaxspec.batch import guard_suite
from jaxspec.batch.bench import Bench
from jaxspec.batch.guard_suite import (
    GUARD_SUITES,
    WAYS,
    CurvePoint,
    GuardFigures,
    GuardSuite,
    as_dict,
    as_markdown,
    measure_curve,
    plot_curve,
    plot_place,
)
from jaxspec.batch.report import JobReport
from jaxspec.drafters import LoadedDrafter, PromptLookup


def point(rows: int, **speeds: tuple[float, ...]) -> CurvePoint:
    """Made up: what is not given is as fast as plain decoding."""
    given = {way: speeds.get(way.replace(" ", "_"), speeds["plain"]) for way in WAYS}
    shares = {way: tuple(0.5 for _ in given[way]) for way in WAYS}
    return CurvePoint(rows, 64, given, shares)


CURVE = (
    point(1, plain=(10.0, 20.0, 10.0), drafted=(20.0, 36.0, 21.0), guarded=(19.0, 38.0, 20.0)),
    point(8, plain=(50.0, 40.0, 50.0), guarded=(48.0, 40.0, 50.5), plain_again=(51.0, 39.0, 50.0)),
)


def test_every_job_is_long_enough():
    suite = GUARD_SUITES["batch-guard"]
    assert [suite.num_prompts(size) for size in (1, 4, 32, 64)] == [64, 64, 512, 1024]
    assert suite.num_prompts(max(suite.sizes)) == suite.prompts_per_set


def test_ways_run_in_turns_every_other_one_backwards(model, monkeypatch):
    """Speeds that fall all the time: a first way is faster than a last one, and then slower."""
    jobs = []

    def made_up(bench, rows, batch, drafting, guard=None, slots=None):
        jobs.append((len(rows), batch, drafting, None if guard is None else guard.expected))
        assert slots >= max(len(row.prompt) for row in rows) + 8
        return JobReport(num_tokens=100 - len(jobs), seconds=1.0)

    monkeypatch.setattr(Bench, "job", made_up)
    drafter, said = LoadedDrafter(PromptLookup(), ()), []
    prompts = [[1] * (3 + i % 40) for i in range(20)]
    bench = Bench(model, drafter, prompts, 8, said.append)
    suite = GuardSuite(max_new_tokens=8, sizes=(4, 32), waves=2, fewest=6)
    figures = measure_curve(bench, suite, 3)
    assert [each.rows for each in figures.curve] == [4]  # there are no 32 prompts
    compiling, turns = jobs[:2], jobs[2:]
    assert {kind for _, _, kind, _ in compiling} == {"never", "always"}
    assert {num for num, _, _, _ in turns} == {8}
    kinds = [kind for _, _, kind, _ in turns]
    forward = ["never", "always", "auto", "auto", "never"]
    assert kinds == [*forward, *reversed(forward), *forward]
    first = 96 / 97
    assert turns[3][3] == pytest.approx(first)
    assert turns[6][3] == pytest.approx(first)  # of the turn before, as this one has none yet
    assert turns[13][3] == pytest.approx(median([first, 89 / 88, 86 / 87]))
    assert figures.curve[0].over_plain("plain again") == pytest.approx((93 / 97, 92 / 88, 83 / 87))


def test_figures_are_ratios_of_the_same_turn():
    assert CURVE[0].over_plain("drafted") == pytest.approx((2.0, 1.8, 2.1))
    figures = GuardFigures(GUARD_SUITES["batch-guard"], 3, "a drafter", 256, CURVE)
    page = as_markdown(figures)
    assert page.startswith("# Where speculation pays, by rows at once\n")
    assert "jaxspec bench --suite batch-guard --prompts-per-set 1024 --repeats 3" in page
    assert "| 2.000 [1.800..2.100] |" in page
    assert "guarded 1.000 at 8 rows, informed 1.000 at 1 row (aim: at least 0.97)" in page
    assert "Noise alone: 0.975 to 1.020." in page
    found = json.loads(json.dumps(as_dict(figures)))["curve"][1]["ways"]["plain again"]
    assert found["over_plain"] == pytest.approx([1.02, 0.975, 1.0])


def test_the_curve_is_drawn_beside_the_docs(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plots: pip install '.[plots]'")
    (tmp_path / "checkpoints").mkdir()
    page = tmp_path / "checkpoints" / "RESULTS.md"
    assert plot_place(page) == page.parent / "batch.png"
    (tmp_path / "docs").mkdir()
    assert plot_place(page) == tmp_path / "docs" / "batch.png"
    plot_curve(CURVE, plot_place(page))
    assert (tmp_path / "docs" / "batch.png").stat().st_size > 1000


def test_the_command_writes_a_part_figures_and_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra plots: pip install '.[plots]'")
    from jaxspec.cli import main
    from jaxspec.commands import bench as command

    def measured(suite, data_folder, repeats):
        figures = GuardFigures(suite, repeats, "a drafter", suite.prompts_per_set, CURVE)
        return figures, as_markdown(figures)

    monkeypatch.setattr(command, "measure_guard_suite", measured)
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("# Decoding files of prompts\n\nAs it was.\n")
    argv = ["bench", "--suite", "batch-guard", "--out", str(page), "--json", str(figures)]
    assert main([*argv, "--prompts-per-set", "32"]) == 0
    written = page.read_text()
    assert written.startswith("# Decoding files of prompts\n\nAs it was.\n\n# Where speculation")
    assert "--prompts-per-set 32 --repeats 3" in written
    assert json.loads(figures.read_text())["suite"] == "batch-guard"
    assert (tmp_path / "batch.png").is_file()
    assert guard_suite.PLOT in capsys.readouterr().err


@pytest.mark.slow
def test_a_curve_is_measured(model):
    drafter, said = LoadedDrafter(PromptLookup(), ()), []
    prompts = [list(range(1, 5 + i)) for i in range(6)]
    suite = GuardSuite(max_new_tokens=8, sizes=(2,), waves=2, fewest=6)
    figures = measure_curve(Bench(model, drafter, prompts, 8, said.append), suite, 2)
    (only,) = figures.curve
    assert only.num_prompts == 6
    assert all(len(only.speeds[way]) == 2 and min(only.speeds[way]) > 0 for way in WAYS)
    assert only.shares["plain"] == only.shares["plain again"] == (0.0, 0.0)
    assert only.shares["drafted"] == (1.0, 1.0)
    assert "2 rows at once, plain again, turn 2 of 2" in said
