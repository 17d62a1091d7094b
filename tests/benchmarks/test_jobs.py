"""The suite of jobs, on a tiny model."""

import json

import pytest

import jaxspec
from benchmarks.suites.jobs import BatchSizes, Jobs, batch_page, measure_jobs
from jaxspec.checkpoint import save_eagle
from jaxspec.drafters import Eagle, LoadedDrafter
from tests.laws.drafters import FORKED, eagle_head

SMALL = BatchSizes(batch_size=8, waves=2, hashed=24)


@pytest.mark.slow
def test_everything_is_measured_once(model, tmp_path):
    jaxspec.save(model, tmp_path / "model")
    head = eagle_head(model.network)
    save_eagle(head, tmp_path / "head")
    (tmp_path / "tree.json").write_text(json.dumps(FORKED))
    flags = ["--model", str(tmp_path / "model"), "--drafter"]
    flags.append(f"eagle:head={tmp_path / 'head'},tree={tmp_path / 'tree.json'}")
    prompts = [list(range(1, 5 + i)) for i in range(24)]
    jobs = Jobs(model, LoadedDrafter(Eagle(FORKED), head), prompts, 8, lambda _: None)
    figures = measure_jobs(jobs, SMALL, 1, flags)
    assert figures.agree
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
    assert {name: speed.refilled.num_done for name, speed in figures.speeds.items()} == {
        "plain": 24,
        "drafted": 24,
    }
    assert all(speed.ratio > 0 for speed in figures.speeds.values())
    for name, one in figures.one.items():
        many = figures.many[name]
        assert (one.batch_size, many.batch_size) == (1, 8)
        assert one.num_done == many.num_done == 16
        assert one.capacities == many.capacities
        assert len(one.capacities) == 1
        assert 0 < one.read_fraction < 1
    page = batch_page(figures, jobs.about(), SMALL)
    assert page.agree
    assert len(page.sections[-1].rows) == 8
    json.dumps(page.as_dict(), allow_nan=False)
