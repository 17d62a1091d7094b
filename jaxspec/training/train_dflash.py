"""Training a DFlash head for a target: files in, a folder that `load_dflash` reads out."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxspec.checkpoint import Model, save_dflash
from jaxspec.checkpoint.files import replacing_files
from jaxspec.drafters import DFlash
from jaxspec.models import DFlashHead, ModelConfig, Network, dflash_taps, init_dflash_params
from jaxspec.sharding import on_every_device, spread_rows
from jaxspec.training.answers import answers_fingerprint, answers_of
from jaxspec.training.data import Answers, SeenAnswers, Sequences, read_source
from jaxspec.training.decoding import decoding_of
from jaxspec.training.dflash import AnchoredBlocks, Answered
from jaxspec.training.efficiency import block_flops_per_token
from jaxspec.training.features import TargetStates, target_states, with_states
from jaxspec.training.head import check_length, check_taps, head_config
from jaxspec.training.loop import History
from jaxspec.training.report import draw_losses, write_dflash_recipe
from jaxspec.training.run import (
    STORED,
    Task,
    as_stored,
    claim,
    fingerprints_of,
    load_target,
    pack_sources,
    prepare_devices,
    train,
    write_figures,
)
from jaxspec.training.settings import DFlashTrainingSettings
from jaxspec.training.tokenizer import MASK, RESERVED


class TrainedBlocks(NamedTuple):
    """What a run gave.

    metrics: figures of the run and, under "validation", of the held-out answers and of decoding.
    """

    head: DFlashHead
    metrics: dict[str, Any]


def train_dflash(
    settings: DFlashTrainingSettings,
    state_folder: Path,
    out: Path | None = None,
    *,
    num_devices: int | None = None,
    command: str = "",
    console: Console | None = None,
) -> TrainedBlocks:
    """Trains a DFlash head, or goes on with a run that was interrupted.

    Each validation also decodes held-out beginnings greedily with the head, in drafts of
    `settings.block` - 1 tokens, by `jaxspec.generate`: `tau_with_bonus` counts tokens per target
    pass, the bonus token included.

    Args:
        settings: which head, for which target, on what.
        state_folder: holds all that a run needs to go on, see `train_lm`.
        out: folder for the finished head; None: nothing written.
        num_devices: how many of this process's devices share every batch; None: all.
        command: how a person would repeat the run, for `recipe.md`.
        console: where progress goes; standard error unless given.

    Raises:
        ValueError: for a target that a head cannot be trained for as asked, answers that cannot be
            read, a state folder of another run or target, or batches that cannot be divided among
            the devices.
        DivergedError: when the loss is no longer finite.
    """
    console = console or Console(stderr=True)
    mesh = prepare_devices(settings, out, num_devices)
    fingerprints = fingerprints_of(settings) | answers_fingerprint(settings)
    model, tokenizer = load_target(settings, out)
    taps = _taps(settings, model)
    claim(state_folder, settings, fingerprints)
    with console.status("reading and packing text"):
        parts = [read_source(source) for source in settings.sources]
        sources = pack_sources(settings, tokenizer, parts)
    corpus = answers_of(model, sources, settings, state_folder, console)

    config = layers_config(model.config, settings.layers, settings.mlp_dim)
    target = jax.device_put(model.network, on_every_device(mesh))
    objective = partial(_objective, settings, config, taps)
    tapped = len(taps) * model.config.embed_dim
    first_params = partial(init_dflash_params, config, tapped, jax.random.key(settings.seed))
    shapes = jax.eval_shape(first_params)
    if settings.cache_features:
        observe = jax.jit(partial(_observe, taps=taps))
        corpus = with_states(
            corpus,
            lambda answers: observe(target, spread_rows(mesh, answers)),
            lambda answers, states: SeenAnswers(*answers, states.taps),
            settings.rows_per_batch,
            state_folder,
            console,
        )

    def as_batch(rows: Answers | SeenAnswers) -> Answered:
        spread = spread_rows(mesh, rows)
        if isinstance(spread, SeenAnswers):
            return Answered(Answers(*spread[:4]), target, jnp.asarray(spread.taps))
        return Answered(spread, target)

    task = Task(
        objective,
        evaluation=objective,
        first_params=first_params,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        as_batch=as_batch,
        flops_per_token=block_flops_per_token(
            shapes,
            config,
            model.config,
            settings.sequence_length,
            settings.block,
            settings.anchors,
            0.0 if settings.cache_features else max(taps) / model.config.num_layers,
        ),
        decode=decoding_of(
            model,
            sources.validation,
            settings.decoding_prompts,
            settings.seed,
            lambda params: DFlash.of(
                objective("float32").head(as_stored(params, model.network), model.network)
            ),
        ),
    )
    outcome = train(task, corpus, settings, state_folder, mesh, console)
    trained = TrainedBlocks(objective("float32").head(outcome.params, target), outcome.metrics)
    if out is not None:
        settings = dataclasses.replace(settings, dtype=outcome.dtype)
        _write(trained, settings, fingerprints, outcome.history, out, command)
        console.print(f"saved {out}", highlight=False, soft_wrap=True)
    return trained


def layers_config(target: ModelConfig, num_layers: int, mlp_dim: int | None) -> ModelConfig:
    """The layers of a head: of the target's shape, of Qwen-3's kind, as published files have them.

    Args:
        target: whose states the head reads.
        num_layers: of the head.
        mlp_dim: hidden units of an MLP; None: as many as the target's.
    """
    config = head_config(target, num_layers).replace(qk_norm=True)
    return config if mlp_dim is None else config.replace(mlp_dim=mlp_dim)


def _taps(settings: DFlashTrainingSettings, model: Model) -> tuple[int, ...]:
    """The layers to tap, once the settings are known to fit the target."""
    check_length(settings.sequence_length, model)
    if settings.block > settings.sequence_length:
        raise ValueError(
            f"block must be at most sequence_length ({settings.sequence_length}), got "
            f"{settings.block}."
        )
    if settings.taps is None:
        return dflash_taps(model.config.num_layers, settings.layers)
    check_taps(settings.taps, model)
    return settings.taps


def _observe(target: Network, answers: Answers, taps: tuple[int, ...]) -> TargetStates:
    """The states that a head reads: the tapped ones alone."""
    states = target_states(target, Sequences(*answers[:3]), taps)
    return states._replace(features=states.features[..., :0])


def _objective(
    settings: DFlashTrainingSettings, config: ModelConfig, taps: tuple[int, ...], dtype: str
) -> AnchoredBlocks:
    """What is trained for."""
    mask = RESERVED.index(MASK)
    block, anchors = settings.block, settings.anchors
    return AnchoredBlocks(config, taps, mask, block, anchors, settings.decay, dtype)


def _write(
    trained: TrainedBlocks,
    settings: DFlashTrainingSettings,
    fingerprints: dict[str, str],
    history: History,
    out: Path,
    command: str,
) -> None:
    with replacing_files(out) as staging:
        save_dflash(trained.head, staging, STORED)
        write_figures(staging, settings, trained.metrics)
        write_dflash_recipe(
            staging / "recipe.md",
            settings,
            trained.head.taps,
            fingerprints,
            trained.metrics,
            command,
        )
        draw_losses(staging / "losses.png", history.records, label="nats per masked token")
