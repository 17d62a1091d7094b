"""The law of jobs for diffusion models: a row is what `denoise` alone makes of it."""

import dataclasses
import importlib
import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import DenoiseConfig, GenerationConfig, PromptLookup, SelfSpeculation
from jaxspec.batch import Collector, GuardSettings, JobSettings, Row, job_header, ray, rows_of, run
from jaxspec.batch import job as job_module
from jaxspec.batch.canvases import read_prompt
from jaxspec.checkpoint import Model, config_from_json
from jaxspec.cli import main
from tests.batch.test_job import InTurns, tokens_by_line
from tests.checkpoint.networks import random_network
from tests.diffusion.networks import BLOCK, MASK, tiny_model
from tests.measure.models import filling_model

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, MASK, size=1 + 5 * i % 17).tolist() for i in range(7)]
CONFIG = DenoiseConfig(max_new_tokens=12, block_length=BLOCK, stop_token_ids=(6, 7))
TWO = SelfSpeculation(2)
WAYS = {
    "whole canvases": (tiny_model(), CONFIG),
    "whole canvases without slack": (
        tiny_model(),
        DenoiseConfig(max_new_tokens=64, block_length=32, stop_token_ids=(6, 7)),
    ),
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
        ("--drafting", "always"): "--drafting: needs --drafts N",
        ("--drafting", "auto", "--dtype", "bfloat16"): "--drafting auto: times decide between",
        ("--expected-speedup", "2"): "guard.expected (--expected-speedup) needs a guard",
    }.items():
        assert main([*argv, *flags]) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()
    settings = DenoiseConfig(max_new_tokens=8)
    rows = jaxspec.denoise(model, texts, settings)
    for drafts in (["--drafts", "2", "--drafting", "always"], ["--drafting", "auto"]):
        assert main([*argv, "--max-new-tokens", "8", *drafts]) == 0
        lines = map(json.loads, out.read_text().splitlines())
        records = {record["line"]: record for record in lines}
        assert [records[line]["text"] for line in (1, 2, 3)] == [row.text for row in rows]
        assert "3 of 3 records" in capsys.readouterr().err
        for file in (out, tmp_path / "out.jsonl.progress"):
            file.unlink()


@pytest.mark.parametrize("name", ["whole canvases", "dual"])
def test_prompts_of_many_lengths_share_a_program(name):
    model, config = WAYS[name]
    texts = [[1 + i % 5 for i in range(length)] for length in (3, 30, 40, 60)]
    expected = [row.tokens.tolist() for row in jaxspec.denoise(model, texts, config)]
    programs = read_prompt._cache_size()
    found, _ = decoded(model, config, rows=rows_of(texts), capacity=96, batch_size=1)
    assert [found[line, 0] for line in range(1, 5)] == expected
    assert read_prompt._cache_size() == programs + 1


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


LONG = ["--max-new-tokens", "1000", "--block-length", "100", "--steps", "30"]
DRAFTING = {"stepwise": [], "drafts": ["--drafts", "4", "--drafting", "always"]}
SIZES = {
    "llada_tiny_mha": {
        "n_layers": 1,
        "d_model": 16,
        "mlp_hidden_size": 32,
        "n_heads": 1,
        "n_kv_heads": 1,
        "max_sequence_length": 1024,
    },
    "dream_tiny": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
    },
}
"""Recorded folders, and what takes the place of sizes in their config.json."""


def write_published(folder, entries: dict) -> None:
    """Writes random weights under published names; Dream is published without tokenizer.json."""
    network = random_network(config_from_json(entries))
    tokenizer = None if entries["model_type"] == "Dream" else filling_model("", None).tokenizer
    jaxspec.save(Model(network, tokenizer, "published"), folder)
    (folder / "config.json").write_text(json.dumps(entries))


def run_commands(environment, *commands: list[str], devices: int = 1) -> subprocess.Popen:
    """Starts a process that runs commands one after the other, until one fails."""
    program = "import json, sys; from jaxspec.cli import main; commands = json.loads(sys.argv[1]); "
    program += "sys.exit(any(main(command) for command in commands))"
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(commands)],
        env={**environment, "XLA_FLAGS": flags},
        stderr=subprocess.PIPE,
        text=True,
    )


def texts_in(path) -> dict:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["line"]: record["tokens"] for record in records}


@pytest.fixture
def compiled_well():
    """Long canvases take longer to run than to compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_well")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL, which Windows has not")
@pytest.mark.parametrize(
    ("recorded", "cache"),
    [
        ("llada_tiny_mha", "none"),
        ("llada_tiny_mha", "prefix"),
        ("dream_tiny", "none"),
        ("dream_tiny", "dual"),
    ],
)
def test_a_published_folder_and_a_thousand_new_tokens(
    recorded, cache, recorded_folder, environment, tmp_path
):
    """Bench, a job, one that was killed, and one on four devices: the texts are the same."""
    published = json.loads(recorded_folder("diffusion", recorded, "config.json").read_text())
    folder, file, settings = tmp_path / "model", tmp_path / "in.jsonl", [*LONG, "--cache", cache]
    write_published(folder, {**published, **SIZES[recorded]})
    model = jaxspec.load(folder)
    # With few tokens before them, masks would look so alike that rounding decides between them.
    texts = ["brown fox jumps over it", "a lazy dog, 47 times", "12 boxes; my jugs", "Vexed? Why"]
    prompts = [[*text.encode()] if model.tokenizer is None else text for text in texts]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def job(out: str, how: str, *flags: str) -> list[str]:
        names = [str(file), str(tmp_path / out), "--model", str(folder)]
        return ["batch", *names, *settings, *DRAFTING[how], *flags]

    bench = ["bench", str(folder), str(file), "--limit", "2", "--repeats", "1", "--drafts", "4"]
    bench += settings
    assert main([*bench, "--json", str(tmp_path / "bench.json")]) == 0
    mesh = ["--mesh", "data=4"]
    on_mesh = [job(f"mesh {how}", how, "--batch-size", "4", *mesh) for how in DRAFTING]
    on_mesh.append([*bench, *mesh, "--json", str(tmp_path / "bench on a mesh.json")])
    process = run_commands(environment, *on_mesh, devices=4)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    calls = []
    for name in ("bench.json", "bench on a mesh.json"):
        rows = json.loads((tmp_path / name).read_text())["rows"]
        assert [row["num_identical"] for row in rows] == [2, 2]
        calls.append([row["overall"]["num_verify_steps"] for row in rows])
    assert calls[0] == calls[1]
    assert calls[0][0] > calls[0][1]
    expected = texts_in(tmp_path / "mesh stepwise")
    assert {len(tokens) for tokens in expected.values()} == {1000}
    alone = jaxspec.denoise(model, prompts[0], DenoiseConfig(1000, 100, 30, cache=cache))
    assert expected[1] == alone[0].tokens.tolist()
    for how in DRAFTING:
        assert main(job(f"whole {how}", how, "--batch-size", "4")) == 0
        killed = tmp_path / f"killed {how}"
        process = run_commands(environment, job(killed.name, how, "--batch-size", "1"))
        while process.poll() is None and not (killed.exists() and b"\n" in killed.read_bytes()):
            time.sleep(0.05)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert 0 < killed.read_bytes().count(b"\n") < len(prompts)
        assert main(job(killed.name, how, "--batch-size", "4", "--resume")) == 0
        for out in (f"mesh {how}", f"whole {how}", killed.name):
            assert texts_in(tmp_path / out) == expected, out
