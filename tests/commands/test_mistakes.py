"""Wrong commands: each is answered in six lines at most, with what to type instead."""

import math
import re
import shlex
from pathlib import Path

import pytest

from jaxspec.checkpoint import shipped_models
from jaxspec.cli import COMMANDS, GROUPS, build_parser, main
from jaxspec.commands import parser as parsing
from jaxspec.commands.options import DRAFTERS, drafter_spec, settings_of

MISTAKES = {
    # commands
    "generat demo hi": "did you mean generate?",
    "benchmark demo prompts.jsonl": "did you mean bench?",
    "chat demo": "did you mean generate MODEL --chat?",
    "run demo hi": "did you mean generate?",
    "tree demo": "did you mean tune tree?",
    "eagle --out head": "did you mean train eagle?",
    "models": "did you mean info?",
    "list": "did you mean drafters?",
    "help": "did you mean --help?",
    "train": "required: lm|eagle|masked|deer|dflash",
    "train eagel --out head": "did you mean eagle?",
    "export demo phone": "give one of tflite, tuned, report, litertlm, web, kit",
    "'What is 2 + 3?'": 'jaxspec generate demo "What is 2 + 3?"',
    "--model demo generate hi": "the command comes first",
    # places
    "generate": "MODEL is missing",
    "generate demo": "PROMPT is missing, behind MODEL",
    "generate 'Once upon a time'": "PROMPT is missing, behind MODEL",
    "generate demo Once upon a time": "Text with spaces needs quotes",
    "generate demo hi --model demo-draft": "as --model is given too",
    "generate -m demo -p hi hi": "as --model, --prompt is given too",
    "bench demo": "PROMPTS.jsonl[.gz] is missing",
    "bench prompts.jsonl demo": "prompts.jsonl is a file of prompts, which comes after MODEL",
    "batch in.jsonl out.jsonl": "--model MODEL is missing",
    "batch --merge out part --input in": "leave out input.",
    "batch --merge out part -m demo -o out": "leave out output, model.",
    "batch --merge out part --seed 3 --field x": "leave out seed, field.",
    "batch in.jsonl --model demo": "give IN.jsonl and OUT.jsonl",
    "export litert demo phone": "did you mean tflite?",
    "export web demo": "required: --drafter",
    "serve": "FOLDER",
    # flags
    "generate demo hi --temprature 0.7": "did you mean --temperature?",
    "generate demo hi --max_new_tokens 9": "did you mean --max-new-tokens?",
    "generate demo hi --max-length 9": "did you mean --max-tokens?",
    "generate demo hi --tokens 9": "did you mean --max-tokens?",
    "generate demo hi -n 9": "did you mean --max-tokens?",
    "generate demo hi --device cpu": "did you mean JAX_PLATFORMS=cpu (cuda, tpu) before",
    "train lm --out x --max-length 9": "did you mean --sequence-length?",
    "generate demo hi --temperature warm": "--temperature: invalid float value: 'warm'",
    f"generate demo hi --max-new-tokens {'9' * 5000}": f"invalid int value: '{'9' * 76}...\n",
    "batch a b -m demo --batch-size ²": "must be auto or a number from 1 to 999999999, got '²'",
    "generate demo hi --html /dev/null": "--html /dev/null: is a device or a pipe; give a file.",
    "generate demo hi --drafter": "--drafter: expected one argument",
    "generate demo hi --draft-model demo-draft": "--drafter draft-model:model=demo-draft",
    "generate demo hi --head demo-eagle": "--drafter eagle:head=...",
    "generate demo hi --eagle demo-eagle": "--drafter eagle:head=demo-eagle",
    "generate demo hi --num-speculative-tokens 3": "--drafter lookup:num_speculative_tokens=...",
    "info -v": "unknown flag -v\n",
    "generate demo hi -o x": "did you mean --json?",
    "tune profile demo -o profile.json": "did you mean --out?",
    "info demo -o x": "did you mean > FILE?",
    "generate demo hi --dtype fp32": "give one of float32, float16, bfloat16",
    "batch in.jsonl out.jsonl -m demo": "in.jsonl: No such file or directory; check the path.",
    "bench demo prompts.jsonl --task gsm": "did you mean gsm8k?",
    "generate demo --top-q 3 -- -hello": "unknown flag --top-q; did you mean --top-",
    "generate demo --seed 3 -- -hello -you": "too many words: '-you'",
    # drafters and their settings
    "generate demo hi --drafter ngram": "did you mean lookup?",
    "generate demo hi --drafter eagel": "did you mean eagle?",
    "generate demo hi --drafter demo-eagle": "did you mean eagle:head=demo-eagle?",
    "generate demo hi --drafter layer_skip:skips=demo-skips": "layer-skip:skips=demo-skips?",
    "generate demo hi --drafter lookup,max_ngram=3": "did you mean lookup:max_ngram=3?",
    "generate demo hi --drafter medusa": "give one of lookup, suffix, recycling",
    "demo --drafter all": "did you mean jaxspec demo --all,",
    "generate demo hi --drafter lookup:ngram=3": "did you mean max_ngram?",
    "generate demo hi --drafter lookup:3": "settings are num_speculative_tokens",
    "generate demo hi --drafter lookup:max_ngram=x": "max_ngram must be a whole number",
    "generate demo hi --drafter lookup:match=latest": "match must be first or recent",
    "generate demo hi --drafter draft-model": "draft-model:model=demo-draft",
    "generate demo hi --drafter eagle": "eagle:head=FOLDER",
    "drafters eagle3": "did you mean eagle?",
    # models
    "generate ../nowhere hi": "There is no folder '../nowhere', nor a shipped model",
    "generate demmo hi": "did you mean demo?",
    "generate demo_draft hi": "did you mean demo-draft?",
    "generate demo-eagle hi": "--drafter eagle:head=demo-eagle",
    "generate demo hi --drafter eagle:head=demo-eagel": "did you mean demo-eagle?",
    "generate demo hi --drafter draft-model:model=demo-drft": "did you mean demo-draft?",
}


@pytest.mark.parametrize("line", MISTAKES, ids=lambda line: line[:60])
def test_a_mistake_is_answered_with_what_to_type(capsys, monkeypatch, line):
    if "demo" not in shipped_models():
        pytest.skip("needs the shipped models, which are not here")
    monkeypatch.setenv("COLUMNS", "80")
    try:
        code = main(shlex.split(line))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert MISTAKES[line] in err
    assert err.startswith("jaxspec: error: ")
    assert "Traceback" not in err
    assert sum(math.ceil(max(1, len(row)) / 80) for row in err.splitlines()) <= 6, err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words))
def test_every_help_page_has_an_example_that_is_a_command_line(capsys, monkeypatch, command):
    if "demo" not in shipped_models():
        pytest.skip("needs the shipped models, which are not here")
    monkeypatch.setenv("COLUMNS", "200")
    for words in {command.words, command.words[:1], ()}:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert "Example: jaxspec " in capsys.readouterr().out
    assert callable(parsed([*command.words, *shlex.split(command.example)]).run)


def parsed(argv):
    args, rest = build_parser(argv).parse_known_args(argv)
    parsing.settle(args.parser, args, rest)
    return args


ROOT = Path(__file__).resolve().parents[2]


def commands_in(page):
    """Returns the command lines of the blocks of a page, without their first word."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text("utf-8"), re.M | re.S)
    lines = "\n".join(block for language, block in blocks if language in ("", "sh"))
    return re.findall(r"(?:^|\s)jaxspec (.*?)(?= && |$)", lines.replace("\\\n", " "), re.M)


PAGES = [page for name in ("*.md", "docs/**/*.md", "examples/**/*.md") for page in ROOT.glob(name)]


@pytest.mark.parametrize("page", [*filter(commands_in, PAGES)], ids=lambda page: page.name)
def test_the_command_lines_of_documents_are_read(page):
    for line in commands_in(page):
        parsed(shlex.split(line, comments=True))


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("generate", "MODEL [PROMPT]"),
        ("batch", "IN.jsonl[.gz] OUT.jsonl --model MODEL"),
        ("train lm", "--out FOLDER"),
        ("train eagle", "--out FOLDER --target FOLDER"),
        ("train deer", "--out FOLDER --target FOLDER --start-from FOLDER"),
        ("export web", "MODEL FOLDER --drafter NAME[:SETTING=VALUE,...]"),
        ("tune tree", "[MODEL] [PROMPTS.jsonl[.gz]] --profile FILE"),
    ],
)
def test_the_usage_shows_what_must_be_given(capsys, monkeypatch, command, usage):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out.partition("\n")[0]
    assert shown == f"usage: jaxspec {command} {usage} [flags]"


def test_a_bare_call_prints_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for word in {command.words[0] for command in COMMANDS} | {*GROUPS}:
        assert f"\n    {word} " in out


def test_the_help_of_generate_begins_with_what_is_used_most(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = capsys.readouterr().out
    common = ("-m MODEL", "-p PROMPT", "--drafter", "--max-new-tokens", "--temperature", "--seed")
    places = [out.index(flag) for flag in common]
    assert places == sorted(places)
    assert places[-1] < out.index("\ndecoding:") < out.index("--top-k")


class TestPlaces:
    """Arguments that have a place and a flag."""

    def read(self, line: str) -> tuple:
        argv = ["generate", *shlex.split(line)]
        args, rest = build_parser(argv).parse_known_args(argv)
        parsing.settle(args.parser, args, rest)
        return args.model, args.prompt, args.max_new_tokens

    @pytest.mark.parametrize(
        "line",
        [
            "m 'a b' --max-tokens 3",
            "m --max-tokens 3 'a b'",
            "--max-new-tokens 3 m 'a b'",
            "-m m 'a b' --max-tokens 3",
            "'a b' -m m --max-tokens 3",
            "-p 'a b' m --max-tokens 3",
            "--prompt 'a b' --model m --max-tokens=3",
        ],
    )
    def test_every_order_gives_the_same(self, line):
        assert self.read(line) == ("m", "a b", 3)

    @pytest.mark.parametrize(
        "line",
        [
            "m -- -hello",
            "-- m -hello",
            "m --max-tokens 3 -- -hello",
            "--max-tokens 3 m -- -hello",
            "--max-tokens 3 -- m -hello",
            "-m m --max-tokens 3 -- -hello",
        ],
    )
    def test_two_dashes_end_the_flags(self, line):
        assert self.read(line)[:2] == ("m", "-hello")

    def test_a_prompt_may_be_standard_input_or_left_out(self):
        assert self.read("m -") == ("m", "-", None)
        assert self.read("m --chat")[:2] == ("m", None)

    @pytest.mark.parametrize(
        "line", ["in out", "in -o out", "-i in -o out", "--output out in", "--out out --input in"]
    )
    def test_files_of_a_job_have_short_flags_too(self, line):
        argv = ["batch", *line.split(), "-m", "m"]
        args, rest = build_parser(argv).parse_known_args(argv)
        parsing.settle(args.parser, args, rest)
        assert (args.input, str(args.output)) == ("in", "out")


class TestDrafters:
    """`jaxspec drafters`."""

    def test_it_has_one_line_for_each(self, capsys):
        assert main(["drafters"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == [*DRAFTERS]
        assert "Matches the text's last n tokens" in lines[0]

    @pytest.mark.parametrize("name", DRAFTERS)
    def test_settings_have_type_default_and_meaning(self, capsys, monkeypatch, name):
        monkeypatch.setenv("COLUMNS", "200")
        assert main(["drafters", name]) == 0
        out = capsys.readouterr().out
        for setting, known in settings_of(name).items():
            (row,) = [line for line in out.splitlines() if line.split()[:1] == [setting]]
            default = "" if known.default is None else str(known.default)
            for cell in (known.needed, default, known.meaning):
                assert cell in row
            assert len(known.meaning) > 8
        spec = drafter_spec(DRAFTERS[name].example)
        assert spec is not None
        assert spec.name == name

    def test_a_setting_takes_what_its_field_takes(self):
        settings = settings_of("lookup")
        assert {name: each.default for name, each in settings.items()} == {
            "num_speculative_tokens": 4,
            "max_ngram": 2,
            "match": "first",
        }
        spec = drafter_spec("deer:model=x,block=4,temperature=0.5,adaptive=yes")
        assert spec is not None
        assert spec.settings == {"model": "x", "block": 4, "temperature": 0.5, "adaptive": True}
