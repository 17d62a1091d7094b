"""Training a language model, or a draft model after it: files in, a checkpoint folder out."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.checkpoint import load
from jaxspec.checkpoint.files import replacing_files
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.checkpoint.tokenizer import load_tokenizer
from jaxspec.core.types import PyTree
from jaxspec.models import ModelConfig, Network, init_params, param_shapes
from jaxspec.sharding import on_every_device, spread_rows
from jaxspec.training.data import Sequences, document_texts
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.lm import NextToken, SoftLabels, Taught
from jaxspec.training.report import (
    HOW_TO_ASK,
    OWN_TEXT_OF_TEACHER,
    PALM_FLOPS,
    Recipe,
    models_read,
    own_text,
)
from jaxspec.training.run import (
    Task,
    claim,
    pack_own_text,
    pack_sources,
    prepare,
    read_sources,
    train,
    write,
    write_model,
)
from jaxspec.training.settings import LMTrainingSettings
from jaxspec.training.tokenizer import (
    check_tokenizer,
    train_tokenizer,
)


class Trained(NamedTuple):
    """What a run gave.

    metrics: figures of the run and, under "validation", by source.
    """

    network: Network
    tokenizer: Tokenizer
    metrics: dict[str, Any]


def train_lm(
    settings: LMTrainingSettings,
    state_folder: Path,
    out: Path | None = None,
    *,
    num_devices: int | None = None,
    command: str = "",
    console: Console | None = None,
) -> Trained:
    """Trains a model, or goes on with a run that was interrupted.

    Args:
        settings: what to train, on what.
        state_folder: holds all that a run needs to go on; a call with the same settings and folder
            resumes. One folder, one run, though its length may change: see
            `OptimizerSettings.decay_fraction`.
        out: folder for the finished checkpoint, in the Hugging Face layout; None: nothing written.
        num_devices: how many of this process's devices share every batch; None: all. Figures and
            weights do not depend on it but for rounding, and it may change when a run goes on.
        command: how a person would repeat the run, for `recipe.md`.
        console: where progress goes; standard error unless given.

    Raises:
        ValueError: for data that cannot be read, a state folder of another run, or batches that
            cannot be divided among the devices.
        DivergedError: when the loss is no longer finite.
    """
    run = prepare(settings, state_folder, out, num_devices, command, console)
    teacher = None if settings.teacher is None else load_network(Path(settings.teacher))
    teacher = jax.device_put(teacher, on_every_device(run.mesh))
    claim(run)
    parts = read_sources(run)
    tokenizer = _tokenizer(settings, state_folder, parts)
    corpus = pack_sources(run, tokenizer, parts)
    config = settings.model.replace(vocab_size=tokenizer.get_vocab_size())
    if teacher is not None and teacher.vocab_size != config.vocab_size:
        raise ValueError(
            f"The teacher in {settings.teacher} has a vocabulary of {teacher.vocab_size}, the "
            f"tokenizer one of {config.vocab_size}: they must be the same."
        )
    if settings.own_text:
        assert settings.teacher is not None
        corpus |= pack_own_text(run, corpus, load(settings.teacher), settings.own_text_weight)

    def as_batch(sequences: Sequences) -> Sequences | Taught:
        spread = spread_rows(run.mesh, sequences)
        return spread if teacher is None else Taught(spread, teacher)

    objective = partial(_objective, settings, config, teacher)
    task = Task(
        objective,
        evaluation=lambda dtype: objective(dtype).whole,
        first_params=partial(_first_params, settings, config),
        num_params=sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config))),
        as_batch=as_batch,
        flops_per_token=_flops_per_token(settings, config, teacher),
    )
    outcome = train(run, task, corpus)
    trained = Trained(Network(outcome.params, config), tokenizer, outcome.metrics)
    save = partial(write_model, network=trained.network, tokenizer=tokenizer)
    write(run, outcome, save, _recipe, "nats per token")
    return trained


def _tokenizer(settings: LMTrainingSettings, state_folder: Path, parts) -> Tokenizer:
    given = settings.tokenizer or settings.teacher or settings.start_from
    if given is not None:
        tokenizer = load_tokenizer(given).backend
        check_tokenizer(tokenizer, given)
        return tokenizer
    path = state_folder / "tokenizer.json"
    if not path.exists():
        texts = (
            text
            for source, part in zip(settings.sources, parts, strict=True)
            for _ in range(max(1, round(source.weight)))
            for text in document_texts(part.train)
        )
        tokenizer = train_tokenizer(texts, settings.model.vocab_size)
        with replacing_files(state_folder) as staging:
            tokenizer.save(str(staging / path.name))
    return Tokenizer.from_file(str(path))


def _objective(
    settings: LMTrainingSettings, config: ModelConfig, teacher: Network | None, dtype: str
) -> NextToken | SoftLabels:
    """What is trained for."""
    student = NextToken(config, settings.layer_drop, settings.early_exit, dtype)
    if teacher is None:
        return student
    return SoftLabels(student, settings.soft_share)


def _first_params(settings: LMTrainingSettings, config: ModelConfig) -> PyTree:
    if settings.start_from is None:
        return init_params(config, jax.random.key(settings.seed))
    network = load_network(Path(settings.start_from), "float32")
    if network.config != config:
        raise ValueError(
            f"The weights of start_from ({settings.start_from}) are of {network.config}, but the "
            f"model to train is {config}: make them equal."
        )
    return network.params


def _flops_per_token(
    settings: LMTrainingSettings, config: ModelConfig, teacher: Network | None
) -> float:
    flops = flops_per_token(config, settings.sequence_length)
    if teacher is not None:  # which only looks: the forward third
        flops += flops_per_token(teacher.config, settings.sequence_length) / 3
    return flops


def _recipe(
    settings: LMTrainingSettings, sha256: Mapping[str, str], metrics: Mapping[str, Any]
) -> Recipe:
    names = {name for figures in metrics["validation"].values() for name in figures}
    agreement = (
        " agreement: share of tokens where the teacher's most likely token is this model's too."
    )
    return Recipe(
        cost=PALM_FLOPS + (", and the teacher's forward pass" if settings.teacher else ""),
        meaning="nats: cross-entropy per token. top1: share of tokens that were the most likely "
        "one." + (agreement if "agreement" in names else ""),
        read=(
            *models_read(settings, sha256),
            *own_text(settings, metrics, OWN_TEXT_OF_TEACHER, settings.own_text_weight),
            HOW_TO_ASK,
        ),
    )
