"""`jaxspec bench --suite batch`, on a tiny model: what the page says, and what is refused."""

import json

import pytest

from jaxspec.batch.bench import PROMPTS, Bench
from jaxspec.batch.suite import BatchSuite, as_dict, as_markdown, measure_batches
from jaxspec.checkpoint import save_eagle
from jaxspec.cli import main
from jaxspec.drafters import Eagle, LoadedDrafter
from tests.laws.drafters import FORKED, eagle_head

SMALL = BatchSuite(
    prompts_per_set=24,
    max_new_tokens=8,
    batch=8,
    waves=2,
    hashed=24,
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
    bench = Bench(model, drafter, prompts, SMALL.max_new_tokens, said.append)
    figures = measure_batches(bench, SMALL, 1, flags)
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
    assert all(speed.ratio > 0 for speed in figures.speeds.values())
    assert {name: report.refilled.num_done for name, report in figures.speeds.items()} == {
        "plain": 24,
        "drafted": 24,
    }
    for name, one in figures.one.items():
        many = figures.many[name]
        assert (one.batch, many.batch) == (1, 8)
        assert one.num_done == many.num_done == 16
        assert one.slots == many.slots
        assert len(one.slots) == 1
        assert 0 < one.read_fraction < 1
    page = as_markdown(figures)
    assert "jaxspec bench --suite batch --prompts-per-set 24 --repeats 1" in page
    assert "24 prompts in 8 ways: 1 hash of all tokens" in page
    assert json.loads(json.dumps(as_dict(figures)))["num_prompts"] == 24
    assert any("refilled slots, drafted" in doing for doing in said)


@pytest.mark.parametrize("suite", ["batch", "batch-guard"])
def test_what_a_suite_lacks_is_named(suite, tmp_path, capsys):
    if suite == "batch-guard":
        pytest.importorskip("matplotlib", reason="needs the extra plots: pip install '.[plots]'")
    argv = ["bench", "--suite", suite, "--out", str(tmp_path / "x.md")]
    assert main([*argv, "--data-folder", str(tmp_path)]) == 2
    assert PROMPTS.file in capsys.readouterr().err
    assert main([*argv, "--repeats", "0"]) == 2
    assert "repeats must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
