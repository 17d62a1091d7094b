"""Aligning a diffusion model with the target that it is to draft for: DEER's two stages."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxspec.checkpoint import Model, load
from jaxspec.checkpoint.tokenizer import covers
from jaxspec.core.types import Params, PyTree
from jaxspec.drafters import Deer, LoadedDrafter
from jaxspec.models import ModelConfig, Network, param_shapes
from jaxspec.sharding import spread_rows
from jaxspec.training.answers import answers_of, answers_read
from jaxspec.training.decoding import decoding_of
from jaxspec.training.deer import Continuation, Refinement, separated
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.report import PALM_FLOPS, Recipe
from jaxspec.training.run import (
    Task,
    as_stored,
    claim,
    load_target,
    pack_sources,
    prepare,
    read_sources,
    train,
    write,
    write_model,
)
from jaxspec.training.settings import TARGET, DeerTrainingSettings
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
    run = prepare(settings, state_folder, out, num_devices, command, console)
    model, tokenizer = load_target(run)
    start = _first_network(settings, load(settings.start_from, dtype="float32"), model)
    objective = partial(_objective, settings, start.config)
    objective(settings.dtype)  # says now what does not fit the drafter
    claim(run)
    sources = pack_sources(run, tokenizer, read_sources(run))
    # A drafter of blocks is always shown whole ones.
    diffusion = start.config.diffusion
    assert diffusion is not None  # checked with the drafter
    corpus = answers_of(run, model, sources, diffusion.block or 1, diffusion.mask_token_id)

    task = Task(
        objective,
        evaluation=lambda dtype: objective(dtype).measured,
        first_params=lambda: jax.tree.map(jnp.copy, start.params),
        num_params=sum(leaf.size for leaf in jax.tree.leaves(param_shapes(start.config))),
        as_batch=lambda rows: spread_rows(run.mesh, rows),
        flops_per_token=_copies(settings) * flops_per_token(start.config, settings.sequence_length),
        decode=decoding_of(
            model,
            sources.validation,
            settings.decoding_prompts,
            settings.seed,
            lambda params: _drafter(settings, start.config, model, params),
        ),
    )
    outcome = train(run, task, corpus)
    aligned = Aligned(Network(outcome.params, start.config), outcome.metrics)
    save = partial(write_model, network=aligned.network, tokenizer=tokenizer)
    write(run, outcome, save, _recipe, "nats per hidden token")
    return aligned


def _first_network(settings: DeerTrainingSettings, start: Model, target: Model) -> Network:
    """What to align, once it is known that it can draft for the target.

    Raises:
        ValueError: saying what does not fit.
    """
    config = start.config
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
    theirs, ours = start.tokenizer, target.tokenizer
    if theirs is not None and ours is not None and not covers(theirs, ours):
        raise ValueError(
            f"start_from ({settings.start_from}) has another tokenizer than the target, so its "
            "tokens mean something else: start from a model that shares it."
        )
    if settings.sequence_length > config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the drafter's positions ({config.max_positions}), "
            f"got {settings.sequence_length}."
        )
    separator = RESERVED.index(SEPARATOR) if separated(config, settings.separator) else None
    trained = {"separator": separator}
    if settings.stage == 2:
        trained["window"] = settings.longest
    config = config.replace(diffusion=dataclasses.replace(config.diffusion, **trained))
    network = Network(start.params, config)
    # What validation decodes with, now and not after the first updates.
    _method(settings, config).check_fit(Params(target.network, network))
    return network


def _objective(
    settings: DeerTrainingSettings, config: ModelConfig, dtype: str
) -> Continuation | Refinement:
    """What is trained for."""
    if settings.stage == 1:
        return Continuation(config, settings.separator, dtype)
    return Refinement(
        config,
        settings.longest,
        settings.alpha,
        settings.normalise,
        settings.separator,
        dtype,
        settings.cuts,
    )


def _copies(settings: DeerTrainingSettings) -> int:
    """Of each row in a pass, see `Refinement.cuts`."""
    return 2 if settings.cuts == "all" else 1


def _method(settings: DeerTrainingSettings, config: ModelConfig) -> Deer:
    assert config.diffusion is not None  # checked before
    return Deer(settings.block, sep_token_id=config.diffusion.separator)


def _drafter(
    settings: DeerTrainingSettings, config: ModelConfig, target: Model, params: PyTree
) -> LoadedDrafter:
    """The drafter of weights as its folder holds them."""
    network = Network(as_stored(params, target.network), config)
    return LoadedDrafter(_method(settings, config), network, target.tokenizer)


def _recipe(
    settings: DeerTrainingSettings, sha256: Mapping[str, str], metrics: Mapping[str, Any]
) -> Recipe:
    stage = (
        "I, continuation distillation"
        if settings.stage == 1
        else f"II, refinement (the last 1 to {settings.longest} slots hidden, alpha "
        f"{settings.alpha:g}, {'' if settings.normalise else 'not '}normalised, "
        f"{'one cut' if settings.cuts == 'one' else 'cuts throughout'} of each answer)"
    )
    return Recipe(
        cost=PALM_FLOPS
        + (", twice, for a hidden and a clean copy of each row" if _copies(settings) > 1 else ""),
        about=f"A drafter of blocks (DEER) for the target in `{settings.target}`, whose files "
        f"have the SHA-256 `{sha256[TARGET]}`, from the diffusion model in "
        f"`{settings.start_from}` (`{sha256['start_from']}`). Stage {stage}.",
        read=[answers_read(settings, sha256)],
        held_out="answers",
        meaning="nats: cross-entropy of a hidden token. top1: share of them that were the most "
        "likely one.",
        drafts=f"blocks of {settings.block} tokens",
    )
