"""The frame of every training run: open models, read text, plan, train, measure, write."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from jaxspec.checkpoint import CheckpointError, Model, find_model, save
from jaxspec.checkpoint.files import read_json, recover_files, replacing_files, write_json
from jaxspec.core.types import PyTree
from jaxspec.models import Network
from jaxspec.progress import error_console
from jaxspec.sharding import on_every_device, spread_rows
from jaxspec.training.data import Corpus, in_order, pack
from jaxspec.training.efficiency import Efficiency
from jaxspec.training.loop import (
    History,
    Objective,
    TrainStep,
    Validation,
    fit,
    make_evaluation,
    make_train_step,
)
from jaxspec.training.optimizer import make_optimizer
from jaxspec.training.plan import (
    data_mesh,
    device_name,
    make_plan,
    matmul_peak,
    seconds_per_step,
)
from jaxspec.training.report import RecipeNotes, draw_losses, recipe_of
from jaxspec.training.settings import RunSettings, settings_from_json, settings_to_json
from jaxspec.training.sources import Divided, file_digest, files_digest, fingerprint, read_source
from jaxspec.training.state import StateKeeper, TrainState, initial_state
from jaxspec.training.vocabulary import TrainingVocabulary

STORED = "bfloat16"
"""The dtype that trained weights are written in."""

# Settings that a resumed run may change: how long it takes, and what it shows.
_MAY_CHANGE = (
    *("num_steps", "minutes", "pace", "validation_rows"),
    *("paths", "decoding_prompts"),
)

Settings = TypeVar("Settings", bound=RunSettings, covariant=True)
Opened = TypeVar("Opened")


@dataclasses.dataclass(frozen=True)
class Run(Generic[Settings]):
    """A run of a trainer, with the places of its files and of its progress.

    Attributes:
        settings: settings of the trainer.
        state_folder: folder of all that is needed to resume the run.
        out: folder for the result; `None`: nothing is written.
        mesh: devices that share every batch.
        sha256: fingerprints of the files that the run reads, by name.
        console: where progress goes.
    """

    settings: Settings
    state_folder: Path
    out: Path | None
    mesh: Mesh
    sha256: dict[str, str]
    console: Console


class Task(NamedTuple):
    """Text and objective of a run.

    Attributes:
        corpus: packed text.
        vocabulary: tokens of the text.
        objective: from a dtype of products to what is trained for.
        evaluation: from a dtype of products to what validation measures.
        first_params: makes the weights to begin with; may be traced.
        result: from weights to what they make: a network or a head.
        flops_per_token: FLOPs that a token costs in an update.
        as_batch: from rows on the devices to what the objective reads.
        decode: from weights to figures of decoding; `None`: validation does not decode.
        figures: what `metrics.json` says in addition.
    """

    corpus: Corpus
    vocabulary: TrainingVocabulary
    objective: Callable[[str], Objective]
    evaluation: Callable[[str], Objective]
    first_params: Callable[[], PyTree]
    result: Callable[[PyTree], Any]
    flops_per_token: float
    as_batch: Callable[[Any], Any] = lambda rows: rows
    decode: Callable[[PyTree], Validation] | None = None
    figures: Mapping[str, Any] = {}


class Outcome(NamedTuple):
    """Result of a training run.

    Attributes:
        result: the trained network or head, float32.
        vocabulary: tokens of the text.
        dtype: dtype of the operands of products.
        metrics: figures of the run and, under "validation", by source and of decoding.
        history: figures by step.
    """

    result: Any
    vocabulary: TrainingVocabulary
    dtype: str
    metrics: dict[str, Any]
    history: History


class Trainer(Protocol[Opened]):
    """An objective with its settings: all that tells one training run from another.

    A frozen dataclass of its settings, next to its objective. `train` calls the methods in the
    order in which they stand here.
    """

    @property
    def settings(self) -> RunSettings: ...

    def open(self, run: Run[Any]) -> Opened:
        """Loads the models that the run reads. Writes nothing.

        Raises:
            ValueError: saying what does not fit.
        """
        ...

    def task(self, run: Run[Any], opened: Opened, documents: Sequence[Divided]) -> Task:
        """Lays out text and says what to train for. May write into the state folder.

        Args:
            run: the run; its state folder is claimed.
            opened: what `open` returned.
            documents: documents of each source, in order.
        """
        ...

    def save(self, opened: Opened, outcome: Outcome, folder: Path) -> None:
        """Writes the result into a folder that exists, weights in `STORED`."""
        ...

    def recipe(self, run: Run[Any], opened: Opened, metrics: Mapping[str, Any]) -> RecipeNotes:
        """Returns what `recipe.md` says of this trainer's runs alone."""
        ...


def train(
    trainer: Trainer[Any],
    state_folder: Path,
    out: Path | None = None,
    *,
    num_devices: int | None = None,
    command: str = "",
    console: Console | None = None,
) -> Outcome:
    """Trains, or resumes a run that was interrupted.

    A resumed run ends with the same bits as one left alone, on the same machine and versions.

    Args:
        trainer: what to train, such as `LMTrainer(settings)`.
        state_folder: folder of all that is needed to resume; a call with equal settings and the
            same folder resumes. One folder holds one run, though its length may change: see
            `OptimizerSettings.decay_fraction`.
        out: folder for the result and its recipe; `None`: nothing is written.
        num_devices: number of this process's devices that share every batch; `None`: all. Figures
            and weights depend on it by rounding alone, and a resumed run may change it.
        command: command line that repeats the run, for `recipe.md`.
        console: where progress goes; standard error unless given.

    Raises:
        ValueError: for models that do not fit, data that cannot be read, a state folder of another
            run, or batches that cannot be divided among the devices. Nothing is written then.
        DivergedError: when the loss is no longer finite.
    """
    run = _prepare(trainer.settings, state_folder, out, num_devices, console)
    opened = trainer.open(run)
    _claim(run)
    with run.console.status("reading text"):
        documents = [read_source(source) for source in run.settings.sources]
    task = trainer.task(run, opened, documents)
    outcome = _fit(run, task)
    if out is not None:
        settings = dataclasses.replace(run.settings, dtype=outcome.dtype)
        notes = trainer.recipe(run, opened, outcome.metrics)
        with replacing_files(out) as staging:
            trainer.save(opened, outcome, staging)
            write_json(staging / "training.json", settings_to_json(settings))
            write_json(staging / "metrics.json", outcome.metrics)
            recipe = recipe_of(settings, run.sha256, outcome.metrics, command, notes)
            (staging / "recipe.md").write_text(recipe, encoding="utf-8")
            records = outcome.history.records
            draw_losses(staging / "losses.png", records, notes.metric, notes.label)
        run.console.print(f"saved {out}", highlight=False, soft_wrap=True)
    return outcome


def pack_sources(
    run: Run[RunSettings], vocabulary: TrainingVocabulary, documents: Sequence[Divided]
) -> Corpus:
    """Packs the documents of all sources, in order, into rows of tokens."""
    corpus = Corpus({}, {}, {})
    with run.console.status("packing text"):
        for source, part in zip(run.settings.sources, documents, strict=True):
            corpus.train[source.name], corpus.validation[source.name] = (
                pack(vocabulary.encode(texts), run.settings.sequence_length) for texts in part
            )
            corpus.weights[source.name] = source.weight
    return corpus


def write_model(folder: Path, network: Network, vocabulary: TrainingVocabulary) -> None:
    """Writes a trained model in the Hugging Face layout, weights in `STORED`.

    Args:
        folder: made if it is not there; an interruption leaves it as it was.
        network: the network.
        vocabulary: its tokens.
    """
    settings = {**vocabulary.tokenizer.settings, "model_max_length": network.config.max_positions}
    tokenizer = dataclasses.replace(vocabulary.tokenizer, settings=settings)
    save(Model(network, tokenizer, stop_token_ids=vocabulary.stops), folder, STORED)


def _prepare(
    settings: RunSettings,
    state_folder: Path,
    out: Path | None,
    num_devices: int | None,
    console: Console | None,
) -> Run[RunSettings]:
    """Returns a run after checks of its devices, its `out` and the files that it reads."""
    if out is not None and out.is_file():
        raise ValueError(f"out must be a folder, but {out} is a file: name another.")
    mesh = data_mesh(num_devices)
    if settings.rows_per_batch % mesh.size:
        raise ValueError(
            f"rows_per_batch must be a multiple of the number of devices ({mesh.size}), got "
            f"{settings.rows_per_batch}: choose other --rows, or fewer --devices (num_devices)."
        )
    sha256 = _fingerprints(settings)
    return Run(settings, state_folder, out, mesh, sha256, console or error_console())


def _fingerprints(settings: RunSettings) -> dict[str, str]:
    """Returns the SHA-256 of the sources, the models and the other files of a run, by name."""
    digests = {source.name: fingerprint(source) for source in settings.sources}
    for name, folder in settings.models_read.items():
        digests[name] = _model_fingerprint(name, folder)
    for name, path in settings.files_read.items():
        if not Path(path).is_file():
            raise ValueError(f"{name} must be a file, but {path} is not a file.")
        digests[name] = file_digest(Path(path))
    return digests


def _model_fingerprint(name: str, source: str) -> str:
    """Returns the SHA-256 of the sorted lines `sha256  name` of the files of a model."""
    try:
        folder = find_model(source)
    except CheckpointError as error:
        raise ValueError(f"{name} must be a model's folder or owner/name. {error}") from None
    patterns = ("config.json", "tokenizer.json", "*.safetensors")
    return files_digest(sorted(path for name in patterns for path in folder.glob(name)), folder)


def _claim(run: Run[RunSettings]) -> None:
    """Writes into the state folder whose it is, or checks that it is this run's.

    Raises:
        ValueError: the folder holds another run; says what differs.
    """
    settings, state_folder = run.settings, run.state_folder
    state_folder.mkdir(parents=True, exist_ok=True)
    recover_files(state_folder)
    path = state_folder / "run.json"
    now = {"settings": settings_to_json(settings), "sha256": run.sha256}
    before = read_json(path) if path.exists() else now
    try:
        # Read and written again, so that settings which came later have their defaults.
        earlier = settings_to_json(settings_from_json(before["settings"], type(settings)))
        digests = dict(before["sha256"])
    except KeyError as error:
        raise ValueError(
            f"{path} is no record of a run: it lacks {error}. Choose another state folder, or "
            "delete this one."
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The state folder {state_folder} holds a run of another kind: {error} Choose "
            "another state folder, or delete this one."
        ) from None
    changed = [
        f"{name}: {earlier[name]!r} before, {value!r} now"
        for name, value in now["settings"].items()
        if earlier[name] != value and name not in _MAY_CHANGE
    ]
    changed += [
        f"the files of {name!r}"
        for name, digest in run.sha256.items()
        if digests.get(name, digest) != digest
    ]
    if changed:
        raise ValueError(
            f"The state folder {state_folder} holds a run that differs in {'; '.join(changed)}. "
            "Choose another state folder, or delete this one."
        )
    with replacing_files(state_folder) as staging:
        write_json(staging / path.name, now)


def _fit(run: Run[RunSettings], task: Task) -> Outcome:
    """Plans a run, trains or resumes it, and measures its result."""
    settings, state_folder, mesh, console = run.settings, run.state_folder, run.mesh, run.console
    drawn = task.corpus.batches(settings.rows_per_batch, settings.seed)
    on_all = on_every_device(mesh)

    def as_batch(rows: Any) -> Any:
        return task.as_batch(spread_rows(mesh, rows))

    def batches(step: int) -> Any:
        return as_batch(drawn(step))

    def begin() -> TrainState:
        # A copy, because the train step donates its input buffers.
        params = jax.device_put(jax.tree.map(jnp.copy, task.first_params()), on_all)
        return jax.device_put(initial_state(params, make_optimizer(settings.optimizer, 1)), on_all)

    def train_step(dtype: str, num_steps: int) -> TrainStep:
        objective = task.objective(dtype)
        return make_train_step(objective, settings.optimizer, num_steps, settings.seed, mesh)

    def time_step(dtypes: tuple[str, ...]) -> dict[str, float]:
        train_steps = {dtype: train_step(dtype, 1000) for dtype in dtypes}
        with console.status(f"timing a few steps in {' and '.join(dtypes)}"):
            return seconds_per_step(train_steps, begin(), batches)

    peak = partial(matmul_peak, mesh)
    plan = make_plan(settings, state_folder, device_name(mesh), time_step, peak)
    efficiency = Efficiency(task.flops_per_token, plan.peak)
    evaluate = make_evaluation(task.evaluation(plan.dtype))

    def validate(params: PyTree, rows: int | None = settings.validation_rows) -> Validation:
        figures = {
            name: evaluate(params, map(as_batch, in_order(held, settings.rows_per_batch, rows)))
            for name, held in task.corpus.validation.items()
            if len(held.tokens)
        }
        return figures | (task.decode(params) if task.decode else {})

    shapes = jax.eval_shape(task.first_params)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    tokens_per_step = settings.rows_per_batch * settings.sequence_length
    console.print(
        f"{num_params:,} parameters, {plan.num_steps} steps of {tokens_per_step} tokens, products "
        f"in {plan.dtype}, measured peak {plan.peak / 1e9:,.0f} GFLOP/s; state in {state_folder}",
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
    rates = [record["tokens_per_second"] for record in history.records if "loss" in record]
    rate = statistics.median(rates) if rates else None
    metrics = {
        "parameters": num_params,
        "steps": plan.num_steps,
        "dtype": plan.dtype,
        "tokens_trained": plan.num_steps * tokens_per_step,
        "minutes": round(history.seconds / 60, 1),
        "tokens_per_second": None if rate is None else round(rate),
        "flops_per_token": round(efficiency.flops_per_token),
        "peak_gflops_per_second": round(efficiency.peak / 1e9, 1),
        "utilisation": None if rate is None else round(efficiency.utilisation(rate), 4),
        "device": device_name(mesh),
        "tokens_of_one_pass": task.corpus.tokens_of_one_pass,
        "validation": {
            source: {name: round(value, 4) for name, value in figures.items()}
            for source, figures in validation.items()
        },
        **task.figures,
    }
    return Outcome(task.result(state.params), task.vocabulary, plan.dtype, metrics, history)
