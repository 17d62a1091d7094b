"""Prompts of the suites, read from files of evaluation data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checkpoint import Model
from jaxspec.measure.prompts import read_entries

DATA_FOLDER = Path(__file__).resolve().parents[1] / "data" / "eval"
"""Folder of the evaluation sets; `python -m benchmarks.fetch` fills it."""


class PromptSet(NamedTuple):
    """Prompts of one category.

    Attributes:
        category: name of the category in figures.
        file: path below the data folder; one JSON object a line.
        template: makes the prompt from a row, in `str.format` style. It is the shape that the
            models saw in training, up to where the answer begins. A list in a field is written
            one entry a line.
        of: values of a row's field `category` that are taken; `()` takes all rows.
    """

    category: str
    file: str
    template: str
    of: tuple[str, ...] = ()


class SuitePrompt(NamedTuple):
    """A prompt and its `PromptSet.category`."""

    category: str
    text: str


# The groups of Spec-Bench (Xia et al. 2024), first turns; the first group is MT-Bench.
_CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_GROUPS = {
    "chat": _CHAT,
    "translation": ("translation",),
    "summarisation": ("summarization",),
    "questions": ("qa",),
    "mathematics": ("math_reasoning",),
    "retrieval": ("rag",),
}

GSM8K = PromptSet("GSM8K", "gsm8k/test.jsonl.gz", "{question}\n")
HUMANEVAL = PromptSet("HumanEval", "humaneval/HumanEval.jsonl.gz", "{prompt}")
MBPP = PromptSet("MBPP", "mbpp/test.jsonl.gz", '"""\n{text}\n{test_list}\n"""\n')
EAGLE_GSM8K = PromptSet("GSM8K", "eagle_prompts/gsm8k_question.jsonl.gz", "{turns[0]}\n")
"""The questions of EAGLE's own evaluation."""
SPEC_BENCH = tuple(
    PromptSet(name, "spec_bench/question.jsonl.gz", "{turns[0]}\n", of)
    for name, of in _GROUPS.items()
)
PROMPT_SETS = (GSM8K, HUMANEVAL, MBPP)


def read_prompt_set(group: PromptSet, data_folder: Path) -> list[SuitePrompt]:
    """Returns all prompts of a set, in the order of its file.

    Raises:
        ValueError: the file is missing, or a row lacks a field of the template.
    """
    path = data_folder / group.file
    if not path.is_file():
        raise ValueError(
            f"--data-folder {data_folder}: {group.file}, which {group.category} is read from, is "
            f"not there; `python -m benchmarks.fetch` fetches the evaluation sets into "
            f"{DATA_FOLDER.parent.name}/{DATA_FOLDER.name}."
        )
    return [
        SuitePrompt(group.category, _fill(group.template, row, where))
        for where, row in read_entries(path)
        if not group.of or row.get("category") in group.of
    ]


def first_that_fit(
    prompts: Sequence[SuitePrompt], model: Model, room: int, count: int
) -> list[SuitePrompt]:
    """Returns the first `count` prompts that leave `room` tokens of the context, or all there are.

    Longer prompts are passed over.

    Raises:
        ValueError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"{model.name} has no tokenizer to read the prompts with; put the model's "
            "tokenizer.json into its folder, or give `jaxspec bench` a file of token ids."
        )
    longest = model.config.max_positions - room
    fitting = (each for each in prompts if len(model.tokenizer.encode(each.text)) <= longest)
    return [prompt for prompt, _ in zip(fitting, range(count), strict=False)]


class _Lines(list[Any]):
    """A list that is written one entry a line; `{name[0]}` in a template is one entry."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    fields = {
        name: _Lines(value) if isinstance(value, list) else value for name, value in row.items()
    }
    try:
        text = template.format(**fields)
    except KeyError as error:
        raise ValueError(
            f"{where}: has no field {error}, which the prompt is made of, only "
            f"{', '.join(map(repr, row))}."
        ) from error
    # Lines end here as they did in training.
    return text.replace("\r\n", "\n").replace("\r", "\n")
