"""Texts that a model generates, to train on: on-policy text of a target, answers to prompts.

A target decodes text that it generated, not that of a corpus. Learning from a teacher's text is
sequence-level distillation (Kim and Rush 2016); DistillSpec (Zhou et al. 2024) compares it with
other texts for draft models.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import (
    parse_json,
    read_json,
    read_lines,
    recover_files,
    replacing_files,
    write_json,
)
from jaxspec.decoding.denoise import DenoiseConfig, denoise
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig
from jaxspec.models import Diffusion
from jaxspec.progress import progress_bar
from jaxspec.training.data import Batches, Corpus, Sequences, pack, pack_answers
from jaxspec.training.settings import OWN_TEXT, TARGET, AnswersSettings, RunSettings
from jaxspec.training.train import Run
from jaxspec.training.vocabulary import TrainingVocabulary

MAX_NEW_TOKENS = 128
PROMPTS_PER_PART = 32
_HELD_OUT = 20  # one answer of twenty, or one pair of texts
_FEWEST_PROMPT_TOKENS = 8
_TEMPERATURES = (0.0, 1.0)
_BLOCK = 8
"""Block of diffusion models that see the whole text; any block would do for them."""


class GeneratedText(NamedTuple):
    """Tokens of a prompt and of its continuation by a model.

    Attributes:
        tokens: the prompt, then the continuation.
        prompt_size: number of tokens of the prompt.
    """

    tokens: Int[np.ndarray, " tokens"]
    prompt_size: int


class GeneratedTexts(NamedTuple):
    """Texts by a model, to learn from and held out."""

    train: list[GeneratedText]
    validation: list[GeneratedText]


def write_texts(model: Model, rows: Batches, count: int, folder: Path) -> None:
    """Lets a model continue the beginnings of documents, half greedily, half at temperature 1.

    A diffusion model continues all of them greedily: it learns from its own decisions, those that
    its drafts are checked against.

    The texts lie in `folder`, several in each `.jsonl` file, with the tokens as they were
    generated: decoding and encoding again may give others. Files that exist are kept, so an
    interrupted call resumes and ends with the same texts.

    Args:
        model: a causal or a diffusion model.
        rows: draws packed documents, in batches of `PROMPTS_PER_PART`.
        count: number of texts.
        folder: folder of the texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover_files(folder)
    paths = _paths(folder, count)
    missing = [part for part, path in enumerate(paths) if not path.exists()]
    with progress_bar(len(missing)) as advance:
        for part in missing:
            advance("texts of the model")
            texts = _texts(model, rows, part)[: count - part * PROMPTS_PER_PART]
            with replacing_files(folder) as staging:
                (staging / paths[part].name).write_text("".join(texts), encoding="utf-8")


def read_texts(folder: Path, count: int) -> GeneratedTexts:
    """Returns the first `count` texts that `write_texts` wrote; one pair in twenty is held out.

    Raises:
        ValueError: there are fewer, because fewer were asked for when they were written.
    """
    records = [parse_json(line) for path in _paths(folder, count) for _, line in read_lines(path)]
    if len(records) < count:
        raise ValueError(
            f"own_text: {folder} holds {len(records)} texts, and {count} are asked for: ask for as "
            "many as it holds, or name another folder."
        )
    texts = [
        GeneratedText(np.asarray(record["tokens"], np.int32), record["prompt_tokens"])
        for record in records[:count]
    ]
    # In pairs, since greedy and sampled texts alternate.
    return _divided(texts, lambda index: index // 2 % _HELD_OUT == _HELD_OUT - 1)


def _divided(texts: list[GeneratedText], is_held_out: Callable[[int], bool]) -> GeneratedTexts:
    parts: tuple[list[GeneratedText], list[GeneratedText]] = [], []
    for index, text in enumerate(texts):
        parts[is_held_out(index)].append(text)
    return GeneratedTexts(*parts)


def _paths(folder: Path, count: int) -> list[Path]:
    parts = -(-count // PROMPTS_PER_PART)
    return [folder / f"{part:05d}.jsonl" for part in range(parts)]


def _texts(model: Model, rows: Batches, part: int) -> list[str]:
    """Returns the lines of one file, which depend on the seed and the part alone."""
    rng = np.random.default_rng((rows.seed, 2, part))
    packed = rows(part)
    prompts, new_tokens = beginnings(packed, model.config.max_positions, rng)
    seed = int(rng.integers(1 << 31))
    if model.config.diffusion is None:
        temperatures = [_TEMPERATURES[index % 2] for index in range(len(prompts))]
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            temperature=temperatures,
            # A mask may be among the ids past the tokenizer's, and a text holds none.
            tokenizer_ids_only=model.tokenizer is not None,
        )
        result = generate(model, prompts, config, seed=seed)
    else:
        temperatures = [0.0] * len(prompts)
        result = denoise(model, prompts, _filling_in(model.config.diffusion, new_tokens))
    return [
        json.dumps(
            {
                "prompt_tokens": len(prompt),
                "temperature": temperature,
                "tokens": [*prompt.tolist(), *row.tokens.tolist()],
                "text": row.text,
            },
            ensure_ascii=False,
        )
        + "\n"
        for prompt, temperature, row in zip(prompts, temperatures, result, strict=True)
    ]


def _filling_in(diffusion: Diffusion, new_tokens: int) -> DenoiseConfig:
    """Returns the settings of greedy stepwise decoding of at most `new_tokens`, in whole blocks."""
    block = min(diffusion.block or _BLOCK, new_tokens)
    return DenoiseConfig(new_tokens - new_tokens % block, block)


def pack_generated(run: Run[RunSettings], corpus: Corpus, model: Model, weight: float) -> Corpus:
    """Returns a corpus of a model's texts, which continue documents of another corpus."""
    settings, folder = run.settings, run.state_folder / "own_text"
    rows = corpus.batches(PROMPTS_PER_PART, settings.seed)
    write_texts(model, rows, settings.own_text, folder)
    train, validation = (
        pack([text.tokens for text in part], settings.sequence_length)
        for part in read_texts(folder, settings.own_text)
    )
    return Corpus({OWN_TEXT: train}, {OWN_TEXT: validation}, {OWN_TEXT: weight})


def beginnings(
    packed: Sequences, max_positions: int, rng: np.random.Generator
) -> tuple[list[Int[np.ndarray, " tokens"]], int]:
    """Returns beginnings of documents, one of every row, and the length of continuations."""
    context = min(packed.tokens.shape[1], max_positions)
    new_tokens = min(MAX_NEW_TOKENS, context // 2)
    return list(_prompts(packed, context - new_tokens, rng)), new_tokens


def _prompts(
    packed: Sequences, longest: int, rng: np.random.Generator
) -> Iterator[Int[np.ndarray, " tokens"]]:
    """Yields a document's beginning from every row, without its last token if it has others."""
    for tokens, segments in zip(packed.tokens, packed.segments, strict=True):
        sizes = np.bincount(segments)[1:]  # 0 is padding
        # Single tokens, the rests of documents that were cut, say too little.
        segment = 1 + rng.choice(np.flatnonzero(sizes > min(1, sizes.max() - 1)))
        most = max(1, min(sizes[segment - 1] - 1, longest))
        size = rng.integers(min(_FEWEST_PROMPT_TOKENS, most), most, endpoint=True)
        yield tokens[segments == segment][:size]


def answers_of(
    run: Run[AnswersSettings],
    target: Model,
    sources: Corpus,
    block: int = 1,
    filler: int = 0,
) -> Corpus:
    """Returns prompts with the target's answers in rows of tokens: from a file, or written now.

    Args:
        run: the run.
        target: the model that answers.
        sources: documents whose beginnings are the prompts.
        block: tokens of the drafter's blocks; see `pack_answers`.
        filler: token that fills documents to whole blocks.

    Raises:
        ValueError: the file of answers cannot be used, and its wrong lines are named; or the texts
            in a common folder are another target's, or too few.
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
        write_texts(target, rows, settings.own_text, folder)
        texts = read_texts(folder, settings.own_text)
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
    """Notes whose texts lie in a folder that runs share, or checks that they are the target's."""
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
    """Returns the paragraph of a recipe about the answers that a drafter learned from."""
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


def read_answers(path: str, model: Model, length: int) -> GeneratedTexts:
    """Reads prompts with a target's answers from a file; the last of every twenty is held out.

    Args:
        path: JSON Lines, each with the texts "prompt" and "answer".
        model: the model whose tokenizer reads them.
        length: length of a row, in which a prompt must leave space for its answer.

    Raises:
        ValueError: naming the wrong lines.
    """
    assert model.tokenizer is not None  # checked by the caller
    end = TrainingVocabulary.of_model(model, model.name).end
    texts: list[GeneratedText] = []
    wrong: list[str] = []
    too_long: list[str] = []
    for number, line in read_lines(Path(path)):
        pair = _prompt_and_answer(line)
        if pair is None:
            wrong.append(str(number))
            continue
        beginning = model.tokenizer.encode(pair[0])
        rest = model.tokenizer.encode(pair[1], special_tokens=False)
        if len(beginning) >= length:
            too_long.append(str(number))
            continue
        tokens = np.asarray([*beginning, *rest, end], np.int32)
        texts.append(GeneratedText(tokens, len(beginning)))
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
    last = len(texts) - 1
    return _divided(texts, lambda index: index % _HELD_OUT == _HELD_OUT - 1 or index == last)


def _first_of(lines: list[str]) -> str:
    return ", ".join(lines[:10]) + (" and more" if len(lines) > 10 else "")


def _prompt_and_answer(line: bytes) -> tuple[str, str] | None:
    """Returns the prompt and the answer of a line, or `None` if it is malformed."""
    try:
        record = parse_json(line)
        prompt, answer = record["prompt"], record["answer"]
        (prompt + answer).encode()  # half a surrogate pair is no text
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = isinstance(prompt, str) and isinstance(answer, str) and answer.strip()
    return (prompt, answer) if whole else None
