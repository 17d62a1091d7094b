"""The command line: exit codes, what goes where, and that a mistake is one clear line."""

import argparse
import dataclasses
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import GenerationConfig, commands, generate, native
from jaxspec.checkpoint import save_eagle
from jaxspec.cli import COMMANDS, build_parser, main
from jaxspec.commands import demo, info, options
from jaxspec.commands import methods as shipped
from jaxspec.commands.generate import Session, Shown, add_arguments
from jaxspec.commands.options import drafter_spec, generation_config
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.drafters import AdaptiveBlock, SuffixLookup
from jaxspec.measure import step
from jaxspec.measure.step import StepTimes
from jaxspec.models import Diffusion, EagleHead, ModelConfig, init_eagle_params
from jaxspec.training.loop import DivergedError
from jaxspec.tuning import LatencyProfile, Timing, save_profile
from tests.checkpoint.networks import random_network
from tests.foreign import like_llama2
from tests.measure.models import WrongRoot, filling_model, tiny_model


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    """`--drafter` of a diffusion model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "filling"
    jaxspec.save(filling_model("filling", 4), folder)
    return f"deer:model={folder},block=3"


@pytest.fixture
def head(model, tmp_path):
    """The folder of a random EAGLE-1 head for the model."""
    config = model.config.replace(num_layers=1)
    params = init_eagle_params(config, True, jax.random.key(0))
    save_eagle(EagleHead(params, config), tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": "abc", "category": "x"}, {"question": "one, two, one"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fails(capsys, *argv) -> str:
    """Runs a command that must fail politely; returns its one line."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("jaxspec: error:")]
    assert "Traceback" not in err
    assert out == ""
    return line


@pytest.mark.parametrize("words", [(), ("train",), *(command.words for command in COMMANDS)])
def test_every_verb_explains_itself(capsys, words):
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: {' '.join(('jaxspec', *words))}" in shown
    if words in [command.words for command in COMMANDS]:
        assert "--debug" in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jaxspec {jaxspec.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["generate"],
        ["generate", "m"],
        ["generate", "m", "p", "--temperature", "hot"],
        ["generate", "m", "p", "--drafter", "guess"],
        ["generate", "m", "p", "--drafter", "lookup:max_ngram"],
        ["bench", "m"],
        ["train"],
    ],
)
def test_a_command_line_that_makes_no_sense_exits_with_2(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "usage: jaxspec" in capsys.readouterr().err


def test_every_generation_setting_has_a_flag():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {
        "max_new_tokens": ("7", 7),
        "temperature": ("0.5", 0.5),
        "top_k": ("3", 3),
        "top_p": ("0.9", 0.9),
        "min_p": ("0.1", 0.1),
        "logit_bias": ("5=-1.5", {5: -1.5}),
        "allowed_token_ids": ("1,2", (1, 2)),
        "banned_token_ids": ("3", (3,)),
        "stop_token_ids": ("", ()),
        "stop": ("end", ("end",)),
        "num_samples": ("2", 2),
        "tokenizer_ids_only": (None, True),
        "logprobs": (None, True),
        "warped_logprobs": (None, True),
        "repetition_penalty": ("1.1", 1.1),
        "presence_penalty": ("0.5", 0.5),
        "frequency_penalty": ("0.2", 0.2),
        "no_repeat_ngram_size": ("3", 3),
        "min_new_tokens": ("4", 4),
    }
    # Each of these excludes the others; `test_the_text_obeys_a_grammar` gives them.
    grammars = {"choices", "regex", "json_schema"}
    assert {*flags, *grammars} == {field.name for field in dataclasses.fields(GenerationConfig)}
    argv = ["model", "prompt"]
    for name, (text, _) in flags.items():
        argv += [f"--{name.replace('_', '-')}", *([] if text is None else [text])]
    expected = GenerationConfig(**{name: value for name, (_, value) in flags.items()})
    assert generation_config(parser.parse_args(argv)) == expected
    assert generation_config(parser.parse_args(["model", "prompt"])) == GenerationConfig()


class TestDrafters:
    """Names and settings of drafters become drafters."""

    def make(self, text, model=None):
        return options.make_drafter(drafter_spec(text), argparse.Namespace(dtype=None), model)

    def test_settings_are_those_of_the_class(self):
        lookup = self.make("lookup:max_ngram=3,match=recent")
        assert lookup == jaxspec.PromptLookup(4, 3, "recent")
        assert drafter_spec("none") is None

    def test_a_corpus_is_read_from_a_file(self, model, tmp_path):
        assert self.make("suffix:max_ngram=5") == SuffixLookup(max_ngram=5)
        texts = tmp_path / "texts.jsonl"
        texts.write_text('{"text": "one, two"}\n{"text": "three"}\n')
        made = self.make(f"suffix:corpus={texts}", model)
        expected = SuffixLookup.of(["one, two", "three"], model)
        assert made.drafter == expected.drafter
        assert (made.params.tokens == expected.params.tokens).all()
        plain = tmp_path / "text.md"
        plain.write_text("one, two")
        made = self.make(f"suffix:corpus={plain}", model)
        assert (made.params.tokens == SuffixLookup.of("one, two", model).params.tokens).all()
        texts.write_text('{"text": [{"role": "user", "content": "one"}]}\n')
        with pytest.raises(ValueError, match="each line must hold a text, not a chat or"):
            self.make(f"suffix:corpus={texts}", model)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("empty.txt", "corpus: got 1 texts, none of them of two tokens or more"),
            ("empty.jsonl", "empty.jsonl holds no prompts"),
        ],
    )
    def test_an_empty_corpus_is_named(self, folder, tmp_path, capsys, name, message):
        (tmp_path / name).write_text("")
        spec = f"suffix:corpus={tmp_path / name}"
        assert message in fails(capsys, "generate", folder, "abc", "--drafter", spec)

    def test_tokens_are_recycled_over_a_tree(self, tmp_path):
        assert self.make("recycling") == jaxspec.TokenRecycling()
        (tmp_path / "mine.json").write_text("[[0], [1]]")
        made = self.make(f"recycling:tree={tmp_path / 'mine.json'}")
        assert made == jaxspec.TokenRecycling(((0,), (1,)))

    def test_draft_models_are_loaded(self, model, folder):
        made = self.make(f"draft-model:num_speculative_tokens=2,model={folder}", model)
        drafter = made.drafter
        assert drafter == jaxspec.DraftModel(2)

    def test_draft_models_with_another_tokenizer_draft_what_both_have(
        self, model, folder, tmp_path, capsys
    ):
        tokenizer = like_llama2()
        config = model.config.replace(vocab_size=tokenizer.vocab_size)
        jaxspec.save(jaxspec.Model(random_network(config), tokenizer), tmp_path)
        argv = ["generate", folder, "3 and 4", "--json", "--max-new-tokens", "12"]
        assert main(argv) == 0
        plain = json.loads(capsys.readouterr().out)
        assert main([*argv, "--drafter", f"draft-model:model={tmp_path}"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["tokens"] == plain["tokens"]
        said = "has another tokenizer, and drafts with the 256 tokens that both have, of 256"
        assert f"draft_model: {tmp_path} {said}" in err

    def test_heads_draft_over_the_tree_in_their_folder_unless_told_otherwise(self, model, head):
        def paths(text):
            made = self.make(text, model)
            assert isinstance(made.params, EagleHead)
            return made.drafter.paths

        assert paths(f"eagle:head={head}") == EAGLE_PATHS
        (head / "tree.json").write_text('{"paths": [[0], [0, 0]]}')
        assert paths(f"eagle:head={head}") == ((0,), (0, 0))
        assert paths(f"eagle:head={head},tree=eagle-25") == EAGLE_PATHS
        (head / "mine.json").write_text("[[0], [1]]")
        assert paths(f"eagle:head={head},tree={head / 'mine.json'}") == ((0,), (1,))
        (head / "tree.json").write_text('{"paths": []}')
        with pytest.raises(ValueError, match="plain decoding is faster"):
            paths(f"eagle:head={head}")

    def test_dynamic_trees_have_their_bounds(self, model, head):
        drafter = self.make(f"eagle2:head={head},depth=2,beam=3,num_nodes=7", model).drafter
        assert drafter == jaxspec.Eagle2(num_nodes=7, depth=2, beam=3)

    def test_diffusion_models_draft_blocks(self, model, tmp_path):
        config = ModelConfig(
            vocab_size=24,
            embed_dim=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            mlp_dim=24,
            max_positions=64,
            qkv_bias=True,
            diffusion=Diffusion(23, True, 4),
        )
        jaxspec.save(jaxspec.Model(random_network(config)), tmp_path)

        def make(settings):
            return self.make(f"deer:model={tmp_path},{settings}", model)

        made = make("block=5,num_nodes=7,adaptive=1")
        assert made.drafter == jaxspec.Deer(5, num_nodes=7, adaptive=AdaptiveBlock())
        assert made.params.config.diffusion == Diffusion(23, True, 4)
        made = make("adaptive=1,draft_cost=0.5,token_cost=0")
        assert made.drafter.adaptive == AdaptiveBlock(draft_cost=0.5, token_cost=0.0)
        target, draft = (Timing(1, 2.0), Timing(9, 5.0)), (Timing(1, 1.0), Timing(8, 1.5))
        save_profile(LatencyProfile("x", target, draft, draft), tmp_path / "profile.json")
        for block in ("", ",block=16"):  # as the largest that was timed
            measured = AdaptiveBlock(draft_cost=0.75, token_cost=0.19)  # 3 / 8 / 2, two digits
            assert make(f"adaptive=1{block}").drafter.adaptive == measured
        made = make("adaptive=1,token_cost=0").drafter
        assert made.adaptive == AdaptiveBlock(draft_cost=0.75, token_cost=0.0)
        assert make("steps=2,temperature=0").drafter == jaxspec.Deer(8, steps=2, temperature=0.0)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("deer", "needs deer:model=MODEL"),
            ("deer:token_cost=0.1", "token_cost: needs adaptive=1"),
            ("dflash:block=3", "needs dflash:head=FOLDER"),
            ("lookup:max_ngram=0", "max_ngram must be at least 1, got 0"),
            ("union:min_match=8", "--drafter union needs union:head=FOLDER"),
            ("draft-model", "needs draft-model:model=MODEL"),
            ("eagle", "eagle needs eagle:head=FOLDER"),
            ("eagle2:depth=3", "eagle2 needs eagle2:head=FOLDER"),
            ("eagle:head=nowhere", "no folder 'nowhere', nor a shipped head of that name"),
        ],
    )
    def test_bad_settings_are_named(self, text, message, model):
        with pytest.raises(ValueError, match=message):
            self.make(text, model)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("deer:block=x", "block must be a whole number, got 'x'"),
            ("deer:block=1.5", "block must be a whole number, got '1.5'"),
            ("deer:temperature=hot", "temperature must be a number, got 'hot'"),
            ("deer:adaptive=2", r"adaptive must be 1 \(yes\) or 0 \(no\), got '2'"),
            ("lookup:size=3", "lookup has no setting 'size'; it has num_speculative_tokens,"),
            ("lookup:max_ngram=x", "max_ngram must be a whole number, got 'x'"),
            ("suffix:size=3", "suffix has no setting 'size'; it has corpus,"),
            ("recycling:size=3", "recycling has no setting 'size'; it has tree."),
            ("eagle2:beam=x", "beam must be a whole number, got 'x'"),
        ],
    )
    def test_what_cannot_be_a_setting_is_refused_before_a_model_is_loaded(self, text, message):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            drafter_spec(text)


class TestGenerate:
    """`jaxspec generate`."""

    def test_text_goes_out_and_all_else_to_standard_error(self, capsys, folder, model):
        argv = [
            "generate",
            folder,
            "one, two, one",
            "--max-new-tokens",
            "12",
            "--drafter",
            "lookup",
        ]
        assert main(argv) == 0
        quiet = capsys.readouterr()
        assert "GenerationConfig" not in quiet.err
        assert main([*argv, "-v"]) == 0
        out, err = capsys.readouterr()
        assert out == quiet.out
        config = GenerationConfig(max_new_tokens=12)
        assert out == generate(model, "one, two, one", config)[0].text + "\n"
        assert "GenerationConfig(max_new_tokens=12" in err
        assert "drafter: PromptLookup(num_speculative_tokens=4" in err
        assert "done: 12 tokens" in err
        assert "tau" in err
        assert "bonus included" in err

    def test_a_limit_that_cuts_a_text_is_said(self, capsys, folder, model):
        argv = ["generate", folder, "one, two, one", "--max-tokens", "12"]
        assert main(argv) == 0
        assert "cut off by --max-new-tokens 12\n" in capsys.readouterr().err
        length = len(model.tokenizer.encode("one, two, one"))
        assert main([*argv, "--max-positions", str(length + 5)]) == 0
        assert "done: 5 tokens" in (err := capsys.readouterr().err)
        assert "cut off by the end of the model's context\n" in err
        # Whatever the first token is, it ends the text.
        ends = ",".join(map(str, range(model.vocab_size)))
        assert main([*argv, "--stop-token-ids", ends]) == 0
        assert "cut off" not in capsys.readouterr().err

    def test_json_is_one_object_with_everything_asked_for(self, capsys, folder, model):
        argv = ["generate", folder, "abc", "--max-new-tokens", "4", "--json", "--logprobs"]
        assert main([*argv, "--temperature", "1", "--seed", "3"]) == 0
        shown = json.loads(capsys.readouterr().out)
        config = GenerationConfig(max_new_tokens=4, temperature=1.0, logprobs=True)
        expected = generate(model, "abc", config, seed=3)[0]
        assert shown["tokens"] == expected.tokens.tolist()
        assert shown["logprobs"] == pytest.approx(expected.logprobs.tolist(), abs=1e-5)
        assert shown["text"] == expected.text
        assert shown["finish_reason"] == "length"
        assert shown["metrics"]["num_tokens"] == 4
        assert shown["config"]["temperature"] == 1.0
        assert shown["prompt"] == "abc"
        assert "warped_logprobs" not in shown

    def test_the_text_obeys_a_grammar(self, capsys, folder, tmp_path):
        argv = ["generate", folder, "abc", "--choice", "yes, both", "--choice", "no"]
        assert main(argv) == 0
        assert capsys.readouterr().out in ("yes, both\n", "no\n")
        missing = str(tmp_path / "schema.json")
        assert missing in fails(capsys, "generate", folder, "abc", "--json-schema", missing)
        pytest.importorskip("outlines_core", reason="needs the extra `grammar`: '.[grammar]'")
        (tmp_path / "schema.json").write_text('{"enum": ["a", "b"]}')
        assert main(["generate", folder, "abc", "--json-schema", missing]) == 0
        assert json.loads(capsys.readouterr().out) in ("a", "b")

    def test_samples(self, capsys, folder):
        argv = ["generate", folder, "abc", "--max-new-tokens", "3", "--temperature", "1"]
        assert main([*argv, "--num-samples", "2", "--json"]) == 0
        samples = json.loads(capsys.readouterr().out)["samples"]
        assert [len(sample["tokens"]) for sample in samples] == [3, 3]
        assert main([*argv, "--num-samples", "2"]) == 0
        assert "--- sample 1 (length)" in capsys.readouterr().out

    def test_html_writes_the_decode_that_was_printed(self, capsys, folder, tmp_path):
        page = tmp_path / "out.html"
        argv = ["generate", folder, "abc", "--max-new-tokens", "5", "--drafter", "lookup"]
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert main([*argv, "--html", str(page)]) == 0
        out, err = capsys.readouterr()
        assert out == text
        assert "cut off by --max-new-tokens 5\n" in err
        assert re.search(r"^done: 5 tokens, .* tau [\d.]+ \(bonus included\)$", err, re.MULTILINE)
        assert f"wrote {page}" in err
        source = page.read_text()
        data = json.loads(source.split('type="application/json">')[1].split("</script>")[0])
        (row,) = data["rows"]
        assert "".join(row["pieces"]).strip("\n") == text.strip("\n")
        assert data["drafter"] == "PromptLookup"
        assert row["warped"]
        argv = [*argv, "--num-samples", "2", "--temperature", "1", "--json", "--html", str(page)]
        assert main(argv) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["config"]["warped_logprobs"]
        assert "prompt 0, sample 1" in page.read_text()

    def test_html_says_what_to_use_where_there_are_no_trees(self, capsys, tmp_path):
        jaxspec.save(filling_model("filling", 4), tmp_path / "filling")
        argv = ["generate", str(tmp_path / "filling"), "abc", "--html", str(tmp_path / "out.html")]
        line = fails(capsys, *argv)
        assert "--html: shows draft trees, and " in line
        assert "jaxspec.denoise_stream" in line
        line = fails(capsys, *argv, "--runtime", "litert")
        assert "--html: LiteRT records no steps" in line
        assert not (tmp_path / "out.html").exists()

    def test_prompts_from_a_file_and_from_standard_input(
        self, capsys, monkeypatch, folder, tmp_path
    ):
        (tmp_path / "prompt.txt").write_text("abc")
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
        outputs = []
        for source in (["abc"], ["-"], ["--file", str(tmp_path / "prompt.txt")]):
            assert main(["generate", folder, *source, "--max-new-tokens", "4"]) == 0
            outputs.append(capsys.readouterr().out)
        assert len(set(outputs)) == 1

    def test_standard_input_is_read_up_to_a_limit(self, capsys, monkeypatch, folder):
        monkeypatch.setattr("jaxspec.commands.generate.MOST_TEXT", 10)
        monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 11))
        assert "longer than 10 characters" in fails(capsys, "generate", folder, "-")
        monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 11))
        assert "longer than 10 characters" in fails(capsys, "generate", folder, "--chat")

    def test_a_program_that_fails_is_an_error_in_one_line(self, capsys, monkeypatch, folder):
        def fail(*arguments):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        monkeypatch.setattr("jaxspec.commands.generate.load_model", fail)
        assert "RESOURCE_EXHAUSTED" in fails(capsys, "generate", folder, "abc")

    def test_a_chat_remembers_its_turns(self, capsys, monkeypatch, folder, model):
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\ndef\n"))
        argv = ["generate", folder, "--chat", "--system", "be brief", "--max-new-tokens", "4"]
        assert main(argv) == 0
        messages, config = [{"role": "system", "content": "be brief"}], GenerationConfig(4)
        for turn in ("abc", "def"):
            messages.append({"role": "user", "content": turn})
            answer = generate(model, messages, config)[0].text
            messages.append({"role": "assistant", "content": answer})
        assert capsys.readouterr().out == "".join(m["content"] + "\n" for m in messages[2::2])

    def test_a_chat_needs_a_template(self, capsys, tmp_path):
        jaxspec.save(tiny_model(templates={}), tmp_path / "mute")
        line = fails(capsys, "generate", str(tmp_path / "mute"), "--chat")
        assert "has no chat template" in line

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["nowhere", "abc"], "There is no folder 'nowhere'"),
            (["MODEL", ""], "prompts[0] is empty"),
            (["MODEL", "x" * 3000], "has 3000 tokens; the context"),
            (["MODEL", "abc", "--file", "also"], "either PROMPT or --file"),
            (["MODEL", "--file", "missing.txt"], "error: missing.txt: No such file"),
            (["MODEL", "--file", "/dev/zero"], "error: /dev/zero is a device or a pipe"),
            (["MODEL", "abc", "--json-schema", "/dev/zero"], "/dev/zero is a device or a pipe"),
            (["MODEL", "abc", "--drafter", "suffix:corpus=/dev/zero"], "/dev/zero is a device"),
            (["MODEL", "abc", "--temperature", "-1"], "temperature must be in [0, 3e+38)"),
            (["MODEL", "abc", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
            (["MODEL", "abc", "--max-new-tokens", "-3"], "max_new_tokens must be at least 0"),
            (["MODEL", "abc", "--top-k", "999"], "top_k must be at most the vocabulary, 256"),
            (["MODEL", "abc", "--drafter", "draft-model"], "needs draft-model:model=MODEL"),
            (["MODEL", "abc", "--drafter", "lookup:max_ngram=0"], "max_ngram must be at least 1"),
            (["MODEL", "--chat", "--json"], "--chat: cannot be combined"),
            (["MODEL", "--chat", "--html", "out.html"], "--chat: cannot be combined"),
            (["MODEL", "abc", "--html", "."], "--html .: must be a file in a folder that exists"),
            (["MODEL", "abc", "--html", "nowhere/out.html"], "--html nowhere/out.html: must be"),
            (["MODEL", "abc", "--system", "hi"], "--system: needs --chat"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys, folder, argv, message):
        argv = [folder if part == "MODEL" else part for part in argv]
        assert message in fails(capsys, "generate", *argv)

    @pytest.mark.parametrize(
        ("error", "message"),
        [(RecursionError("deep"), "too many levels"), (MemoryError(), "memory is not enough")],
    )
    def test_too_much_is_one_line(self, capsys, monkeypatch, error, message):
        def fail(_):
            raise error

        monkeypatch.setattr(info, "run", fail)
        assert message in fails(capsys, "info")

    def test_debug_shows_the_traceback(self, folder):
        with pytest.raises(ValueError, match="--system: needs --chat"):
            main(["generate", folder, "abc", "--system", "hi", "--debug"])

    def test_ctrl_c_keeps_what_is_there(self, model, tmp_path):
        # So long a text that it is surely not over when the signal comes.
        patient = model.config.replace(max_positions=50_000)
        network = dataclasses.replace(model.network, config=patient)
        jaxspec.save(dataclasses.replace(model, network=network), tmp_path / "patient")
        # A test run in the background of a shell ignores the signal, and so would its children.
        listening = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from jaxspec.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", listening, "generate", tmp_path / "patient", "abc"]
        with subprocess.Popen(
            [*command, "--max-new-tokens", "40000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            first = os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            rest, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert first + rest  # what was shown stays, and ends the line
        assert rest.endswith(b"\n")
        assert b"interrupted: " in err
        assert b"Traceback" not in err

    def test_ctrl_c_shows_what_was_held_back(self, capsys, monkeypatch, model):
        def interrupted(*_):
            tokens = np.asarray(model.tokenizer.encode("abc"))
            yield SimpleNamespace(
                tokens=tokens, from_draft=np.zeros(3, bool), text="a", finish_reason=None
            )
            raise KeyboardInterrupt

        monkeypatch.setattr(commands.generate, "stream", interrupted)
        shown = Session(model, GenerationConfig(stop="bcd"), None, 0).show("x")
        assert shown == Shown("abc", interrupted=True)
        assert capsys.readouterr().out == "abc\n"

    def test_the_prompt_may_come_after_the_flags(self, capsys, folder):
        assert main(["generate", folder, "--max-new-tokens", "3", "abc"]) == 0
        late = capsys.readouterr().out
        assert main(["generate", folder, "abc", "--max-new-tokens", "3"]) == 0
        assert capsys.readouterr().out == late
        with pytest.raises(SystemExit):
            main(["generate", folder, "abc", "--max-new-tokens", "3", "more"])
        assert "too many words: 'more'" in capsys.readouterr().err

    @pytest.mark.parametrize("way", [[], ["--json"], ["--num-samples", "2"]])
    def test_a_terminal_is_told_of_compiling(self, capsys, monkeypatch, folder, way):
        argv = ["generate", folder, "abc", "--max-new-tokens", "3", *way]
        assert main(argv) == 0
        assert "compiling, once" not in capsys.readouterr().err
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert "compiling, once for this kind of request" in err
        assert "compiling, once" not in out

    def test_a_reader_that_leaves_early_is_no_error(self, folder):
        command = f"'{sys.executable}' -m jaxspec generate '{folder}' abc --max-new-tokens 400"
        done = subprocess.run(
            ["bash", "-c", f"{command} | head -c 1; echo ${{PIPESTATUS[0]}}"], capture_output=True
        )
        assert done.stdout.endswith(b"0\n")
        assert b"Traceback" not in done.stderr
        assert b"BrokenPipe" not in done.stderr


class TestBench:
    """`jaxspec bench`."""

    def test_it_writes_a_table_and_json(self, capsys, folder, prompts, tmp_path):
        argv = ["bench", folder, str(prompts), "--max-new-tokens", "6", "--repeats", "1"]
        written = tmp_path / "figures.json"
        assert main([*argv, "--drafter", "lookup", "--json", str(written)]) == 0
        out, err = capsys.readouterr()
        assert "2 prompts one at a time, greedy" in out
        assert "2 of 2 same" in out
        assert "By category" in out
        assert "prompts: 2 of" not in err
        figures = json.loads(written.read_text())
        assert [row["name"] for row in figures["rows"]] == ["plain", "lookup"]
        assert figures["outputs_agree"] is True

    def test_json_to_standard_output_is_alone_there(self, capsys, folder, prompts):
        argv = ["bench", folder, str(prompts), "--max-new-tokens", "6", "--repeats", "1"]
        assert main([*argv, "--limit", "1", "--drafter", "none", "--json", "-"]) == 0
        out, err = capsys.readouterr()
        assert [row["name"] for row in json.loads(out)["rows"]] == ["plain"]
        assert "1 prompts one at a time" in err

    def test_all_are_the_methods_that_are_here(
        self, capsys, monkeypatch, folder, prompts, tmp_path
    ):
        monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", tmp_path / "jaxspec")
        jaxspec.save(filling_model("filling", 4), tmp_path / "checkpoints" / "demo-deer")
        kept = ("prompt lookup", "draft model", "EAGLE-1, searched tree", "DEER, tree of 8")
        methods = {name: shipped.EVERY_METHOD[name] for name in kept}
        monkeypatch.setattr("jaxspec.commands.bench.EVERY_METHOD", methods)
        times = StepTimes(step=0.008, draft=0.002, target=0.005, width=4.0)
        monkeypatch.setattr(shipped, "measure_drafter", lambda *_, **__: times)
        monkeypatch.setattr(step, "measure_drafter", lambda *_, **__: times)
        written = tmp_path / "figures.json"
        argv = ["bench", folder, str(prompts), "--max-new-tokens", "6", "--repeats", "1"]
        argv += ["--limit", "1", "--json", str(written)]
        assert main([*argv, "--drafter", "all"]) == 0
        out, err = capsys.readouterr()
        assert "left_out: draft model, EAGLE-1, searched tree" in err
        assert "DEER, tree of 8" in out
        assert "longest" in out
        assert out.count("25%, 62%") == 3
        steps = json.loads(written.read_text())["steps"]
        assert steps.keys() == {"plain", "prompt lookup", "DEER, tree of 8"}
        assert steps["DEER, tree of 8"]["draft_seconds"] == 0.002

    def test_a_drafter_that_lies_makes_it_fail(self, capsys, monkeypatch, folder, prompts):
        planted = options.DrafterKind(WrongRoot, lambda *_: WrongRoot(), "liar", (), {})
        monkeypatch.setitem(options.DRAFTERS, "liar", planted)
        argv = ["bench", folder, str(prompts), "--max-new-tokens", "6", "--repeats", "1"]
        assert main([*argv, "--drafter", "liar"]) == 1
        assert "DIFFERENT: liar, prompt 0" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["MODEL", "missing.jsonl"], "missing.jsonl"),
            (["MODEL", "PROMPTS", "--field", "answer"], "prompts.jsonl:1: has no field 'answer'"),
            (["MODEL", "PROMPTS", "--limit", "0"], "limit must be at least 1"),
            (["MODEL", "PROMPTS", "--json", "no/such/folder.json"], "--json no/such/folder.json"),
            (["MODEL", "PROMPTS", "--repeats", "0"], "repeats must be at least 1"),
            (["MODEL", "PROMPTS", "--num-samples", "2"], "num_samples must be 1"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys, folder, prompts, argv, message):
        named = {"MODEL": folder, "PROMPTS": str(prompts)}
        assert message in fails(capsys, "bench", *(named.get(part, part) for part in argv))

    def test_an_unreadable_line_is_named(self, capsys, folder, prompts):
        prompts.write_text(prompts.read_text() + "{oops\n")
        assert f"{prompts}:3: not valid JSON" in fails(capsys, "bench", folder, str(prompts))


class TestDemo:
    """`jaxspec demo`, on a model that is not shipped."""

    @pytest.fixture(autouse=True)
    def short_prompts(self, monkeypatch, tmp_path):
        monkeypatch.setattr(demo, "PROMPTS", ("one, two, one", "abc, abc, abc"))
        monkeypatch.setattr(
            "jaxspec.checkpoint.folder._PACKAGE", tmp_path / "jaxspec"
        )  # nothing is shipped

    def test_it_shows_every_method_without_a_terminal(self, capsys, folder, head):
        (head / "tree.json").write_text("[[0], [1]]")
        drafters = [f"draft-model:model={folder}", f"eagle:head={head}"]
        argv = ["demo", "--model", folder]
        for drafter in drafters:
            argv += ["--drafter", drafter]
        assert main([*argv, "--max-tokens", "6", "--repeats", "1", "-v"]) == 0
        out, err = capsys.readouterr()
        assert "config: GenerationConfig(max_new_tokens=6" in err
        assert "drafters: PromptLookup(num_speculative_tokens=4" in err
        for method in ("plain", "prompt lookup", *drafters):
            assert f"# {method}" in out
        assert "All outputs are identical" in out
        assert "\x1b" not in out

    def test_methods_are_those_that_come_with_the_package(self, capsys, monkeypatch, folder):
        methods = {"one": lambda target: jaxspec.PromptLookup(), "for another": lambda target: None}
        monkeypatch.setattr(demo, "EVERY_METHOD", methods)
        monkeypatch.setattr(demo, "FIRST_METHODS", ("for another",))
        argv = ["demo", "--model", folder, "--max-tokens", "6", "--repeats", "1"]
        assert main([*argv, "--all"]) == 0
        out, err = capsys.readouterr()
        assert "# one\n" in out
        assert "left_out: for another" in err
        assert main(argv) == 0
        assert "# one\n" not in capsys.readouterr().out

    def test_a_first_run_is_told_what_to_try_next(self, capsys, folder):
        """The commands that it names are read without an error."""
        assert main(["demo", "--model", folder, "--max-tokens", "6", "--repeats", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        named = [line.strip() for line in lines if line.startswith("  jaxspec ")]
        assert len(named) == 3
        for command in named:
            words = shlex.split(command.split("   ")[0])[1:]
            assert build_parser(words).parse_args(words).run.__module__.endswith(words[0])

    def test_the_race_is_written_as_a_picture(self, capsys, folder, tmp_path):
        argv = ["demo", "--model", folder, "--max-tokens", "6", "--repeats", "1", "--slow", "2"]
        assert main([*argv, "--svg", str(tmp_path / "race.svg")]) == 0
        assert (tmp_path / "race.svg").read_text().startswith("<svg ")
        capsys.readouterr()
        assert "--svg must name a file that ends in .svg" in fails(capsys, *argv, "--svg", "race")
        jaxspec.save(filling_model("filling", 4), tmp_path / "filling")
        argv[2] = str(tmp_path / "filling")
        assert "--svg: a race of causal" in fails(capsys, *argv, "--svg", "race.svg")

    @pytest.fixture
    def on_a_terminal(self, monkeypatch):
        for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "100", "LINES": "40"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TERM", "xterm")

    @pytest.mark.usefixtures("on_a_terminal")
    def test_on_a_terminal_it_is_a_race(self, capsys, folder, monkeypatch):
        monkeypatch.chdir(os.path.dirname(folder))
        drafter = f"draft-model:model={os.path.basename(folder)}"
        argv = ["demo", "--model", folder, "--drafter", drafter, "--slow", "1.5"]
        assert main([*argv, "--max-tokens", "6", "--repeats", "1"]) == 0
        out = capsys.readouterr().out
        assert "1.5 times slower than it ran" in out
        for method in ("plain", "prompt lookup", drafter):
            assert re.search(rf"{method}: [\d.]+ s", out)
        assert "the text, by the fastest: " in out
        assert "All outputs are identical" in out

    @pytest.mark.usefixtures("on_a_terminal")
    def test_an_interrupted_race_leaves_the_cursor(self, capsys, monkeypatch, folder):
        def interrupt(seconds):
            raise KeyboardInterrupt

        monkeypatch.setattr("jaxspec.commands.race.time.sleep", interrupt)
        assert main(["demo", "--model", folder, "--max-tokens", "6"]) == 130
        out, err = capsys.readouterr()
        assert out.rfind("\x1b[?25l") < out.rfind("\x1b[?25h")
        assert "Traceback" not in out + err

    @pytest.mark.usefixtures("on_a_terminal")
    @pytest.mark.parametrize("slow", ["0.5", "nan", "inf"])
    def test_a_race_is_not_shown_faster_than_it_ran(self, capsys, slow):
        assert "--slow must be a number from 1" in fails(capsys, "demo", "--slow", slow)

    @pytest.mark.parametrize("json_or_not", [[], ["--json"]])
    def test_where_there_is_no_race_nothing_slows_it(self, capsys, json_or_not):
        assert "--slow: the race needs a terminal" in fails(
            capsys, "demo", "--slow", "2", *json_or_not
        )

    def test_a_diffusion_model_shows_its_own_decisions_drafted(self, capsys, monkeypatch, tmp_path):
        folder = str(tmp_path / "filling")
        jaxspec.save(filling_model("filling", 4), folder)
        argv = ["demo", "--model", folder, "--max-tokens", "7", "--repeats", "1"]
        assert main(argv) == 0
        out = capsys.readouterr().out
        for method in ("stepwise", "2 drafted", "4 drafted"):
            assert f"# {method}\n" in out
        assert "(8 passes, 1.00 tokens per pass)" in out
        assert "All outputs are identical to stepwise decoding's." in out
        assert "--drafter: not for diffusion" in fails(capsys, *argv, "--drafter", "lookup")
        for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "100", "LINES": "40"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TERM", "xterm")
        assert main([*argv, "--slow", "100"]) == 0
        shown = capsys.readouterr().out
        assert "░" in shown
        assert re.search(r"4 drafted: [\d.]+ s", shown)

    def test_the_shipped_target_brings_a_diffusion_model_unless_drafters_are_added(
        self, capsys, monkeypatch, folder
    ):
        shown = {"demo": jaxspec.load(folder), demo.BLOCKS: filling_model("filling", 4)}
        monkeypatch.setattr(demo, "shipped_models", lambda: shown)
        monkeypatch.setattr(demo, "load", shown.__getitem__)
        argv = ["demo", "--max-tokens", "6", "--repeats", "1", "--json"]
        assert main(argv) == 0
        assert json.loads(capsys.readouterr().out)["diffusion"]["model"] == "filling"
        assert main([*argv, "--drafter", "lookup"]) == 0
        assert json.loads(capsys.readouterr().out)["diffusion"] is None

    @pytest.mark.parametrize(
        ("flags", "num_prompts", "methods"),
        [
            ([], 1, {"prompt lookup"}),
            (["--all"], 2, {"prompt lookup", "suffix lookup", "token recycling"}),
        ],
    )
    def test_json(self, capsys, folder, flags, num_prompts, methods):
        drafter = f"draft-model:model={folder}"
        argv = ["demo", "--model", folder, "--drafter", drafter, "--json", *flags]
        assert main([*argv, "--max-tokens", "6", "--repeats", "1"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["outputs_agree"] is True
        prompts = [each["prompt"] for each in shown["prompts"]]
        assert prompts == [*demo.PROMPTS[:num_prompts]]
        for outputs in (each["outputs"] for each in shown["prompts"]):
            assert {*outputs} == {"plain", drafter, *methods}
            assert len({tuple(output["tokens"]) for output in outputs.values()}) == 1
            assert not any(outputs["plain"]["from_draft"])
        assert shown["comparison"]["rows"][-1]["overall"]["mean_acceptance_length"] > 1


class TestShippedPrompts:
    """The demo's own prompts."""

    def test_they_share_one_bucket(self):
        shipped = jaxspec.checkpoint.shipped_models()
        if "demo" not in shipped:
            pytest.skip("needs the shipped model 'demo', which is not here")
        tokenizer = jaxspec.checkpoint.load_tokenizer(shipped["demo"])
        lengths = [len(tokenizer.encode(prompt)) for prompt in demo.PROMPTS]
        assert all(32 < length <= 64 for length in lengths), lengths


def test_a_training_that_diverged_is_an_error_and_no_traceback(monkeypatch, capsys, tmp_path):
    def diverge(*args, **kwargs):
        raise DivergedError("step 3: the loss is nan.")

    monkeypatch.setattr("jaxspec.training.train.train", diverge)
    for name in ("gsm8k", "mbpp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl.gz").touch()
    argv = ["train", "lm", "--data-folder", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert capsys.readouterr().err.endswith("jaxspec: error: step 3: the loss is nan.\n")


def test_a_demo_of_no_tokens_is_refused(capsys):
    assert main(["demo", "--max-tokens", "0"]) == 2
    assert "--max-new-tokens must be at least 1, got 0" in capsys.readouterr().err


def test_info_says_what_runs_and_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(info, "_version", lambda name: None if name == "matplotlib" else "1.0")
    assert main(["info"]) == 0
    lines = dict(re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert lines["jaxspec"].startswith(jaxspec.__version__)
    assert lines["products"] == native.status().reason
    # An extra that names another one lacks what that lacks.
    assert {"plots", "notebooks", "dev"} <= set(lines["not installed"].split(", "))
    assert "test" in lines["extras"].split(", ")
    monkeypatch.setattr(info, "DISTRIBUTION", "jaxspec-of-a-checkout")
    assert main(["info"]) == 0
    assert "not installed (pip install .)" in capsys.readouterr().out
