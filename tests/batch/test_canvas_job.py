"""The law of jobs for diffusion models: a row is what `denoise` alone makes of it."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import jaxspec
from jaxspec import DenoiseConfig, GenerationConfig, PromptLookup, SelfSpeculation
from jaxspec.batch import Collector, GuardSettings, JobSettings, Row, job_header, ray, rows_of, run
from jaxspec.batch import job as job_module
from jaxspec.checkpoint import Model
from jaxspec.cli import main
from jaxspec.models import Network
from tests.batch.test_job import InTurns, tokens_by_line
from tests.diffusion.networks import BLOCK, MASK, tiny_model
from tests.measure.models import filling_model

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, MASK, size=1 + 5 * i % 17).tolist() for i in range(7)]
CONFIG = DenoiseConfig(max_new_tokens=12, block_length=BLOCK, stop_token_ids=(6, 7))
TWO = SelfSpeculation(2)
WAYS = {
    "whole canvases": (tiny_model(), CONFIG),
    "shifted, drawn": (tiny_model(shift=True), dataclasses.replace(CONFIG, temperature=0.7)),
    "blocks": (tiny_model(block=BLOCK), CONFIG),
    "prefix": (tiny_model(), dataclasses.replace(CONFIG, cache="prefix")),
    "dual": (tiny_model(), dataclasses.replace(CONFIG, cache="dual")),
}


def texts_of(model, config, speculation=None, seed=0) -> dict:
    rows = jaxspec.denoise(model, PROMPTS, config, speculation, seed)
    return {(line, 0): row.tokens.tolist() for line, row in enumerate(rows, start=1)}


def decoded(model, config, speculation=None, rows=None, seed=0, **how) -> tuple[dict, Collector]:
    output, settings = Collector(), JobSettings(**how)
    run(model, rows or rows_of(PROMPTS), output, config, speculation, seed, settings)
    return tokens_by_line(output), output


@pytest.mark.parametrize("name", WAYS)
def test_rows_are_those_of_denoise_whatever_drafts_and_shares_the_batch(name, monkeypatch):
    model, config = WAYS[name]
    expected = texts_of(model, config, seed=5)
    assert any({6, 7} & {*tokens} for tokens in expected.values())
    assert decoded(model, config, batch_size=3, seed=5)[0] == expected
    drafted, output = decoded(model, config, TWO, batch_size=2, drafting="always", seed=5)
    assert drafted == expected
    assert sum(r["metrics"]["num_draft_tokens"] for r in output.records) > 0
    monkeypatch.setattr(job_module, "Guard", InTurns)
    assert decoded(model, config, TWO, batch_size=3, seed=5)[0] == expected


def test_figures_add_up(monkeypatch):
    monkeypatch.setattr(job_module, "Guard", InTurns)
    model, config = WAYS["blocks"]
    output = Collector()
    report = run(model, rows_of(PROMPTS), output, config, TWO, 0, JobSettings(batch_size=3))
    metrics = [record["metrics"] for record in output.records]
    assert sum(m["num_verify_steps"] for m in metrics) == report.counts.num_steps
    assert sum(m["num_tokens"] for m in metrics) == report.counts.num_tokens
    assert sum(len(record["tokens"]) for record in output.records) == report.counts.num_tokens
    assert 0 < report.num_drafted_steps < report.num_steps
    assert report.state_bytes_estimated == report.state_bytes_held > 0
    assert report.scratch_bytes > 0


def test_an_id_names_the_randomness_and_the_order_does_not():
    model, config = WAYS["shifted, drawn"]
    rows = [Row(100 + line, line, prompt) for line, prompt in enumerate(PROMPTS)]
    found, _ = decoded(model, config, rows=rows[::-1], batch_size=2)
    expected = texts_of(model, config)
    assert found == {(99 + line, 0): tokens for (line, _), tokens in expected.items()}


def test_what_is_done_is_not_done_again_and_bad_rows_become_errors():
    model, config = WAYS["blocks"]
    bad = [Row(20, 20, [5, MASK]), Row(21, 21, [99]), Row(22, 22, [1] * 120)]
    rows = [*rows_of(PROMPTS), *bad]
    whole = Collector()
    run(model, rows, whole, config, TWO, settings=JobSettings(batch_size=2))
    errors = {r["line"]: r["error"] for r in whole.records if "error" in r}
    assert sorted(errors) == [20, 21, 22]
    assert f"the prompt holds the mask (id {MASK})" in errors[20]
    assert "ids outside 0..23" in errors[21]
    assert "12 places must be left to decode into" in errors[22]
    begun = Collector()
    begun.append(whole.records[:6])
    report = run(model, rows, begun, config, TWO, settings=JobSettings(batch_size=3))
    assert report.num_resumed == 6
    key = {(r["line"], r.get("text"), str(r.get("tokens"))) for r in whole.records}
    assert key == {(r["line"], r.get("text"), str(r.get("tokens"))) for r in begun.records}


def test_a_header_tells_of_what_decides_records_and_of_no_more():
    model = tiny_model()

    def header(config=CONFIG, speculation=TWO, **how) -> dict:
        return job_header(model, rows_of(PROMPTS), config, speculation, settings=JobSettings(**how))

    base = header()
    costs = dataclasses.replace(TWO, costs=(1.0, 1.1, 1.2))
    assert header(speculation=costs) == header(batch_size=2) == header(drafting="never") == base
    assert header(dataclasses.replace(CONFIG, steps=6)) != base
    assert header(speculation=SelfSpeculation(2, lossy_top_k=2)) != base
    assert header(speculation=None)["drafting"] == base["drafting"] == "either"


@pytest.mark.parametrize(
    ("model", "config", "drafter", "match"),
    [
        (tiny_model(), GenerationConfig(), None, "tiny is a diffusion language model; give a Den"),
        (tiny_model(), CONFIG, PromptLookup(), "give a DenoiseConfig, and a SelfSpeculation as"),
        (tiny_model(), dataclasses.replace(CONFIG, temperature=[1.0, 2.0]), None, "one number for"),
        (tiny_model(), dataclasses.replace(CONFIG, max_new_tokens=10), None, "a multiple of bloc"),
        (None, CONFIG, None, "causal is causal; give a GenerationConfig, and a drafter"),
        (None, None, TWO, "causal is causal; give a GenerationConfig, and a drafter"),
    ],
)
def test_settings_of_the_other_kind_and_of_no_sense_are_refused(model, config, drafter, match):
    if model is None:
        one = tiny_model()
        causal = dataclasses.replace(one.network, config=one.config.replace(diffusion=None))
        model = Model(causal, name="causal")
    with pytest.raises(ValueError, match=match):
        run(model, rows_of(PROMPTS), Collector(), config, drafter)


def test_what_a_guard_is_to_expect_is_refused_without_one():
    settings = JobSettings(guard=GuardSettings(expected=2.0))
    with pytest.raises(ValueError, match="needs a guard"):
        run(tiny_model(), rows_of(PROMPTS), Collector(), CONFIG, None, settings=settings)


def test_the_command_decodes_a_file_and_refuses_what_has_no_meaning(capsys, tmp_path):
    model, prompts, out = (
        filling_model("tiny", BLOCK),
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
    )
    jaxspec.save(model, tmp_path / "model")
    texts = ["one, two", "three", "one, two, three"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    argv = ["batch", str(prompts), str(out), "--model", str(tmp_path / "model")]
    for flags, said in {
        ("--drafter", "lookup"): "--drafter: not for diffusion language models",
        ("--num-samples", "2"): "--num-samples: not for diffusion language models",
        ("--logprobs",): "--logprobs: not for diffusion language models",
        ("--branch", "2"): "--branch: needs --drafts N",
        ("--expected-speedup", "2"): "guard.expected (--expected-speedup) needs a guard",
    }.items():
        assert main([*argv, *flags]) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()
    flags = ["--max-new-tokens", "8", "--drafts", "2", "--drafting", "always"]
    assert main([*argv, *flags]) == 0
    settings = DenoiseConfig(max_new_tokens=8)
    rows = jaxspec.denoise(model, texts, settings)
    records = {json.loads(line)["line"]: json.loads(line) for line in out.read_text().splitlines()}
    assert [records[line]["text"] for line in (1, 2, 3)] == [row.text for row in rows]
    assert "3 of 3 records" in capsys.readouterr().err


def test_a_slot_that_stays_empty_does_not_decide_how_many_drafts_pay():
    """Five rows have eight slots; costs say that drafting never pays."""
    model, config = WAYS["whole canvases"]
    speculation = dataclasses.replace(TWO, costs=(1.0, 9.0, 99.0))
    output, settings = Collector(), JobSettings(drafting="always")
    run(model, rows_of(PROMPTS[:5]), output, config, speculation, settings=settings)
    assert sum(record["metrics"]["num_draft_tokens"] for record in output.records) == 0


def test_ray_reads_no_setting_that_a_config_lacks():
    pytest.importorskip("pyarrow")
    pyarrow = importlib.import_module("pyarrow")
    for config in (None, CONFIG, GenerationConfig()):
        decoder = object.__new__(ray.Decoder)
        decoder._config = config
        assert decoder._table([], pyarrow.int64()).num_rows == 0


LONG = ["--max-new-tokens", "960", "--block-length", "32", "--steps", "120"]


def start(environment, *words: str, devices: int = 1) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "jaxspec", *words],
        env={**environment, "XLA_FLAGS": flags},
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen) -> None:
    _, error = process.communicate(timeout=1200)
    assert process.returncode == 0, error


def texts_in(path) -> dict:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["line"]: record["tokens"] for record in records}


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True], ids=["like LLaDA", "like Dream"])
def test_a_folder_with_canvases_of_a_thousand_tokens(shift, environment, tmp_path):
    """Bench, a job, one that was killed, and one on four devices write the same texts."""
    small = filling_model("small", None)
    diffusion = dataclasses.replace(small.config.diffusion, shift=shift)
    config = small.config.replace(max_positions=1024, diffusion=diffusion)
    model, prompts = tmp_path / "model", tmp_path / "in.jsonl"
    jaxspec.save(dataclasses.replace(small, network=Network(small.params, config)), model)
    texts = [f"{count} words, " * (1 + count % 2) for count in range(6)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    job = ["batch", str(prompts), "{}", "--model", str(model), "--resume", "--drafts", "2", *LONG]
    job += ["--batch-size", "4"]
    environment = {**os.environ, **environment}

    def argv(name: str) -> list[str]:
        return [word.format(tmp_path / name) for word in job]

    ended(start(environment, *argv("whole.jsonl")))
    whole = texts_in(tmp_path / "whole.jsonl")
    direct = jaxspec.denoise(jaxspec.load(model), texts, DenoiseConfig(960, 32, 120))
    assert whole == {line: row.tokens.tolist() for line, row in enumerate(direct, start=1)}
    killed = start(environment, *argv("killed.jsonl"))
    out = tmp_path / "killed.jsonl"
    while killed.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    ended(start(environment, *argv("killed.jsonl")))
    assert texts_in(out) == whole
    ended(start(environment, *argv("mesh.jsonl"), "--mesh", "data=4", devices=4))
    assert texts_in(tmp_path / "mesh.jsonl") == whole
    bench = ["bench", str(model), str(prompts), "--limit", "2", "--repeats", "1", "--drafts", "2"]
    figures = tmp_path / "bench.json"
    ended(start(environment, *bench, *LONG, "--json", str(figures)))
    assert json.loads(figures.read_text())["outputs_agree"]
