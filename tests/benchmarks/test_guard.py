"""The suite of the guard, on a tiny model and on made-up speeds."""

import json
from statistics import median

import pytest

from benchmarks.page import publish
from benchmarks.suites import SUITES
from benchmarks.suites.guard import PLOT, WAYS, CurvePoint, GuardSizes, guard_page, measure_curve
from benchmarks.suites.jobs import Jobs
from jaxspec.batch.report import JobReport
from jaxspec.decoding.metrics import Counts
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
    sizes = GuardSizes()
    assert [sizes.num_prompts(size) for size in (1, 4, 32, 64)] == [64, 64, 512, 1024]
    assert sizes.num_prompts(max(sizes.sizes)) == SUITES["batch-guard"].prompts_per_set


def test_ways_run_in_turns_every_other_one_backwards(model, monkeypatch):
    """Speeds that fall all the time: a first way is faster than a last one, and then slower."""
    jobs = []

    def made_up(self, rows, batch_size, drafting, output=None, capacity=None, guard=None):
        jobs.append((len(rows), batch_size, drafting, None if guard is None else guard.expected))
        assert capacity >= max(len(row.prompt) for row in rows) + 8
        return JobReport(counts=Counts(num_tokens=100 - len(jobs)), seconds=1.0)

    monkeypatch.setattr(Jobs, "job", made_up)
    prompts = [[1] * (3 + i % 40) for i in range(20)]
    asked = Jobs(model, LoadedDrafter(PromptLookup(), ()), prompts, 8, lambda _: None)
    curve = measure_curve(asked, GuardSizes(sizes=(4, 32), waves=2, fewest=6), 3)
    assert [each.rows for each in curve] == [4]  # there are no 32 prompts
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
    assert curve[0].over_plain("plain again") == pytest.approx((93 / 97, 92 / 88, 83 / 87))


def test_figures_are_ratios_of_the_same_turn():
    assert CURVE[0].over_plain("drafted") == pytest.approx((2.0, 1.8, 2.1))
    page = guard_page(CURVE, "about", GuardSizes(), 3)
    (table,) = (section for section in page.sections if section.rows)
    cells = dict(zip(table.columns, table.rows[0], strict=False))
    assert cells["drafted"] == "2.000 [1.800..2.100]"
    assert cells["noise"] == "1.000 [1.000..1.000]"
    summary = " ".join(page.sections[0].text)
    slowest = min((median(each.over_plain("guarded")), each.rows) for each in CURVE)
    assert f"guarded {slowest[0]:.3f} at {slowest[1]} row" in summary
    assert "0.975 to 1.020" in summary
    found = json.loads(json.dumps(page.as_dict(), allow_nan=False))["curve"][1]
    assert found["over_plain"]["plain again"] == pytest.approx([1.02, 0.975, 1.0])


def test_the_curve_is_drawn_next_to_the_page(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    page = guard_page(CURVE, "about", GuardSizes(), 3)
    publish(page._replace(title="T"), "batch-guard", tmp_path)
    assert (tmp_path / PLOT).stat().st_size > 1000


@pytest.mark.slow
def test_a_curve_is_measured(model):
    prompts = [list(range(1, 5 + i)) for i in range(6)]
    jobs = Jobs(model, LoadedDrafter(PromptLookup(), ()), prompts, 8, lambda _: None)
    (only,) = measure_curve(jobs, GuardSizes(sizes=(2,), waves=2, fewest=6), 2)
    assert only.num_prompts == 6
    assert all(len(only.speeds[way]) == 2 and min(only.speeds[way]) > 0 for way in WAYS)
    assert only.shares["plain"] == only.shares["plain again"] == (0.0, 0.0)
    assert only.shares["drafted"] == (1.0, 1.0)
