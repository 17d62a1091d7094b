"""What drafters of blocks learn from: prompts with what their target answers."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import read_json, replacing_files, write_json
from jaxspec.training.data import Answers, Sequences, pack_answers
from jaxspec.training.own_text import (
    PROMPTS_PER_PART,
    OwnText,
    Written,
    read_own_text,
    write_own_text,
)
from jaxspec.training.run import Corpus, Run
from jaxspec.training.settings import OWN_TEXT, TARGET, AnswersSettings
from jaxspec.training.tokenizer import stop_ids

_HELD_OUT = 20


def answers_of(
    run: Run[AnswersSettings],
    target: Model,
    sources: Corpus[Sequences],
    block: int = 1,
    filler: int = 0,
) -> Corpus[Answers]:
    """Prompts with the target's answers in rows of tokens: from a file, or written now.

    Args:
        run: whose they are.
        target: who answers.
        sources: whose documents begin with the prompts.
        block: of the drafter's slots; see `pack_answers`.
        filler: the token that documents are filled with to whole blocks.

    Raises:
        ValueError: the file of answers cannot be used, and the lines that are wrong are named; or
            the texts in a shared folder are another target's, or too few.
    """
    settings = run.settings
    if settings.answers is not None:
        texts = read_answers(settings.answers, target, settings.sequence_length)
    else:
        folder = run.state_folder / "own_text"
        if settings.texts is not None:
            folder = Path(settings.texts)
            _claim_texts(folder, run)
        rows = sources.batches(PROMPTS_PER_PART, settings.seed)
        write_own_text(target, rows, settings.own_text, folder, run.console)
        texts = read_own_text(folder, settings.own_text)
    learned, held_out = (
        pack_answers(
            [text.tokens for text in part],
            [text.prompt_size for text in part],
            settings.sequence_length,
            block,
            filler,
        )
        for part in texts
    )
    return Corpus({OWN_TEXT: learned}, {OWN_TEXT: held_out}, {OWN_TEXT: 1.0})


def _claim_texts(folder: Path, run: Run[AnswersSettings]) -> None:
    """Writes down whose texts lie in a folder that runs share, or checks that they are these."""
    path, digest = folder / "target.json", run.sha256[TARGET]
    if not path.exists():
        with replacing_files(folder) as staging:
            write_json(staging / path.name, {"sha256": digest})
    elif read_json(path).get("sha256") != digest:
        raise ValueError(
            f"texts: those in {folder} are of another target than {run.settings.target}: name "
            "another folder."
        )


def answers_read(settings: AnswersSettings, sha256: Mapping[str, str]) -> str:
    """What recipes say of the answers that a drafter learned from."""
    if settings.answers is None:
        answers = (
            f"{settings.own_text:,} texts that the target wrote itself, half greedily and half at "
            "temperature 1, each from the beginning of a training document; one in twenty is held "
            "out"
        )
    else:
        answers = (
            f"the answers in `{settings.answers}`, whose SHA-256 is `{sha256['answers']}`; one in "
            "twenty is held out"
        )
    return f"What it learned from: {answers}. The sources gave prompts only."


def read_answers(path: str, model: Model, length: int) -> OwnText:
    """Prompts with a target's answers, from a file; the last of every twenty is held out.

    Args:
        path: JSON Lines, each with "prompt" and "answer", texts.
        model: whose tokenizer reads them.
        length: of a row, which a prompt must leave room in for its answer.

    Raises:
        ValueError: naming the lines that are wrong.
    """
    assert model.tokenizer is not None  # checked by the caller
    texts: list[Written] = []
    wrong: list[str] = []
    too_long: list[str] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            pair = _prompt_and_answer(line)
            if pair is None:
                wrong.append(str(number))
                continue
            beginning = model.tokenizer.encode(pair[0])
            rest = model.tokenizer.backend.encode(pair[1], add_special_tokens=False).ids
            if len(beginning) >= length:
                too_long.append(str(number))
                continue
            tokens = np.asarray([*beginning, *rest, stop_ids()[0]], np.int32)
            texts.append(Written(tokens, len(beginning)))
    if wrong:
        raise ValueError(
            f"answers: {path} must hold a prompt and an answer that is not empty in every line; "
            f"lines {_first_of(wrong)} do not."
        )
    if too_long:
        raise ValueError(
            f"answers: prompts of {length} tokens or more (sequence_length) leave no room for an "
            f"answer; lines {_first_of(too_long)} of {path} have such."
        )
    if len(texts) < 2:
        raise ValueError(f"answers: {path} must hold at least 2 answers, got {len(texts)}.")
    out = [
        index % _HELD_OUT == _HELD_OUT - 1 or index == len(texts) - 1 for index in range(len(texts))
    ]
    return OwnText(
        [text for text, held in zip(texts, out, strict=True) if not held],
        [text for text, held in zip(texts, out, strict=True) if held],
    )


def _first_of(lines: list[str]) -> str:
    return ", ".join(lines[:10]) + (" and more" if len(lines) > 10 else "")


def _prompt_and_answer(line: bytes) -> tuple[str, str] | None:
    """What a line of a file of answers holds; None where it is not as it should be."""
    try:
        record = json.loads(line)
        prompt, answer = record["prompt"], record["answer"]
        (prompt + answer).encode()  # half a surrogate pair is no text
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = isinstance(prompt, str) and isinstance(answer, str) and answer.strip()
    return (prompt, answer) if whole else None
