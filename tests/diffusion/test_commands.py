"""`jaxspec generate`, `bench` and `export` with a diffusion language model."""

import dataclasses
import io
import json
import re
import sys

import numpy as np
import pytest

import jaxspec
from jaxspec import DenoiseConfig, SelfSpeculation, denoise
from jaxspec.cli import main
from jaxspec.commands.canvas import draw_canvas
from jaxspec.decoding import profile as profiles
from jaxspec.decoding.denoise import DenoiseStep
from tests.measure.models import filling_model, tiny_model

BLOCK = 4
PROMPT = "one, two, one"
CONFIG = DenoiseConfig(max_new_tokens=8, block_length=BLOCK)
SHORT = ["--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def model():
    return filling_model("tiny", BLOCK)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    jaxspec.save(model, folder)
    return str(folder)


def shown(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    return capsys.readouterr().err


def test_generate_fills_in(capsys, model, folder):
    (expected,) = denoise(model, PROMPT, CONFIG)
    found = shown(capsys, "generate", folder, PROMPT, *SHORT)
    assert found["tokens"] == expected.tokens.tolist()
    assert found["num_calls"] == expected.num_calls
    drafting = ["--drafts", "2", "--branch", "2", "--lookup"]
    drafted = shown(capsys, "generate", folder, PROMPT, *SHORT, *drafting)
    assert drafted["tokens"] == found["tokens"]
    assert drafted["num_calls"] < found["num_calls"]
    assert drafted["drafting"] == {"num_drafts": 2, "branch": 2, "lookup": True}
    (relaxed,) = denoise(model, PROMPT, CONFIG, SelfSpeculation(2, lossy_top_k=9))
    lossy = ["--drafts", "2", "--lossy-top-k", "9"]
    assert shown(capsys, "generate", folder, PROMPT, *SHORT, *lossy)["tokens"] == [*relaxed.tokens]


def test_bench_measures_costs_on_a_prompt_that_fits(capsys, folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ("abc", "abc " * 4000, PROMPT)
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    assert main(["bench", folder, str(prompts), *SHORT, "--repeats", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [failure["prompt_index"] for failure in figures["failures"]] == [1]
    assert figures["rows"][-1]["name"] == "as many as pay"


def test_bench_compares_numbers_of_drafts(capsys, folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (PROMPT, "abc")))
    argv = ["bench", folder, str(prompts), *SHORT, "--repeats", "1", "--limit", "2", "--json"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert re.search(r"a pass with 1 to 5 drafts takes (\d+\.\d, ){4}\d+\.\d times as long", err)
    names = [f"{count} draft{'s' * (count > 1)}" for count in range(1, 6)]
    stepwise, *drafted, adaptive = figures["rows"]
    assert [row["name"] for row in drafted] == names
    assert (stepwise["name"], adaptive["name"]) == ("stepwise", "as many as pay")
    calls = [row["overall"]["num_verify_steps"] for row in (stepwise, *drafted)]
    assert calls[0] == 16
    assert calls == sorted(calls, reverse=True)
    assert calls[0] > calls[-1]
    assert figures["outputs_agree"]
    assert all(row["num_identical"] == 2 for row in figures["rows"])
    asked = ["--drafts", "2", "--lossy-top-k", "9", "--repeats", "1"]
    lossy = shown(capsys, "bench", folder, str(prompts), *SHORT, *asked)
    assert [row["name"] for row in lossy["rows"]] == ["stepwise", "2 drafts"]
    assert lossy["outputs_agree"]
    assert not lossy["rows"][1]["lossless"]
    assert "--drafter" in fails(capsys, "bench", folder, str(prompts), "--drafter", "lookup")
    none = fails(capsys, "bench", folder, str(prompts), *SHORT, "--drafts", "0")
    assert "--drafts: must be at least 1" in none


def test_auto_drafts_as_many_as_pay(capsys, monkeypatch, tmp_path, model, folder):
    """Costs are measured once: also for another process, and for prompts of similar length."""
    monkeypatch.setattr(profiles, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(profiles, "_known", {})
    measured, step = [], {5: 0.1, 2: 9.0}

    def measure(_model, prompts, _config, speculation):
        measured.append((len(prompts[0]), speculation))
        most = speculation.num_drafts
        return tuple(2 + 2 * step[most] * count for count in range(most + 1))

    monkeypatch.setattr(profiles, "measure_costs", measure)
    argv = ["generate", folder, PROMPT, *SHORT, "--drafting", "auto"]
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    found, (expected,) = json.loads(out), denoise(model, PROMPT, CONFIG)
    assert found["tokens"] == expected.tokens.tolist()
    assert found["num_calls"] < found["num_canvases"]
    assert found["drafting"] == {"num_drafts": 5, "costs": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}
    assert "1 to 5 drafts takes 1.1, 1.2, 1.3, 1.4, 1.5 times as long as one without\n" in err
    profiles._known.clear()
    assert shown(capsys, *argv) == found
    shown(capsys, *["generate", folder, PROMPT[:-1], *SHORT, "--drafting", "auto"])
    assert measured == [(len(PROMPT), SelfSpeculation(5))]
    dear = shown(capsys, *argv, "--drafts", "2", "--lookup")
    assert dear["num_calls"] == dear["num_canvases"] == expected.num_calls
    assert measured[1:] == [(len(PROMPT), SelfSpeculation(2, lookup=True))]
    never = shown(capsys, *argv[:-1], "never", "--drafts", "2")
    assert never["drafting"] == {"num_drafts": 0}
    assert never["num_calls"] == expected.num_calls
    assert "--drafting: needs --drafts N" in fails(capsys, *argv[:-1], "always")


def test_the_canvas_shows_decided_drafted_and_masked_places(model):
    """A character of two tokens is one; what a terminal would obey is not passed on."""
    ids, mask = model.tokenizer.encode("aé\x1bb"), model.config.diffusion.mask_token_id
    decided = np.asarray([*ids[:4], mask, mask])
    step = DenoiseStep(decided, np.asarray([[*ids, mask]]), 0)
    shown = draw_canvas(model.tokenizer, mask, step)
    assert shown.plain == "aé\u241bb░"
    assert [shown.plain[span.start : span.end] for span in shown.spans] == ["b", "░"]
    plain = draw_canvas(None, mask, DenoiseStep(decided, np.zeros((0, 6)), 0)).plain
    assert plain == "".join(f"{token} " for token in ids[:4]) + "░░"


def test_a_terminal_sees_the_canvas_fill(capsys, monkeypatch, folder):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["generate", folder, PROMPT, *SHORT]) == 0
    out = capsys.readouterr().out
    counts = [len(masks) for masks in re.findall("░+", out)]
    assert max(counts) == 8
    assert len(set(counts)) > 1


def test_chats_are_prompts_as_their_template_has_them(model):
    chat = [{"role": "user", "content": PROMPT}]
    (found,) = denoise(model, [chat], CONFIG)
    assert found.prompt_tokens.tolist() == model.tokenizer.encode_chat(chat)
    assert len(found.prompt_tokens) > len(model.tokenizer.encode(PROMPT))
    (expected,) = denoise(model, model.tokenizer.encode_chat(chat), CONFIG)
    assert found.tokens.tolist() == expected.tokens.tolist()


def test_a_chat_remembers_its_turns(capsys, monkeypatch, model, folder):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    argv = ["generate", folder, "--chat", "--system", "be brief", "--drafts", "2", *SHORT]
    assert main(argv) == 0
    assert capsys.readouterr().out == turns(model, "one", "two")


def test_a_chat_needs_a_template(capsys, model, tmp_path):
    mute = dataclasses.replace(model.tokenizer, templates={})
    jaxspec.save(dataclasses.replace(model, tokenizer=mute), tmp_path)
    assert "has no chat template" in fails(capsys, "generate", str(tmp_path), "--chat", *SHORT)


def turns(model, *said: str) -> str:
    """Returns the text of a chat: each answer is filled in behind all that was said before."""
    messages, shown = [{"role": "system", "content": "be brief"}], ""
    for turn in said:
        messages.append({"role": "user", "content": turn})
        text = denoise(model, [messages], CONFIG)[0].text
        messages.append({"role": "assistant", "content": text})
        shown += f"{text}\n"
    return shown


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--branch", "2"], "--branch: needs --drafts N"),
        (["--lookup", "--drafts", "0"], "--lookup: needs --drafts N"),
        (["--drafter", "lookup"], "--drafter: not for diffusion language models"),
        (
            ["--drafts", "2", "--lossy-top-k", "0"],
            "lossy_top_k must be at least 1, got 0",
        ),
        (["--threshold", "1.5"], r"threshold must be in (0, 1], got 1.5"),
        (["--block-length", "8"], "block_length must be 4"),
        (["--drafts", "8"], "num_drafts must be below max_new_tokens (8)"),
    ],
)
def test_what_does_not_fit_is_named(capsys, folder, argv, said):
    assert said in fails(capsys, "generate", folder, PROMPT, *SHORT, *argv)


def test_causal_models_take_none_of_it(capsys, tmp_path):
    jaxspec.save(tiny_model(), tmp_path)
    model, prompts = str(tmp_path), tmp_path / "in.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}))
    batch = ["batch", str(prompts), str(tmp_path / "out.jsonl"), "--model", model]
    for command in (["generate", model, PROMPT], ["bench", model, str(prompts)], batch):
        for argv in (["--drafts", "2"], ["--lookup"], ["--cache", "none"]):
            said = fails(capsys, *command, *argv)
            assert f"{argv[0]}: for diffusion language models" in said
            assert said.count("\n") == 1


class TestPhones:
    """Through a `.tflite`."""

    @pytest.fixture(scope="class")
    @staticmethod
    def exported(folder, tmp_path_factory):
        pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
        pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")
        out = tmp_path_factory.mktemp("out")
        shapes = ["--capacity", "64", "--prefill", "8", "--quantize", "float32", "--drafts", "2"]
        assert main(["export", "tflite", folder, str(out), *shapes]) == 0
        return str(out / "model.tflite")

    def test_the_same_text(self, capsys, model, exported):
        (expected,) = denoise(model, PROMPT, CONFIG)
        argv = ["generate", exported, PROMPT, "--runtime", "litert", *SHORT]
        for drafts in ([], ["--drafts", "0"]):
            found = shown(capsys, *argv, *drafts)
            assert found["tokens"] == expected.tokens.tolist()
            assert found["text"] == expected.text
        assert main(argv) == 0
        assert expected.text in capsys.readouterr().out

    def test_a_chat_remembers_its_turns(self, capsys, monkeypatch, model, exported):
        monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
        argv = ["generate", exported, "--runtime", "litert", "--chat", "--system", "be brief"]
        assert main([*argv, *SHORT]) == 0
        assert capsys.readouterr().out == turns(model, "1")

    def test_what_was_fixed_by_the_export_is_refused(self, capsys, exported):
        argv = ["generate", exported, PROMPT, "--runtime", "litert", *SHORT]
        for flags in (["--cache", "none"], ["--temperature", "1"], ["--loop", "plain"]):
            assert f"{flags[0]}: not for a file of a diffusion" in fails(capsys, *argv, *flags)
        assert "rounds of [2] drafts" in fails(capsys, *argv, "--drafts", "3")

    def test_what_is_for_causal_models_is_refused(self, capsys, folder, tmp_path):
        report = ["export", "report", folder, str(tmp_path), "--prompts", "P"]
        assert "fills in masks" in fails(capsys, *report)
        assert "fills in masks" in fails(capsys, "export", "litertlm", folder, str(tmp_path))
