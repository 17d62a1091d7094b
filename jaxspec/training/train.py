"""Training a language model, or a draft model after it: files in, a checkpoint folder out."""

import dataclasses
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.checkpoint import load
from jaxspec.checkpoint.files import read_json, recover_files, replacing_files, write_json
from jaxspec.checkpoint.huggingface import load_network, write_network
from jaxspec.checkpoint.tokenizer import load_tokenizer
from jaxspec.core.types import PyTree
from jaxspec.models import ModelConfig, Network, init_params, param_shapes
from jaxspec.training.data import (
    Batches,
    Sequences,
    document_texts,
    encode_documents,
    fingerprint,
    in_order,
    pack,
    read_source,
)
from jaxspec.training.devices import (
    data_mesh,
    device_name,
    matmul_peak,
    on_every_device,
    spread_rows,
)
from jaxspec.training.efficiency import Efficiency, flops_per_token
from jaxspec.training.lm import NextToken, SoftLabels, Taught, make_evaluation
from jaxspec.training.loop import History, TrainStep, Validation, fit, make_train_step
from jaxspec.training.optimizer import make_optimizer
from jaxspec.training.own_text import PROMPTS_PER_PART, read_own_text, write_own_text
from jaxspec.training.plan import Plan, make_plan, seconds_per_step
from jaxspec.training.report import draw_losses, write_recipe
from jaxspec.training.settings import (
    OWN_TEXT,
    LMTrainingSettings,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.state import StateKeeper, TrainState, initial_state
from jaxspec.training.tokenizer import (
    BOS,
    PAD,
    RESERVED,
    check_tokenizer,
    save_tokenizer,
    stop_ids,
    train_tokenizer,
)

# What a run that goes on may do otherwise than before: how long it takes, and what it shows.
_MAY_CHANGE = ("num_steps", "minutes", "pace", "validation_rows")


class Corpus(NamedTuple):
    """The packed text of a run by source, and how many passes are made over each."""

    train: dict[str, Sequences]
    validation: dict[str, Sequences]
    weights: dict[str, float]

    def batches(self, rows_per_batch: int, seed: int) -> Batches:
        sources, weights = tuple(self.train.values()), tuple(self.weights.values())
        return Batches(sources, weights, rows_per_batch, seed)


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
    console = console or Console(stderr=True)
    if out is not None and out.is_file():
        raise ValueError(f"out must be a folder, but {out} is a file: name another.")
    mesh = data_mesh(num_devices)
    if settings.rows_per_batch % mesh.size:
        raise ValueError(
            f"rows_per_batch must be a multiple of the number of devices ({mesh.size}), got "
            f"{settings.rows_per_batch}: choose other --rows, or fewer --devices (num_devices)."
        )
    teacher = None if settings.teacher is None else load_network(Path(settings.teacher))
    teacher = jax.device_put(teacher, on_every_device(mesh))
    fingerprints = {source.name: fingerprint(source) for source in settings.sources}
    state_folder.mkdir(parents=True, exist_ok=True)
    _claim(state_folder, settings, fingerprints)
    with console.status("reading and packing text"):
        tokenizer, corpus = _prepare(settings, state_folder)
    config = settings.model.replace(vocab_size=tokenizer.get_vocab_size())
    if teacher is not None and teacher.vocab_size != config.vocab_size:
        raise ValueError(
            f"The teacher in {settings.teacher} has a vocabulary of {teacher.vocab_size}, the "
            f"tokenizer one of {config.vocab_size}: they must be the same."
        )
    if settings.own_text:
        corpus = _with_own_text(corpus, settings, state_folder, console)

    def taught(sequences: Sequences) -> Sequences | Taught:
        spread = spread_rows(mesh, sequences)
        return spread if teacher is None else Taught(spread, teacher)

    def batches(step: int) -> Sequences | Taught:
        return taught(drawn(step))

    def begin() -> TrainState:
        params = jax.device_put(_first_params(settings, config), on_every_device(mesh))
        state = initial_state(params, make_optimizer(settings.optimizer, 1))
        return jax.device_put(state, on_every_device(mesh))

    def train_step(dtype: str, num_steps: int) -> TrainStep:
        objective = _objective(settings, config, teacher, dtype)
        return make_train_step(objective, settings.optimizer, num_steps, settings.seed, mesh)

    def time_step(dtypes: tuple[str, ...]) -> dict[str, float]:
        train_steps = {dtype: train_step(dtype, 1000) for dtype in dtypes}
        with console.status(f"timing a few steps in {' and '.join(dtypes)}"):
            return seconds_per_step(train_steps, begin(), batches)

    drawn = corpus.batches(settings.rows_per_batch, settings.seed)
    plan = make_plan(
        settings, state_folder, device_name(mesh), time_step, partial(matmul_peak, mesh)
    )
    efficiency = Efficiency(_flops_per_token(settings, config, teacher), plan.peak)
    settings = dataclasses.replace(settings, dtype=plan.dtype)
    evaluate = make_evaluation(_objective(settings, config, teacher, plan.dtype).whole)

    def validate(params: PyTree, rows: int | None = settings.validation_rows) -> Validation:
        held_out = {
            name: in_order(sequences, settings.rows_per_batch, rows)
            for name, sequences in corpus.validation.items()
        }
        return {
            name: evaluate(params, [taught(sequences) for sequences in batches])
            for name, batches in held_out.items()
            if batches
        }

    console.print(
        f"{_size(config):,} parameters, {plan.num_steps} steps of "
        f"{settings.rows_per_batch * settings.sequence_length} tokens, products in {plan.dtype}, "
        f"measured peak {plan.peak / 1e9:,.0f} GFLOP/s; state in {state_folder}",
        highlight=False,
        soft_wrap=True,
    )
    history = History(state_folder / "history.jsonl")
    keeper = StateKeeper(state_folder / "states")
    try:
        state = fit(
            train_step(plan.dtype, plan.num_steps),
            begin(),
            batches,
            plan.num_steps,
            keeper=keeper,
            history=history,
            validate=validate,
            pace=settings.pace,
            efficiency=efficiency,
            console=console,
        )
    finally:
        keeper.close()
    with console.status("validating on everything held out"):
        validation = validate(state.params, None)
    metrics = _figures(
        settings, config, corpus, history, plan, efficiency, device_name(mesh), validation
    )
    trained = Trained(Network(state.params, config), tokenizer, metrics)
    if out is not None:
        _write(trained, settings, fingerprints, history, out, command)
        console.print(f"saved {out}", highlight=False, soft_wrap=True)
    return trained


def _claim(state_folder: Path, settings: LMTrainingSettings, fingerprints: dict[str, str]) -> None:
    """Writes down whose folder this is, or checks that it is this run's."""
    recover_files(state_folder)
    path = state_folder / "run.json"
    run = {"settings": settings_to_json(settings), "sha256": fingerprints}
    before = read_json(path) if path.exists() else run
    # Read and written again, so that settings which came later have their defaults.
    earlier = settings_to_json(settings_from_json(before["settings"]))
    changed = [
        f"{name}: {earlier[name]!r} before, {value!r} now"
        for name, value in run["settings"].items()
        if earlier[name] != value and name not in _MAY_CHANGE
    ]
    changed += [
        f"the files of source {name!r}"
        for name, digest in fingerprints.items()
        if before["sha256"].get(name, digest) != digest
    ]
    if changed:
        raise ValueError(
            f"The state folder {state_folder} holds a run that differs in {'; '.join(changed)}. "
            "Choose another state folder, or delete this one."
        )
    with replacing_files(state_folder) as staging:
        write_json(staging / path.name, run)


def _prepare(settings: LMTrainingSettings, state_folder: Path) -> tuple[Tokenizer, Corpus]:
    parts = [read_source(source) for source in settings.sources]
    tokenizer = _tokenizer(settings, state_folder, parts)
    corpus = Corpus({}, {}, {})
    for source, part in zip(settings.sources, parts, strict=True):
        train, validation = (
            pack(encode_documents(tokenizer, documents), settings.sequence_length)
            for documents in part
        )
        corpus.train[source.name], corpus.validation[source.name] = train, validation
        corpus.weights[source.name] = source.weight
    return tokenizer, corpus


def _with_own_text(
    corpus: Corpus, settings: LMTrainingSettings, state_folder: Path, console: Console
) -> Corpus:
    """The corpus with one more source: what the teacher writes when it reads the others."""
    assert settings.teacher is not None
    folder = state_folder / "own_text"
    rows = corpus.batches(PROMPTS_PER_PART, settings.seed)
    write_own_text(load(settings.teacher), rows, settings.own_text, folder, console)
    texts = read_own_text(folder, settings.own_text)
    train, validation = (pack(part, settings.sequence_length) for part in texts)
    return Corpus(
        corpus.train | {OWN_TEXT: train},
        corpus.validation | {OWN_TEXT: validation},
        corpus.weights | {OWN_TEXT: settings.own_text_weight},
    )


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


def _figures(
    settings: LMTrainingSettings,
    config: ModelConfig,
    corpus: Corpus,
    history: History,
    plan: Plan,
    efficiency: Efficiency,
    device: str,
    validation: Validation,
) -> dict[str, Any]:
    rates = [record["tokens_per_second"] for record in history.records if "loss" in record]
    rate = statistics.median(rates) if rates else None
    return {
        "parameters": _size(config),
        "steps": plan.num_steps,
        "dtype": plan.dtype,
        "tokens_trained": plan.num_steps * settings.rows_per_batch * settings.sequence_length,
        "minutes": round(history.seconds / 60, 1),
        "tokens_per_second": None if rate is None else round(rate),
        "flops_per_token": round(efficiency.flops_per_token),
        "peak_gflops_per_second": round(efficiency.peak / 1e9, 1),
        "utilisation": None if rate is None else round(efficiency.utilisation(rate), 4),
        "device": device,
        "tokens_of_one_pass": {
            name: int(np.count_nonzero(packed.segments)) for name, packed in corpus.train.items()
        },
        "validation": {
            source: {name: round(value, 4) for name, value in figures.items()}
            for source, figures in validation.items()
        },
    }


def _flops_per_token(
    settings: LMTrainingSettings, config: ModelConfig, teacher: Network | None
) -> float:
    flops = flops_per_token(config, settings.sequence_length)
    if teacher is not None:  # which only looks: the forward third
        flops += flops_per_token(teacher.config, settings.sequence_length) / 3
    return flops


def _size(config: ModelConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def _write(
    trained: Trained,
    settings: LMTrainingSettings,
    fingerprints: dict[str, str],
    history: History,
    out: Path,
    command: str,
) -> None:
    config = trained.network.config
    ids = {
        "bos_token_id": RESERVED.index(BOS),
        "eos_token_id": stop_ids(),
        "pad_token_id": RESERVED.index(PAD),
    }
    with replacing_files(out) as staging:
        write_network(trained.network, staging, "bfloat16", ids)
        save_tokenizer(trained.tokenizer, staging, config.max_positions)
        write_json(staging / "generation_config.json", ids)
        write_json(staging / "training.json", settings_to_json(settings))
        write_json(staging / "metrics.json", trained.metrics)
        write_recipe(staging / "recipe.md", settings, fingerprints, trained.metrics, command)
        draw_losses(staging / "losses.png", history.records)
