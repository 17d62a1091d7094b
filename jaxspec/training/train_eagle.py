"""Training an EAGLE head for a target: files in, a folder that `load_eagle` reads out."""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from rich.console import Console

from jaxspec.checkpoint import Model, eagle3_taps, save_eagle
from jaxspec.core.types import PyTree
from jaxspec.drafters import Eagle
from jaxspec.models import (
    Eagle3Head,
    EagleHead,
    ModelConfig,
    Network,
    init_eagle3_params,
    init_eagle_params,
)
from jaxspec.sharding import on_every_device, spread_rows
from jaxspec.training.data import SeenSequences, Sequences
from jaxspec.training.decoding import decoding_of
from jaxspec.training.eagle import (
    FeatureRegression,
    Observed,
    TrainingTimeTest,
    evaluation_of,
)
from jaxspec.training.efficiency import head_flops_per_token
from jaxspec.training.features import TargetStates, target_states, with_states
from jaxspec.training.head import check_length, check_taps, head_config
from jaxspec.training.report import Recipe, own_text
from jaxspec.training.run import (
    STORED,
    Corpus,
    Run,
    Task,
    as_stored,
    claim,
    load_target,
    pack_own_text,
    pack_sources,
    prepare,
    read_sources,
    train,
    write,
)
from jaxspec.training.settings import OWN_TEXT, TARGET, EagleTrainingSettings


class TrainedHead(NamedTuple):
    """What a run gave.

    metrics: figures of the run and, under "validation", by source and of decoding.
    """

    head: EagleHead | Eagle3Head
    metrics: dict[str, Any]


def train_eagle(
    settings: EagleTrainingSettings,
    state_folder: Path,
    out: Path | None = None,
    *,
    num_devices: int | None = None,
    command: str = "",
    console: Console | None = None,
) -> TrainedHead:
    """Trains an EAGLE-1 or EAGLE-3 head, or goes on with a run that was interrupted.

    Each validation also decodes held-out beginnings greedily with the head over
    `settings.paths`, by `jaxspec.generate`: `tau_with_bonus` counts tokens per target pass, the
    bonus token included.

    Args:
        settings: which head, for which target, on what.
        state_folder: holds all that a run needs to go on, see `train_lm`.
        out: folder for the finished head; None: nothing written.
        num_devices: how many of this process's devices share every batch; None: all.
        command: how a person would repeat the run, for `recipe.md`.
        console: where progress goes; standard error unless given.

    Raises:
        ValueError: for a target that a head cannot be trained for as asked, data that cannot be
            read, a state folder of another run or target, or batches that cannot be divided among
            the devices.
        DivergedError: when the loss is no longer finite.
    """
    run = prepare(settings, state_folder, out, num_devices, command, console)
    model, tokenizer = load_target(run)
    taps = _check_target(settings, model)
    claim(run)
    sources = pack_sources(run, tokenizer, read_sources(run))
    corpus = _what_to_read(run, sources, model)
    ids, coverage = _draft_ids(corpus, settings.draft_vocab, model.vocab_size)
    num_drafted = model.vocab_size if ids is None else len(ids)
    config = head_config(model.config)
    if settings.version == 3:
        config = config.replace(vocab_size=num_drafted)

    target = jax.device_put(model.network, on_every_device(run.mesh))
    ids = None if ids is None else jax.device_put(jnp.asarray(ids), on_every_device(run.mesh))
    objective = partial(_objective, settings, config, taps)
    first_params = partial(_first_params, settings, config, len(taps) * model.config.embed_dim)
    shapes = jax.eval_shape(first_params)
    if settings.cache_features:
        observe = jax.jit(partial(target_states, taps=taps))
        corpus = with_states(
            run,
            corpus,
            lambda sequences: observe(target, spread_rows(run.mesh, sequences)),
            lambda sequences, states: SeenSequences(*sequences, *states),
        )

    def as_batch(rows: Sequences | SeenSequences) -> Observed:
        spread = spread_rows(run.mesh, rows)
        if isinstance(spread, SeenSequences):
            states = TargetStates(jnp.asarray(spread.features), jnp.asarray(spread.taps))
            return Observed(Sequences(*spread[:3]), target, ids, states)
        return Observed(spread, target, ids)

    task = Task(
        objective,
        evaluation=lambda dtype: evaluation_of(objective(dtype), settings.paths),
        first_params=first_params,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        as_batch=as_batch,
        flops_per_token=head_flops_per_token(
            shapes,
            config,
            model.config,
            settings.sequence_length,
            num_drafted,
            settings.num_unrolled if settings.version == 3 else None,
            reads_target=not settings.cache_features,
        ),
        decode=decoding_of(
            model,
            sources.validation,
            settings.decoding_prompts,
            settings.seed,
            lambda params: Eagle.of(
                _stored(objective("float32"), params, model.network, ids), settings.paths
            ),
        ),
    )
    outcome = train(run, task, corpus)
    metrics = outcome.metrics | {
        "draft_vocab": num_drafted,
        "target_vocab": model.vocab_size,
        "draft_vocab_coverage": round(coverage, 4),
    }
    outcome = outcome._replace(metrics=metrics)
    trained = TrainedHead(objective("float32").head(outcome.params, target, ids), metrics)

    def save(folder: Path) -> None:
        save_eagle(trained.head, folder, STORED, target_layers=target.num_layers)

    write(run, outcome, save, _recipe, label="loss", metric="loss")
    return trained


def _check_target(settings: EagleTrainingSettings, model: Model) -> tuple[int, ...]:
    """The layers to tap, once the settings are known to fit the target."""
    check_length(settings.sequence_length, model)
    if settings.draft_vocab >= model.vocab_size:
        raise ValueError(
            f"draft_vocab must be below the target's vocabulary ({model.vocab_size}), got "
            f"{settings.draft_vocab}: 0 drafts from all tokens."
        )
    branch = 1 + max(map(max, settings.paths))
    if 0 < settings.draft_vocab < branch:
        raise ValueError(
            f"draft_vocab is {settings.draft_vocab}, but a node of the tree (paths) has {branch} "
            "children: draft from more tokens."
        )
    if settings.version == 1:
        return ()
    taps = eagle3_taps(model.config.num_layers) if settings.taps is None else settings.taps
    check_taps(taps, model)
    return taps


def _what_to_read(
    run: Run[EagleTrainingSettings], sources: Corpus[Sequences], model: Model
) -> Corpus[Sequences]:
    """What the target writes when it reads the sources, and these too if they are asked for."""
    settings, corpus = run.settings, Corpus[Sequences]({}, {}, {})
    if settings.sources_weight:
        weights = {
            name: weight * settings.sources_weight for name, weight in sources.weights.items()
        }
        corpus = dataclasses.replace(sources, weights=weights)
    if settings.own_text:
        corpus |= pack_own_text(run, sources, model, 1.0)
    return corpus


def _draft_ids(
    corpus: Corpus[Sequences], count: int, vocab_size: int
) -> tuple[Int[np.ndarray, " draft_vocab"] | None, float]:
    """The most frequent tokens, ascending, and their share of the text; `None` for all tokens."""
    if not count:
        return None, 1.0
    own = corpus.train.get(OWN_TEXT)
    texts: Iterable[Sequences] = corpus.train.values() if own is None else [own]
    frequencies = np.sum(
        [np.bincount(rows.tokens[rows.segments > 0], minlength=vocab_size) for rows in texts],
        axis=0,
    )
    ids = np.sort(np.argsort(-frequencies, kind="stable")[:count]).astype(np.int32)
    return ids, float(frequencies[ids].sum() / frequencies.sum())


def _objective(
    settings: EagleTrainingSettings, config: ModelConfig, taps: tuple[int, ...], dtype: str
) -> FeatureRegression | TrainingTimeTest:
    """What is trained for."""
    if settings.version == 1:
        return FeatureRegression(
            config, token_weight=settings.token_weight, noise=settings.noise, dtype=dtype
        )
    return TrainingTimeTest(config, taps, settings.num_unrolled, settings.decay, dtype)


def _first_params(settings: EagleTrainingSettings, config: ModelConfig, tapped: int) -> PyTree:
    key = jax.random.key(settings.seed)
    if settings.version == 1:
        return init_eagle_params(config, True, key)
    return init_eagle3_params(config, tapped, key)


def _stored(
    objective: FeatureRegression | TrainingTimeTest,
    params: PyTree,
    target: Network,
    ids: Int[Array, " draft_vocab"] | None,
) -> EagleHead | Eagle3Head:
    """A head of the weights as its folder holds them."""
    (device,) = jax.tree.leaves(target.params)[0].devices()
    return objective.head(as_stored(params, target), target, jax.device_put(ids, device))


def _recipe(
    settings: EagleTrainingSettings, sha256: Mapping[str, str], metrics: Mapping[str, Any]
) -> Recipe:
    unrolled = f", unrolled {settings.num_unrolled} times" if settings.version == 3 else ""
    states = "left out, since it was made once" if settings.cache_features else "included"
    return Recipe(
        cost="6 x the head's weights in products + 12 x heads x head dim x sequence length"
        f"{unrolled}, and the output head; the target's forward pass {states}",
        about=f"An EAGLE-{settings.version} head for the target in `{settings.target}`, whose "
        f"files have the SHA-256 `{sha256[TARGET]}`. It drafts from "
        f"{metrics['draft_vocab']:,} of {metrics['target_vocab']:,} tokens, which make up "
        f"{100 * metrics['draft_vocab_coverage']:.2f} % of the text it learned from.",
        read=own_text(
            settings,
            metrics,
            "the target wrote itself, half greedily and half at temperature 1",
        ),
        meaning="loss: what was trained for, without noise. topK_at_D: share of places where the "
        "target's choice is among the K likeliest tokens of the draft's depth D, the draft before "
        "it being fed the true text; tokens that cannot be drafted count as missed.",
        drafts=f"over the tree of {len(settings.paths)} nodes (its root not counted) in "
        "`training.json`",
    )
