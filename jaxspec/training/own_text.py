"""Text that a teacher writes itself: what a draft model meets when it drafts for that teacher.

A target decodes its own text, not that of a corpus. Learning from what a teacher wrote is
sequence-level distillation (Kim and Rush 2016); DistillSpec (Zhou et al. 2024) compares it with
other texts for draft models.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from rich.console import Console

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import recover_files, replacing_files
from jaxspec.denoising import DenoiseConfig, denoise
from jaxspec.generation import GenerationConfig, generate
from jaxspec.models import Diffusion
from jaxspec.training.data import Batches, Sequences
from jaxspec.training.report import progress_bar

MAX_NEW_TOKENS = 128
PROMPTS_PER_PART = 32
_FEWEST_PROMPT_TOKENS = 8
_TEMPERATURES = (0.0, 1.0)
_BLOCK = 8
"""Of diffusion models that see both sides, which any block would do for."""


class Written(NamedTuple):
    """A text by a teacher: the tokens of a prompt and of what the teacher went on with.

    prompt_size: how many of them are the prompt's.
    """

    tokens: Int[np.ndarray, " tokens"]
    prompt_size: int


class OwnText(NamedTuple):
    """Texts by a teacher."""

    train: list[Written]
    validation: list[Written]


def write_own_text(
    teacher: Model, rows: Batches, count: int, folder: Path, console: Console
) -> None:
    """Lets a teacher continue the beginnings of documents, half greedily, half at temperature 1.

    A diffusion model continues all of them greedily: it learns from its own decisions, those that
    its drafts are checked against.

    The texts lie in `folder`, some in each `.jsonl` file, with the tokens as they were generated:
    decoding and encoding again may give others. Files that are there are kept, so a call that was
    interrupted goes on, and ends with the same texts.

    Args:
        teacher: who writes, a causal or a diffusion model.
        rows: draws packed documents, in batches of `PROMPTS_PER_PART`.
        count: how many texts.
        folder: where.
        console: where progress goes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover_files(folder)
    paths = _paths(folder, count)
    missing = [part for part, path in enumerate(paths) if not path.exists()]
    if not missing:
        return
    with progress_bar("the teacher's own text", console) as bar:
        task = bar.add_task("", total=len(paths), completed=len(paths) - len(missing))
        for part in missing:
            texts = _texts(teacher, rows, part)[: count - part * PROMPTS_PER_PART]
            with replacing_files(folder) as staging:
                (staging / paths[part].name).write_text("".join(texts), encoding="utf-8")
            bar.advance(task)
    console.print(f"the teacher wrote {count} texts: {folder}", highlight=False, soft_wrap=True)


def read_own_text(folder: Path, count: int) -> OwnText:
    """The first `count` texts that `write_own_text` wrote; of twenty pairs the last is held out.

    Raises:
        ValueError: there are fewer, since fewer were asked for when they were written.
    """
    records = [
        json.loads(line) for path in _paths(folder, count) for line in path.open(encoding="utf-8")
    ]
    if len(records) < count:
        raise ValueError(
            f"own_text: {folder} holds {len(records)} texts, and {count} are asked for: ask for as "
            "many as it holds, or name another folder."
        )
    texts = [
        Written(np.asarray(record["tokens"], np.int32), record["prompt_tokens"])
        for record in records[:count]
    ]
    # In pairs, since greedy and sampled texts alternate.
    held_out = [index // 2 % 20 == 19 for index in range(len(texts))]
    return OwnText(
        [text for text, out in zip(texts, held_out, strict=True) if not out],
        [text for text, out in zip(texts, held_out, strict=True) if out],
    )


def _paths(folder: Path, count: int) -> list[Path]:
    parts = -(-count // PROMPTS_PER_PART)
    return [folder / f"{part:05d}.jsonl" for part in range(parts)]


def _texts(teacher: Model, rows: Batches, part: int) -> list[str]:
    """The lines of one file; a matter of the seed and the part alone."""
    rng = np.random.default_rng((rows.seed, 2, part))
    packed = rows(part)
    prompts, new_tokens = beginnings(packed, teacher.config.max_positions, rng)
    seed = int(rng.integers(1 << 31))
    if teacher.config.diffusion is None:
        temperatures = [_TEMPERATURES[index % 2] for index in range(len(prompts))]
        config = GenerationConfig(max_new_tokens=new_tokens, temperature=temperatures)
        result = generate(teacher, prompts, config, seed=seed)
    else:
        temperatures = [0.0] * len(prompts)
        result = denoise(teacher, prompts, _filling_in(teacher.config.diffusion, new_tokens))
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
    """Stepwise decoding of at most so many tokens, in whole blocks, greedily."""
    block = min(diffusion.block or _BLOCK, new_tokens)
    return DenoiseConfig(new_tokens - new_tokens % block, block)


def beginnings(
    packed: Sequences, max_positions: int, rng: np.random.Generator
) -> tuple[list[Int[np.ndarray, " tokens"]], int]:
    """Beginnings of documents, one of every row, and how many tokens there is room for behind."""
    context = min(packed.tokens.shape[1], max_positions)
    new_tokens = min(MAX_NEW_TOKENS, context // 2)
    return list(_prompts(packed, context - new_tokens, rng)), new_tokens


def _prompts(
    packed: Sequences, longest: int, rng: np.random.Generator
) -> Iterator[Int[np.ndarray, " tokens"]]:
    """Of every row, the beginning of one document, its last token left off if it has others."""
    for tokens, segments in zip(packed.tokens, packed.segments, strict=True):
        sizes = np.bincount(segments)[1:]  # 0 is padding
        # Single tokens, what is left of documents that were cut, say too little.
        segment = 1 + rng.choice(np.flatnonzero(sizes > min(1, sizes.max() - 1)))
        most = max(1, min(sizes[segment - 1] - 1, longest))
        size = rng.integers(min(_FEWEST_PROMPT_TOKENS, most), most, endpoint=True)
        yield tokens[segments == segment][:size]
