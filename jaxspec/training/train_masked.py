"""Training a diffusion language model, or converting a causal one: files in, a folder out."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.checkpoint import load
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.checkpoint.tokenizer import load_tokenizer
from jaxspec.models import Diffusion, ModelConfig, Network, init_params, param_shapes
from jaxspec.sharding import spread_rows
from jaxspec.training.data import Sequences
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.masked import MaskedTokens
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
from jaxspec.training.settings import MaskedTrainingSettings
from jaxspec.training.tokenizer import (
    MASK,
    RESERVED,
    check_tokenizer,
)
from jaxspec.training.train import Trained


def train_masked(
    settings: MaskedTrainingSettings,
    state_folder: Path,
    out: Path | None = None,
    *,
    num_devices: int | None = None,
    command: str = "",
    console: Console | None = None,
) -> Trained:
    """Trains a diffusion language model, or goes on with a run that was interrupted.

    Args:
        settings: what to train, on what.
        state_folder: holds all that a run needs to go on, see `train_lm`.
        out: folder for the finished checkpoint, in LLaDA's layout; None: nothing written.
        num_devices: how many of this process's devices share every batch; None: all.
        command: how a person would repeat the run, for `recipe.md`.
        console: where progress goes; standard error unless given.

    Raises:
        ValueError: for data that cannot be read, a model that cannot be started from as asked, a
            state folder of another run, or batches that cannot be divided among the devices.
        DivergedError: when the loss is no longer finite.
    """
    run = prepare(settings, state_folder, out, num_devices, command, console)
    tokenizer = _tokenizer(settings)
    start = first_network(settings, tokenizer.get_vocab_size())
    config = start.config
    if settings.sequence_length > config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the model's positions ({config.max_positions}), got "
            f"{settings.sequence_length}."
        )
    claim(run)
    corpus = pack_sources(run, tokenizer, read_sources(run))
    if settings.teacher is not None:
        corpus |= pack_own_text(run, corpus, load(settings.teacher), settings.own_text_weight)

    def as_batch(sequences: Sequences) -> Sequences:
        return spread_rows(run.mesh, sequences)

    objective = partial(_objective, settings, config)
    task = Task(
        objective,
        evaluation=lambda dtype: objective(dtype).measured,
        # A copy: an update gives away the memory of what it is given.
        first_params=lambda: jax.tree.map(jnp.copy, start.params),
        num_params=sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config))),
        as_batch=as_batch,
        flops_per_token=_flops_per_token(settings, config),
    )
    outcome = train(run, task, corpus)
    trained = Trained(Network(outcome.params, config), tokenizer, outcome.metrics)
    save = partial(write_model, network=trained.network, tokenizer=tokenizer)
    write(run, outcome, save, _recipe, "bound of nats per token")
    return trained


def first_network(settings: MaskedTrainingSettings, vocab_size: int) -> Network:
    """The network that a run begins with: random, or another one whose mask and layers change.

    Args:
        settings: of the run.
        vocab_size: of the tokenizer.

    Raises:
        ValueError: `start_from` has another vocabulary, or lacks layers that are asked for.
    """
    mask = RESERVED.index(MASK)
    block = settings.block or None
    if settings.start_from is None:
        diffusion = Diffusion(mask, bool(settings.shift), block)
        config = settings.model.replace(vocab_size=vocab_size, diffusion=diffusion)
        return Network(init_params(config, jax.random.key(settings.seed)), config)
    source = load_network(Path(settings.start_from), "float32")
    if source.config.vocab_size != vocab_size:
        raise ValueError(
            f"start_from ({settings.start_from}) has a vocabulary of {source.config.vocab_size}, "
            f"the tokenizer one of {vocab_size}: give the tokenizer that it was trained with."
        )
    before = source.config.diffusion
    shift = settings.shift
    if shift is None:
        shift = True if before is None else before.shift
    return with_layers(source, settings.layers, Diffusion(mask, shift, block))


def with_layers(
    network: Network, layers: tuple[int, ...] | None, diffusion: Diffusion | None
) -> Network:
    """A network with some of another's layers, in this order, and its own way of decoding.

    Raises:
        ValueError: `layers` is empty or names one that is not there.
    """
    config, params = network.config, dict(network.params)
    kept = tuple(range(config.num_layers)) if layers is None else layers
    missing = sorted({layer for layer in kept if not 0 <= layer < config.num_layers})
    if not kept or missing:
        raise ValueError(
            f"layers must name some of the {config.num_layers} layers, 0..{config.num_layers - 1}, "
            f"got {kept}."
        )
    taken = {f"layer_{new}": params[f"layer_{old}"] for new, old in enumerate(kept)}
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("layer_")}
    changed = config.replace(
        num_layers=len(kept),
        layer_types=tuple(config.layer_types[layer] for layer in kept),
        diffusion=diffusion,
    )
    return Network(rest | taken, changed)


def _tokenizer(settings: MaskedTrainingSettings) -> Tokenizer:
    given = settings.tokenizer or settings.start_from
    assert given is not None  # checked with the settings
    tokenizer = load_tokenizer(given).backend
    check_tokenizer(tokenizer, given)
    return tokenizer


def _objective(settings: MaskedTrainingSettings, config: ModelConfig, dtype: str) -> MaskedTokens:
    return MaskedTokens(
        config,
        random_lengths=settings.random_lengths,
        answers_only=settings.answers_only,
        dtype=dtype,
    )


def _flops_per_token(settings: MaskedTrainingSettings, config: ModelConfig) -> float:
    flops = flops_per_token(config, settings.sequence_length)
    return 2 * flops if settings.block else flops


def _recipe(
    settings: MaskedTrainingSettings, sha256: Mapping[str, str], metrics: Mapping[str, Any]
) -> Recipe:
    block = settings.block
    sees = f"its own block of {block} slots and all before it" if block else "both sides"
    return Recipe(
        cost=PALM_FLOPS + (", twice, for a masked and a clean copy of the text" if block else ""),
        meaning="nats: upper bound of the negative log-likelihood per token, from one draw of "
        "hidden slots per text. top1: share of the hidden tokens that were the most likely one.",
        about=f"A diffusion language model; a slot sees {sees}.",
        read=(
            *models_read(settings, sha256),
            *own_text(settings, metrics, OWN_TEXT_OF_TEACHER, settings.own_text_weight),
            HOW_TO_ASK,
        ),
    )
