"""Aligning a diffusion model with the target that it is to draft for: DEER's two stages."""

import dataclasses
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxspec.checkpoint import Model, load
from jaxspec.checkpoint.files import replacing_files
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.core.types import PyTree
from jaxspec.drafters import Deer, LoadedDrafter
from jaxspec.models import ModelConfig, Network, param_shapes
from jaxspec.sharding import spread_rows
from jaxspec.training.data import Answers, Sequences, fingerprint, pack_answers, read_source
from jaxspec.training.decoding import decoding_of
from jaxspec.training.deer import Continuation, Refinement
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.loop import History
from jaxspec.training.own_text import (
    PROMPTS_PER_PART,
    OwnText,
    Written,
    read_own_text,
    write_own_text,
)
from jaxspec.training.report import draw_losses, write_deer_recipe
from jaxspec.training.run import (
    Corpus,
    Task,
    claim,
    model_fingerprint,
    pack_sources,
    prepare_devices,
    train,
    write_model,
)
from jaxspec.training.settings import OWN_TEXT, DeerTrainingSettings
from jaxspec.training.tokenizer import (
    RESERVED,
    SEPARATOR,
    check_tokenizer,
    stop_ids,
)

_STORED = jnp.bfloat16
_HELD_OUT = 20


class Aligned(NamedTuple):
    """What a run gave.

    metrics: figures of the run and, under "validation", of the held-out answers and of decoding.
    """

    network: Network
    metrics: dict[str, Any]


def train_deer(
    settings: DeerTrainingSettings,
    state_folder: Path,
    out: Path | None = None,
    *,
    num_devices: int | None = None,
    command: str = "",
    console: Console | None = None,
) -> Aligned:
    """Runs one stage of an alignment, or goes on with one that was interrupted.

    Args:
        settings: which drafter, for which target, which stage.
        state_folder: holds all that a run needs to go on, see `train_lm`.
        out: folder for the drafter; None: nothing written.
        num_devices: how many of this process's devices share every batch; None: all.
        command: how a person would repeat the run, for `recipe.md`.
        console: where progress goes; standard error unless given.

    Raises:
        ValueError: for a drafter that does not fit the target, answers that cannot be read, a state
            folder of another run, or batches that cannot be divided among the devices.
        DivergedError: when the loss is no longer finite.
    """
    console = console or Console(stderr=True)
    mesh = prepare_devices(settings, out, num_devices)
    fingerprints = {source.name: fingerprint(source) for source in settings.sources}
    fingerprints |= {
        name: model_fingerprint(name, folder) for name, folder in settings.models_read.items()
    }
    if settings.answers is not None:
        with open(settings.answers, "rb") as file:
            fingerprints["answers"] = hashlib.file_digest(file, "sha256").hexdigest()
    model = load(settings.target)
    start = load_network(Path(settings.start_from), "float32")
    check_drafter_of(start.config, model, settings)
    if settings.stage == 2:
        start = Network(start.params, _with_window(start.config, settings.longest))
    claim(state_folder, settings, fingerprints)
    assert model.tokenizer is not None  # checked above
    with console.status("reading and packing text"):
        parts = [read_source(source) for source in settings.sources]
        sources = pack_sources(settings, model.tokenizer.backend, parts)
    texts = _answers(model, sources, settings, state_folder, console)
    packed = (
        pack_answers(
            [text.tokens for text in part],
            [text.prompt_size for text in part],
            settings.sequence_length,
        )
        for part in texts
    )
    learned, held_out = packed
    corpus = Corpus[Answers]({OWN_TEXT: learned}, {OWN_TEXT: held_out}, {OWN_TEXT: 1.0})

    objective = partial(_objective, settings, start.config)
    task = Task(
        objective,
        evaluation=lambda dtype: objective(dtype).measured,
        first_params=lambda: jax.tree.map(jnp.copy, start.params),
        num_params=sum(leaf.size for leaf in jax.tree.leaves(param_shapes(start.config))),
        as_batch=lambda rows: spread_rows(mesh, rows),
        flops_per_token=flops_per_token(start.config, settings.sequence_length),
        decode=decoding_of(
            model,
            sources.validation,
            settings.decoding_prompts,
            settings.seed,
            lambda params: _drafter(settings, start.config, model, params),
        ),
    )
    outcome = train(task, corpus, settings, state_folder, mesh, console)
    aligned = Aligned(Network(outcome.params, start.config), outcome.metrics)
    if out is not None:
        settings = dataclasses.replace(settings, dtype=outcome.dtype)
        _write(aligned, model, settings, fingerprints, outcome.history, out, command)
        console.print(f"saved {out}", highlight=False, soft_wrap=True)
    return aligned


def check_drafter_of(config: ModelConfig, target: Model, settings: DeerTrainingSettings) -> None:
    """Refuses a drafter that cannot draft for a target.

    Raises:
        ValueError: saying what does not fit.
    """
    if target.tokenizer is None:
        raise ValueError(f"The target in {settings.target} must have a tokenizer.json.")
    check_tokenizer(target.tokenizer.backend, settings.target)
    if target.config.diffusion is not None:
        raise ValueError(
            f"target must be a causal model, but {settings.target} is a diffusion one."
        )
    if config.diffusion is None:
        raise ValueError(
            f"start_from must be a diffusion model, whose config.json has a mask_token_id, but "
            f"{settings.start_from} is a causal one: convert it first (jaxspec train masked)."
        )
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"start_from ({settings.start_from}) has a vocabulary of {config.vocab_size}, the "
            f"target one of {target.vocab_size}: they must share a tokenizer."
        )
    if settings.sequence_length > config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the drafter's positions ({config.max_positions}), "
            f"got {settings.sequence_length}."
        )


def _with_window(config: ModelConfig, longest: int) -> ModelConfig:
    """The config of a drafter that is trained to fill in so many slots behind a text at most."""
    assert config.diffusion is not None  # checked by the caller
    return config.replace(diffusion=dataclasses.replace(config.diffusion, window=longest))


def read_answers(path: str, model: Model) -> OwnText:
    """Prompts with a target's answers, from a file; the last of every twenty is held out.

    Args:
        path: JSON Lines, each with "prompt" and "answer", texts.
        model: whose tokenizer reads them.

    Raises:
        ValueError: naming the lines that are wrong.
    """
    assert model.tokenizer is not None  # checked by the caller
    texts: list[Written] = []
    wrong: list[str] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            pair = _prompt_and_answer(line)
            if pair is None:
                wrong.append(str(number))
                continue
            beginning = model.tokenizer.encode(pair[0])
            rest = model.tokenizer.backend.encode(pair[1], add_special_tokens=False).ids
            tokens = np.asarray([*beginning, *rest, stop_ids()[0]], np.int32)
            texts.append(Written(tokens, len(beginning)))
    if wrong:
        raise ValueError(
            f"answers: {path} must hold a prompt and an answer that is not empty in every line; "
            f"lines {', '.join(wrong[:10])}{' and more' if len(wrong) > 10 else ''} do not."
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


def _prompt_and_answer(line: str) -> tuple[str, str] | None:
    """What a line of a file of answers holds; None where it is not as it should be."""
    try:
        record = json.loads(line)
        prompt, answer = record["prompt"], record["answer"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return None
    whole = isinstance(prompt, str) and isinstance(answer, str) and answer.strip()
    return (prompt, answer) if whole else None


def _answers(
    model: Model,
    sources: Corpus[Sequences],
    settings: DeerTrainingSettings,
    state_folder: Path,
    console: Console,
) -> OwnText:
    if settings.answers is not None:
        return read_answers(settings.answers, model)
    folder = state_folder / "own_text" if settings.texts is None else Path(settings.texts)
    rows = sources.batches(PROMPTS_PER_PART, settings.seed)
    write_own_text(model, rows, settings.own_text, folder, console)
    return read_own_text(folder, settings.own_text)


def _separated(settings: DeerTrainingSettings, config: ModelConfig) -> bool:
    assert config.diffusion is not None  # checked with the drafter
    return config.diffusion.block is None if settings.separator is None else settings.separator


def _objective(
    settings: DeerTrainingSettings, config: ModelConfig, dtype: str
) -> Continuation | Refinement:
    """What is trained for."""
    separator = _separated(settings, config)
    if settings.stage == 1:
        return Continuation(config, separator, dtype)
    return Refinement(
        config, settings.longest, settings.alpha, settings.normalise, separator, dtype
    )


def _drafter(
    settings: DeerTrainingSettings, config: ModelConfig, target: Model, params: PyTree
) -> LoadedDrafter:
    """The drafter of weights as its folder holds them, on the target's one device."""
    (device,) = jax.tree.leaves(target.network.params)[0].devices()
    params = jax.device_put(params, device)
    stored = jax.tree.map(lambda leaf: leaf.astype(_STORED).astype(target.network.dtype), params)
    sep = RESERVED.index(SEPARATOR) if _separated(settings, config) else None
    drafter = Deer(settings.block, sep_token_id=sep)
    return LoadedDrafter(drafter, Network(stored, config), target.tokenizer)


def _write(
    aligned: Aligned,
    target: Model,
    settings: DeerTrainingSettings,
    fingerprints: dict[str, str],
    history: History,
    out: Path,
    command: str,
) -> None:
    assert target.tokenizer is not None  # checked before training
    with replacing_files(out) as staging:
        write_model(staging, aligned.network, target.tokenizer.backend, settings, aligned.metrics)
        write_deer_recipe(staging / "recipe.md", settings, fingerprints, aligned.metrics, command)
        draw_losses(staging / "losses.png", history.records, label="nats per hidden token")
