"""Tasks: known answers, and programs that do what nobody asked for."""

import dataclasses
import json
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest

import jaxspec
from jaxspec import DenoiseConfig, denoise
from jaxspec.cli import main
from jaxspec.decoding.metrics import Counts
from jaxspec.measure.figures import DecodedText, Sample
from jaxspec.measure.judge import passes
from jaxspec.measure.tasks import TASKS, Question, answer_of, answers_of, judged, read_task
from tests.measure.models import filling_model, tiny_model

GSM8K = {"question": "How many?", "answer": "2 * 600 = 1,200\n#### 1,200"}
MBPP = {
    "text": "Write a function to add.",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "",
}
HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """Adds."""\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = 7 #### 7", "7"),
        ("#### $1,200.", "1200"),
        ("#### -3 or 4", "-3"),
        ("it is 5, no, 6.5.", "6.5"),
        ("none", None),
        ("5 ####", None),
        ("#### Step 1: eggs\n16 - 3 = 13\n#### Answer: 13 * 2 = 26", "26"),
        ("#### 1. Eggs\n16 - 3 = 13\n#### 12) Price\n13 * 2 = 26", "26"),
        ("#### 1st step: 4 eggs\n#### 2: double\n#### 8", "8"),
        ("#### 18\nHow many?\n#### 25", "18"),
        ("#### 18.\n\nHow many?\n#### 25", "18"),
        ("####\n\n16 - 3 = 13\n#### 13", "13"),
    ],
)
def test_the_number_of_an_answer(text, answer):
    assert answer_of(text) == (None if answer is None else Decimal(answer))


@pytest.mark.parametrize(
    ("name", "entry", "text", "right"),
    [
        ("gsm8k", GSM8K, "2 * 600 = 1200 #### 1200", True),
        ("gsm8k", GSM8K, "It is 1,200.00", True),
        ("gsm8k", GSM8K, "It is 1,201", False),
        ("gsm8k", GSM8K, "", False),
        ("mbpp", MBPP, RIGHT, True),
        ("mbpp", MBPP, f"{RIGHT}\nprint(add(1))\n", True),
        ("mbpp", MBPP, f"Here:\n```python\n{RIGHT}```\nIt adds.", True),
        ("mbpp", MBPP, RIGHT.replace("+", "-"), False),
        ("mbpp", MBPP, "def add(", False),
        ("humaneval", HUMANEVAL, "    return a + b\n\nprint(add(1))\n", True),
        ("humaneval", HUMANEVAL, f"```python3\n{RIGHT}```", True),
        ("humaneval", HUMANEVAL, "    return a + b\n```\nThis adds.", True),
        ("humaneval", HUMANEVAL, "```\nadd(1, 2)\n```\n", False),
        ("humaneval", HUMANEVAL, "    return a - b\n", False),
        ("humaneval", HUMANEVAL, '    return a + b\n\n\ndef add(a, b):\n    """Retu', True),
        ("humaneval", HUMANEVAL, f"\nimport math\n\n{RIGHT}\nprint(add(1))\n", True),
        ("humaneval", HUMANEVAL, "\n" + RIGHT.replace("+", "-"), False),
    ],
)
def test_answers_are_judged(name, entry, text, right):
    assert TASKS[name].is_right(entry, text) is right


def test_equal_texts_are_judged_once(monkeypatch):
    """The time that a program takes may decide."""
    seen = []

    def is_right(entry, text):
        seen.append((entry["answer"], text))
        return text == "right"

    monkeypatch.setitem(TASKS, "gsm8k", TASKS["gsm8k"]._replace(is_right=is_right))
    questions = [Question("", {"answer": number}) for number in (1, 2)]
    texts = {"one": ["right", "wrong"], "other": ["right", "right"]}
    found = judged("gsm8k", questions, texts)
    assert found == {"one": [True, False], "other": [True, True]}
    assert sorted(seen) == [(1, "right"), (2, "right"), (2, "wrong")]


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import socket; socket.socket()",
        "try:\n    open('file', 'w')\nexcept BaseException: pass",
        "x = bytearray(2 << 30)",
        "import ctypes; ctypes.CDLL(None)",
        "def f(): f()\nf()",
        "raise SystemExit",
        "assert False",
        "\0",
    ],
)
def test_a_program_that_does_not_end_well_is_wrong(program):
    assert not passes(program, seconds=1.0)


def test_a_program_ends_in_time_by_itself(monkeypatch):
    """Its own clock ends it, long before the process that waits for it would."""
    monkeypatch.setattr("jaxspec.measure.judge._GRACE", 60.0)
    began = time.monotonic()
    assert not passes("import time; time.sleep(60)", seconds=1.0)
    assert time.monotonic() - began < 40


def test_nothing_is_left_behind(tmp_path):
    target = tmp_path / "file"
    assert not passes(f"open({str(target)!r}, 'w').write('x')")
    assert not target.exists()
    assert passes("import math, random, itertools, collections, re, heapq\nassert True")


def test_a_system_without_limits_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    monkeypatch.delattr("os.killpg")
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(MBPP | GSM8K))
    with pytest.raises(ValueError, match="this system does not offer; judge them on Linux"):
        read_task("mbpp", path)
    assert read_task("gsm8k", path)


def test_a_file_of_another_task_is_refused(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(MBPP))
    assert read_task("mbpp", path)[0].prompt.startswith('"""\nWrite a function')
    with pytest.raises(ValueError, match=r"file.jsonl:1: has no question, answer, which gsm8k"):
        read_task("gsm8k", path)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("mbpp", MBPP | {"test_setup_code": 5}, "test_setup_code must be a text, got 5"),
        ("mbpp", MBPP | {"test_list": 5}, "test_list must be a sequence, got 5"),
        ("mbpp", MBPP | {"test_list": "assert True"}, "test_list must be a sequence"),
        ("mbpp", MBPP | {"test_list": []}, "test_list must be a list of tests"),
        ("mbpp", MBPP | {"test_list": ["assert True", 5]}, r"test_list\[1\] must be a text, got 5"),
        ("mbpp", MBPP | {"text": ""}, "text must be a text that is not empty"),
        ("gsm8k", GSM8K | {"answer": "many"}, "answer must be a text with a number, got 'many'"),
    ],
)
def test_a_field_of_another_type_is_named(name, entry, message, tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(entry))
    with pytest.raises(ValueError, match=rf"file\.jsonl:1: {message}"):
        read_task(name, path)
    path.write_text(json.dumps(MBPP | {"test_setup_code": None}))
    assert len(read_task("mbpp", path)) == 1


def test_the_command_judges_every_method(tmp_path, capsys):
    path, figures = tmp_path / "file.jsonl", tmp_path / "figures.json"
    path.write_text("\n".join([json.dumps(GSM8K)] * 2))
    arguments = ["bench", "demo-draft", str(path), "--task", "gsm8k", "--max-new-tokens", "8"]
    assert main([*arguments, "--repeats", "1", "--drafter", "lookup", "--json", str(figures)]) == 0
    assert "Answers to gsm8k" in capsys.readouterr().out
    answers = json.loads(figures.read_text())["answers"]
    assert answers["num_questions"] == 2
    assert set(answers["right"]) == {"plain", "lookup"}
    assert answers["changed"] == {"plain": 0, "lookup": 0}
    assert main([*arguments, "--field", "question"]) == 2


def test_drafts_of_a_diffusion_model_change_no_answer(tmp_path, monkeypatch, capsys):
    """The text that it writes stepwise is made the right answer."""
    path, figures = tmp_path / "file.jsonl", tmp_path / "figures.json"
    path.write_text(json.dumps(GSM8K))
    model, config = filling_model("filling", 4), DenoiseConfig(max_new_tokens=8)
    (row,) = denoise(model, read_task("gsm8k", path)[0].prompt, config)
    task = TASKS["gsm8k"]._replace(is_right=lambda _, text: text == row.text)
    monkeypatch.setattr("jaxspec.measure.tasks.TASKS", {"gsm8k": task})
    jaxspec.save(model, tmp_path / "model")
    argv = ["bench", str(tmp_path / "model"), str(path), "--task", "gsm8k", "--drafts", "2"]
    argv += ["--max-new-tokens", "8", "--repeats", "1", "--json", str(figures)]
    assert main(argv) == 0
    assert "judged otherwise than stepwise" in " ".join(capsys.readouterr().out.split())
    answers = json.loads(figures.read_text())["answers"]
    assert answers["right"] == {"stepwise": 1, "2 drafts": 1}
    assert answers["changed"] == {"stepwise": 0, "2 drafts": 0}


def test_an_output_without_text_has_no_answer():
    sample = Sample((DecodedText([1], [2]),), 1.0, Counts())
    row = SimpleNamespace(name="plain", samples=(sample,))
    comparison = SimpleNamespace(rows=[row], plain=row, prompt_indices=(0,))
    with pytest.raises(ValueError, match="outputs have no text to judge"):
        answers_of(comparison, "gsm8k", [Question("How many?", GSM8K)])


def test_a_task_needs_a_tokenizer(tmp_path, capsys):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(GSM8K))
    jaxspec.save(dataclasses.replace(tiny_model(), tokenizer=None), tmp_path / "mute")
    assert main(["bench", str(tmp_path / "mute"), str(path), "--task", "gsm8k"]) == 2
    assert "has no tokenizer, so its answers cannot be read" in capsys.readouterr().err
