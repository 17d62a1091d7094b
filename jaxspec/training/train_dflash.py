"""Training a DFlash head for a target: files in, a folder that `load_dflash` reads out."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxspec.checkpoint import Model, save_dflash
from jaxspec.drafters import DFlash
from jaxspec.models import DFlashHead, ModelConfig, Network, dflash_taps, init_dflash_params
from jaxspec.sharding import on_every_device, spread_rows
from jaxspec.training.answers import answers_of, answers_read
from jaxspec.training.data import Answers, SeenAnswers, Sequences
from jaxspec.training.decoding import decoding_of
from jaxspec.training.dflash import AnchoredBlocks, Answered
from jaxspec.training.efficiency import block_flops_per_token
from jaxspec.training.features import TargetStates, target_states, with_states
from jaxspec.training.head import check_length, check_taps, head_config
from jaxspec.training.report import Recipe
from jaxspec.training.run import (
    STORED,
    Task,
    as_stored,
    claim,
    load_target,
    pack_sources,
    prepare,
    read_sources,
    train,
    write,
)
from jaxspec.training.settings import TARGET, DFlashTrainingSettings
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
    run = prepare(settings, state_folder, out, num_devices, command, console)
    model, tokenizer = load_target(run)
    taps = _taps(settings, model)
    claim(run)
    sources = pack_sources(run, tokenizer, read_sources(run))
    corpus = answers_of(run, model, sources)

    config = layers_config(model.config, settings.layers, settings.mlp_dim)
    target = jax.device_put(model.network, on_every_device(run.mesh))
    objective = partial(_objective, settings, config, taps)
    tapped = len(taps) * model.config.embed_dim
    first_params = partial(init_dflash_params, config, tapped, jax.random.key(settings.seed))
    shapes = jax.eval_shape(first_params)
    if settings.cache_features:
        observe = jax.jit(partial(_observe, taps=taps))
        corpus = with_states(
            run,
            corpus,
            lambda answers: observe(target, spread_rows(run.mesh, answers)),
            lambda answers, states: SeenAnswers(*answers, states.taps),
        )

    def as_batch(rows: Answers | SeenAnswers) -> Answered:
        spread = spread_rows(run.mesh, rows)
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
    outcome = train(run, task, corpus)
    trained = TrainedBlocks(objective("float32").head(outcome.params, target), outcome.metrics)
    save = partial(save_dflash, trained.head, dtype=STORED)
    write(run, outcome, save, partial(_recipe, taps=taps), "nats per masked token")
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


def _recipe(
    settings: DFlashTrainingSettings,
    sha256: Mapping[str, str],
    metrics: Mapping[str, Any],
    taps: tuple[int, ...],
) -> Recipe:
    states = (
        "left out, since it was made once"
        if settings.cache_features
        else "up to the last layer read included"
    )
    return Recipe(
        cost="for each token of text, 6 x the weights that make context of it; for each slot of a "
        "block, 6 x the layers' weights in products + 12 x layers x heads x head dim x (sequence "
        "length + block); for each mask, 4 x those of the target's output head; the target's "
        f"forward pass {states}",
        about=f"A DFlash head of {settings.layers} layers for the target in `{settings.target}`, "
        f"whose files have the SHA-256 `{sha256[TARGET]}`. It reads the inputs of the target's "
        f"layers {', '.join(map(str, taps))}. Blocks of {settings.block} slots, the pending token "
        f"counted, from {settings.anchors} anchors a sequence; the i-th mask weighs "
        f"exp(-(i - 1) / {settings.decay:g}).",
        read=[answers_read(settings, sha256)],
        held_out="answers",
        meaning="nats: cross-entropy of a masked token, all weighing the same. top1_at_D: share of "
        "the D-th masks whose token was the most likely one.",
        drafts=f"drafts of {settings.block - 1} tokens",
    )
