"""Aligning a diffusion model with the target that it is to draft for: DEER's two stages."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import replacing_files
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.core.types import PyTree
from jaxspec.drafters import Deer, LoadedDrafter
from jaxspec.models import ModelConfig, Network, param_shapes
from jaxspec.sharding import spread_rows
from jaxspec.training.answers import answers_fingerprint, answers_of
from jaxspec.training.data import read_source
from jaxspec.training.decoding import decoding_of
from jaxspec.training.deer import Continuation, Refinement
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.loop import History
from jaxspec.training.report import draw_losses, write_deer_recipe
from jaxspec.training.run import (
    Task,
    as_stored,
    claim,
    fingerprints_of,
    load_target,
    pack_sources,
    prepare_devices,
    train,
    write_model,
)
from jaxspec.training.settings import DeerTrainingSettings
from jaxspec.training.tokenizer import RESERVED, SEPARATOR


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
    fingerprints = fingerprints_of(settings) | answers_fingerprint(settings)
    model, tokenizer = load_target(settings, out)
    start = load_network(Path(settings.start_from), "float32")
    check_drafter_of(start.config, model, settings)
    if settings.stage == 2:
        start = Network(start.params, _with_window(start.config, settings.longest))
    claim(state_folder, settings, fingerprints)
    with console.status("reading and packing text"):
        parts = [read_source(source) for source in settings.sources]
        sources = pack_sources(settings, tokenizer, parts)
    corpus = answers_of(model, sources, settings, state_folder, console)

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
        _write(aligned, tokenizer, settings, fingerprints, outcome.history, out, command)
        console.print(f"saved {out}", highlight=False, soft_wrap=True)
    return aligned


def check_drafter_of(config: ModelConfig, target: Model, settings: DeerTrainingSettings) -> None:
    """Refuses a drafter that cannot draft for a target.

    Raises:
        ValueError: saying what does not fit.
    """
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
    """The drafter of weights as its folder holds them."""
    stored = as_stored(params, target.network)
    sep = RESERVED.index(SEPARATOR) if _separated(settings, config) else None
    drafter = Deer(settings.block, sep_token_id=sep)
    return LoadedDrafter(drafter, Network(stored, config), target.tokenizer)


def _write(
    aligned: Aligned,
    tokenizer: Tokenizer,
    settings: DeerTrainingSettings,
    fingerprints: dict[str, str],
    history: History,
    out: Path,
    command: str,
) -> None:
    with replacing_files(out) as staging:
        write_model(staging, aligned.network, tokenizer, settings, aligned.metrics)
        write_deer_recipe(staging / "recipe.md", settings, fingerprints, aligned.metrics, command)
        draw_losses(staging / "losses.png", history.records, label="nats per hidden token")
