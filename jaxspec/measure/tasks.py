"""Tasks whose answers are right or wrong: arithmetic in words, and Python functions with tests."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

from rich import box
from rich.table import Table

from jaxspec.core.checks import Requirement, checked
from jaxspec.measure.comparison import Comparison
from jaxspec.measure.judge import check_limits, passes
from jaxspec.measure.prompts import read_entries
from jaxspec.native import num_cores

Entry = Mapping[str, Any]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# A Markdown heading may begin like it, and have a number of its own: "#### 1. Add".
_HEADING = r"\d{1,2}(?:[.):][^\S\n]+\w|(?:st|nd|rd|th)\b)"
_MARKED = re.compile(rf"####[^\S\n]*(?!{_HEADING})\$?({_NUMBER.pattern})")
_FENCED = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Beginnings of what a model writes after a function, which is no part of it.
_AFTER_BODY = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", '\n"""', "\n#", "\n```")
_AFTER_CODE = ("\nif __name__", "\nprint(", "\nassert ", '\n"""', "\n```")


class JudgedTask(NamedTuple):
    """A task of one answer for each entry of a file.

    Attributes:
        fields: what an entry must have, each as `jaxspec.core.checks` annotates it.
        prompt: of an entry, in the shape that the task's paper or its data give.
        is_right: judges the text that a model wrote for an entry.
        runs_programs: judging runs what the model wrote.
    """

    fields: Mapping[str, Any]
    prompt: Callable[[Entry], str]
    is_right: Callable[[Entry, str], bool]
    runs_programs: bool = True


class Question(NamedTuple):
    """An entry of a file and the prompt made of it."""

    prompt: str
    entry: Entry


def answer_of(text: str) -> Decimal | None:
    """Returns the number that a text ends in: the first right after "####", or else the last one.

    Numbers of Markdown headings do not count: "#### 1. Add". A text that was cut off right after
    "####" has no answer.

    Example:
        >>> answer_of("He has 3 * 4 = 12 pens. #### 1,200"), answer_of("So it is 7.50.")
        (Decimal('1200'), Decimal('7.50'))
    """
    found = _MARKED.findall(text)[:1]
    if not found and not text.rstrip().endswith("####"):
        found = _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "")) if found else None


def cut_before(text: str, ends: Sequence[str]) -> str:
    r"""Returns a text up to the first of some strings.

    Example:
        >>> cut_before("    return x\nprint(f(1))", ["\nprint("])
        '    return x'
    """
    return text[: min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))]


def code_in(text: str, name: str = "") -> str | None:
    r"""Returns the first fenced block of a text that defines a function; `None` without one.

    Example:
        >>> code_in("Here:\n```python\ndef f():\n    pass\n```\nDone.", "f")
        'def f():\n    pass\n'
    """
    return next((block for block in _FENCED.findall(text) if f"def {name}" in block), None)


def _is_right_number(entry: Entry, text: str) -> bool:
    found = answer_of(text)
    return found is not None and found == answer_of(entry["answer"])


def _passes_tests(entry: Entry, text: str) -> bool:
    code = code_in(text) or cut_before(text, _AFTER_CODE)
    setup = entry.get("test_setup_code") or ""
    return passes("\n".join([setup, code, *entry["test_list"]]))


def _passes_check(entry: Entry, text: str) -> bool:
    # The prompt holds imports and helpers too; a whole function of the same name replaces its own.
    name = entry["entry_point"]
    whole = code_in(text, name)
    begins_with_body = text.lstrip("\r\n")[:1].isspace()
    defined = re.search(rf"^def {re.escape(name)}\b", text, re.MULTILINE)
    if whole is None and defined and not begins_with_body:
        whole = cut_before(text, _AFTER_CODE)
    body = cut_before(text, _AFTER_BODY) if whole is None else f"    pass\n\n{whole}"
    return passes(f"{entry['prompt']}{body}\n{entry['test']}\ncheck({name})\n")


def _with_tests(entry: Entry) -> str:
    tests = "\n".join(entry["test_list"])
    return f'"""\n{entry["text"]}\n{tests}\n"""\n'.replace("\r", "")


_Text = Annotated[str, Requirement("a text that is not empty", bool)]
_Answer = Annotated[
    str, Requirement("a text with a number", lambda text: answer_of(text) is not None)
]
_Setup = str | None
_Tests = Annotated[tuple[_Text, ...], Requirement("a list of tests", bool)]

TASKS: Mapping[str, JudgedTask] = {
    "gsm8k": JudgedTask(
        {"question": _Text, "answer": _Answer},
        lambda entry: entry["question"] + "\n",
        _is_right_number,
        runs_programs=False,
    ),
    "mbpp": JudgedTask(
        {"text": _Text, "test_list": _Tests, "test_setup_code": _Setup},
        _with_tests,
        _passes_tests,
    ),
    "humaneval": JudgedTask(
        dict.fromkeys(("prompt", "test", "entry_point"), _Text),
        lambda entry: entry["prompt"],
        _passes_check,
    ),
}


def read_task(
    name: str, path: str | Path, limit: int | None = None, shuffle_seed: int | None = None
) -> list[Question]:
    """Reads the questions of a task, as it is published.

    Args:
        name: of `TASKS`.
        path: JSON Lines, may be gzipped.
        limit: questions at most; `None` for all.
        shuffle_seed: shuffle before cutting to `limit`; `None` keeps the file's order.

    Raises:
        ValueError: the file is empty, or an entry has no field of the task, or another type there;
            or the system does not limit the processes that the task needs.
        OSError: it cannot be opened.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}.")
    task, questions = TASKS[name], []
    if task.runs_programs:
        check_limits()
    for where, entry in read_entries(path):
        missing = [
            field
            for field, hint in task.fields.items()
            if field not in entry and hint is not _Setup
        ]
        if missing:
            raise ValueError(f"{where}: has no {', '.join(missing)}, which {name} asks for.")
        for field, hint in task.fields.items():
            checked(f"{where}: {field}", entry.get(field), hint)
        questions.append(Question(task.prompt(entry), entry))
    if not questions:
        raise ValueError(f"{path} holds no questions.")
    if shuffle_seed is not None:
        Random(shuffle_seed).shuffle(questions)
    return questions[:limit]


class Answers(NamedTuple):
    """Number of right answers of each method.

    Attributes:
        task: its name.
        num_questions: that were decoded.
        right: answers that are right, by method.
        changed: answers that are judged otherwise than those of the first method, by method.
    """

    task: str
    num_questions: int
    right: Mapping[str, int]
    changed: Mapping[str, int]


def judged(
    name: str, questions: Sequence[Question], texts: Mapping[str, Sequence[str]]
) -> dict[str, list[bool]]:
    """Says of each method's texts whether they answer their questions.

    Programs run in their own processes. Equal texts are judged once: the time that a program takes
    may decide.
    """
    pairs = list(dict.fromkeys(pair for each in texts.values() for pair in enumerate(each)))

    def is_right(pair: tuple[int, str]) -> bool:
        index, text = pair
        return TASKS[name].is_right(questions[index].entry, text)

    with ThreadPoolExecutor(num_cores()) as pool:
        right = dict(zip(pairs, pool.map(is_right, pairs), strict=True))
    return {method: [right[pair] for pair in enumerate(each)] for method, each in texts.items()}


def answers_of(comparison: Comparison, name: str, questions: Sequence[Question]) -> Answers:
    """Judges what every method of a comparison wrote; prompt i was made of question i.

    Raises:
        ValueError: an output has no text.
    """
    asked = [questions[index] for index in comparison.prompt_indices]
    texts: dict[str, list[Any]] = {
        row.name: [getattr(sample.rows[0], "text", None) for sample in row.samples]
        for row in comparison.rows
    }
    if any(None in of_method for of_method in texts.values()):
        raise ValueError("comparison: outputs have no text to judge; the model needs a tokenizer.")
    verdicts = judged(name, asked, texts)
    plain = verdicts[comparison.plain.name]
    return Answers(
        name,
        len(asked),
        {method: sum(right) for method, right in verdicts.items()},
        {
            method: sum(ours != theirs for ours, theirs in zip(right, plain, strict=True))
            for method, right in verdicts.items()
        },
    )


def answers_table(answers: Answers) -> Table:
    """Returns a table for people."""
    table = Table(title=f"Answers to {answers.task}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
    baseline = next(iter(answers.right))
    for column in ("right", "share", f"judged otherwise than {baseline}"):
        table.add_column(column, justify="right")
    for method, right in answers.right.items():
        share = f"{right / answers.num_questions:.1%}"
        of_all = f"{right} of {answers.num_questions}"
        table.add_row(method, of_all, share, str(answers.changed[method]))
    return table
