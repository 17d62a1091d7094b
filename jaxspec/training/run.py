"""What every trainer does: claim a state folder, lay out text, plan, train, measure, write."""

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.checkpoint import Model, load
from jaxspec.checkpoint.files import read_json, recover_files, replacing_files, write_json
from jaxspec.checkpoint.huggingface import write_network
from jaxspec.core.types import PyTree
from jaxspec.models import Network
from jaxspec.sharding import on_every_device
from jaxspec.training.data import (
    Batches,
    Divided,
    Rows,
    Sequences,
    encode_documents,
    fingerprint,
    in_order,
    pack,
    read_source,
)
from jaxspec.training.devices import data_mesh, device_name, matmul_peak
from jaxspec.training.efficiency import Efficiency
from jaxspec.training.lm import make_evaluation
from jaxspec.training.loop import History, Objective, TrainStep, Validation, fit, make_train_step
from jaxspec.training.optimizer import make_optimizer
from jaxspec.training.own_text import PROMPTS_PER_PART, read_own_text, write_own_text
from jaxspec.training.plan import make_plan, seconds_per_step
from jaxspec.training.report import Recipe, draw_losses, recipe_of
from jaxspec.training.settings import (
    OWN_TEXT,
    DraftingSettings,
    RunSettings,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.state import StateKeeper, TrainState, initial_state
from jaxspec.training.tokenizer import BOS, PAD, RESERVED, check_tokenizer, save_tokenizer, stop_ids

STORED = "bfloat16"
"""The dtype that trained weights are written in."""

# What a run that goes on may do otherwise than before: how long it takes, and what it shows.
_MAY_CHANGE = (
    *("num_steps", "minutes", "pace", "validation_rows"),
    *("paths", "decoding_prompts"),
)

Settings = TypeVar("Settings", bound=RunSettings, covariant=True)


@dataclasses.dataclass(frozen=True)
class Corpus(Generic[Rows]):
    """The packed text of a run by source, and how many passes are made over each."""

    train: dict[str, Rows]
    validation: dict[str, Rows]
    weights: dict[str, float]

    def batches(self, rows_per_batch: int, seed: int) -> Batches[Rows]:
        sources, weights = tuple(self.train.values()), tuple(self.weights.values())
        return Batches(sources, weights, rows_per_batch, seed)

    def __or__(self, other: "Corpus[Rows]") -> "Corpus[Rows]":
        """Both, side by side."""
        return Corpus(
            self.train | other.train,
            self.validation | other.validation,
            self.weights | other.weights,
        )

    @property
    def tokens_of_one_pass(self) -> dict[str, int]:
        return {name: int(np.count_nonzero(packed.segments)) for name, packed in self.train.items()}


class Task(NamedTuple):
    """What tells one trainer from another.

    objective: what is trained for, with products in a dtype.
    evaluation: what validation measures, likewise.
    first_params: weights to begin with.
    num_params: how many these are.
    as_batch: rows as both take them, where the run's devices find them.
    flops_per_token: that an update costs.
    decode: figures of decoding with weights; None: validation does not decode.
    """

    objective: Callable[[str], Objective]
    evaluation: Callable[[str], Objective]
    first_params: Callable[[], PyTree]
    num_params: int
    as_batch: Callable[[Any], Any]
    flops_per_token: float
    decode: Callable[[PyTree], Validation] | None = None


class Outcome(NamedTuple):
    """What `train` gave.

    dtype: of products.
    metrics: figures of the run and, under "validation", by source.
    history: figures by step.
    """

    params: PyTree
    dtype: str
    metrics: dict[str, Any]
    history: History


@dataclasses.dataclass(frozen=True)
class Run(Generic[Settings]):
    """One run of a trainer: what it depends on, and where its files and its progress go.

    settings: of the run.
    state_folder: holds all that the run needs to go on.
    out: folder for what is trained; None: nothing is written.
    mesh: the devices that share every batch.
    sha256: of what the run reads, by name.
    command: how a person would repeat the run.
    console: where progress goes.
    """

    settings: Settings
    state_folder: Path
    out: Path | None
    mesh: Mesh
    sha256: dict[str, str]
    command: str
    console: Console


def prepare(
    settings: Settings,
    state_folder: Path,
    out: Path | None,
    num_devices: int | None,
    command: str,
    console: Console | None,
) -> Run[Settings]:
    """A run whose devices can share a batch, whose `out` can be written and whose files are there.

    Nothing is written yet. Arguments as every trainer takes them.

    Raises:
        ValueError: naming the argument that is wrong.
    """
    if out is not None and out.is_file():
        raise ValueError(f"out must be a folder, but {out} is a file: name another.")
    mesh = data_mesh(num_devices)
    if settings.rows_per_batch % mesh.size:
        raise ValueError(
            f"rows_per_batch must be a multiple of the number of devices ({mesh.size}), got "
            f"{settings.rows_per_batch}: choose other --rows, or fewer --devices (num_devices)."
        )
    sha256 = fingerprints_of(settings)
    console = console or Console(stderr=True)
    return Run(settings, state_folder, out, mesh, sha256, command, console)


def model_fingerprint(name: str, folder: str) -> str:
    """SHA-256 of the sorted lines `sha256  name` of what a model's folder is read from.

    Args:
        name: of the setting that names the folder.
        folder: in the Hugging Face layout.

    Raises:
        ValueError: it is not a folder.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{name} must be a model's folder, but {folder} is not a folder.")
    files = sorted(
        path
        for pattern in ("config.json", "tokenizer.json", "*.safetensors")
        for path in Path(folder).glob(pattern)
    )
    lines = []
    for path in files:
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprints_of(settings: RunSettings) -> dict[str, str]:
    """SHA-256 of the sources, the models and the other files that a run reads, by name.

    Raises:
        ValueError: one of them is not there.
    """
    digests = {source.name: fingerprint(source) for source in settings.sources}
    for name, folder in settings.models_read.items():
        digests[name] = model_fingerprint(name, folder)
    for name, path in settings.files_read.items():
        if not Path(path).is_file():
            raise ValueError(f"{name} must be a file, but {path} is none.")
        with open(path, "rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def load_target(run: Run[DraftingSettings]) -> tuple[Model, Tokenizer]:
    """The model to draft for, with its tokenizer.

    Raises:
        ValueError: nothing can be trained to draft for it, or `out` is its own folder.
    """
    folder, out = run.settings.target, run.out
    if out is not None and out.resolve() == Path(folder).resolve():
        raise ValueError(f"out must not be the target's own folder, {out}: name another.")
    model = load(folder)
    if model.config.diffusion is not None:
        raise ValueError(f"target must be a causal model, but {folder} is a diffusion one.")
    if model.tokenizer is None:
        raise ValueError(f"The target in {folder} must have a tokenizer.json.")
    check_tokenizer(model.tokenizer.backend, folder)
    return model, model.tokenizer.backend


def claim(run: Run[RunSettings]) -> None:
    """Writes down whose state folder this is, or checks that it is this run's.

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
        if before["sha256"].get(name, digest) != digest
    ]
    if changed:
        raise ValueError(
            f"The state folder {state_folder} holds a run that differs in {'; '.join(changed)}. "
            "Choose another state folder, or delete this one."
        )
    with replacing_files(state_folder) as staging:
        write_json(staging / path.name, now)


def read_sources(run: Run[RunSettings]) -> list[Divided]:
    """The documents of each source."""
    with run.console.status("reading text"):
        return [read_source(source) for source in run.settings.sources]


def pack_sources(
    run: Run[RunSettings], tokenizer: Tokenizer, parts: Sequence[Divided]
) -> Corpus[Sequences]:
    """The documents of all sources, as `read_sources` gave them, in rows of tokens."""
    corpus = Corpus[Sequences]({}, {}, {})
    with run.console.status("packing text"):
        for source, part in zip(run.settings.sources, parts, strict=True):
            corpus.train[source.name], corpus.validation[source.name] = (
                pack(encode_documents(tokenizer, documents), run.settings.sequence_length)
                for documents in part
            )
            corpus.weights[source.name] = source.weight
    return corpus


def pack_own_text(
    run: Run[RunSettings], corpus: Corpus[Sequences], model: Model, weight: float
) -> Corpus[Sequences]:
    """A corpus of what a model writes when it reads the documents of another one."""
    settings, folder = run.settings, run.state_folder / "own_text"
    rows = corpus.batches(PROMPTS_PER_PART, settings.seed)
    write_own_text(model, rows, settings.own_text, folder, run.console)
    train, validation = (
        pack([text.tokens for text in part], settings.sequence_length)
        for part in read_own_text(folder, settings.own_text)
    )
    return Corpus({OWN_TEXT: train}, {OWN_TEXT: validation}, {OWN_TEXT: weight})


def write_model(folder: Path, network: Network, tokenizer: Tokenizer) -> None:
    """A trained model as readers expect it, weights in `STORED`.

    Args:
        folder: must exist. Interruption is the caller's affair: see `replacing_files`.
        network: what was trained.
        tokenizer: with the reserved tokens in front.
    """
    ids = {
        "bos_token_id": RESERVED.index(BOS),
        "eos_token_id": stop_ids(),
        "pad_token_id": RESERVED.index(PAD),
    }
    write_network(network, folder, STORED, ids)
    save_tokenizer(tokenizer, folder, network.config.max_positions)
    write_json(folder / "generation_config.json", ids)


def write(
    run: Run[RunSettings],
    outcome: Outcome,
    save: Callable[[Path], None],
    recipe: Callable[[Any, Mapping[str, str], Mapping[str, Any]], Recipe],
    label: str,
    metric: str = "nats",
) -> None:
    """What was trained, and how it came about, into `run.out`; nothing where that is None.

    Args:
        run: that trained it.
        outcome: of `train`.
        save: writes the weights into a folder.
        recipe: what is to be said of settings, fingerprints and metrics.
        label: of the metric that is drawn.
        metric: its name in the history.
    """
    if run.out is None:
        return
    settings = dataclasses.replace(run.settings, dtype=outcome.dtype)
    said = recipe(settings, run.sha256, outcome.metrics)
    text = recipe_of(settings, run.sha256, outcome.metrics, run.command, said)
    with replacing_files(run.out) as staging:
        save(staging)
        write_json(staging / "training.json", settings_to_json(settings))
        write_json(staging / "metrics.json", outcome.metrics)
        (staging / "recipe.md").write_text(text, encoding="utf-8")
        draw_losses(staging / "losses.png", outcome.history.records, metric, label)
    run.console.print(f"saved {run.out}", highlight=False, soft_wrap=True)


def as_stored(params: PyTree, target: Network) -> PyTree:
    """A drafter's weights as its folder holds them, where and in the dtype that its target has."""
    (device,) = jax.tree.leaves(target.params)[0].devices()
    params = jax.device_put(params, device)
    return jax.tree.map(lambda leaf: leaf.astype(STORED).astype(target.dtype), params)


def train(run: Run[RunSettings], task: Task, corpus: Corpus[Any]) -> Outcome:
    """Plans a run, trains, or goes on with what its state folder holds, and measures the end.

    Raises:
        DivergedError: when the loss is no longer finite.
    """
    settings, state_folder, mesh, console = run.settings, run.state_folder, run.mesh, run.console
    drawn = corpus.batches(settings.rows_per_batch, settings.seed)
    on_all = on_every_device(mesh)

    def batches(step: int) -> Any:
        return task.as_batch(drawn(step))

    def begin() -> TrainState:
        params = jax.device_put(task.first_params(), on_all)
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
            name: evaluate(
                params, map(task.as_batch, in_order(held, settings.rows_per_batch, rows))
            )
            for name, held in corpus.validation.items()
            if len(held.tokens)
        }
        return figures | (task.decode(params) if task.decode else {})

    console.print(
        f"{task.num_params:,} parameters, {plan.num_steps} steps of "
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
    rates = [record["tokens_per_second"] for record in history.records if "loss" in record]
    rate = statistics.median(rates) if rates else None
    metrics = {
        "parameters": task.num_params,
        "steps": plan.num_steps,
        "dtype": plan.dtype,
        "tokens_trained": plan.num_steps * settings.rows_per_batch * settings.sequence_length,
        "minutes": round(history.seconds / 60, 1),
        "tokens_per_second": None if rate is None else round(rate),
        "flops_per_token": round(efficiency.flops_per_token),
        "peak_gflops_per_second": round(efficiency.peak / 1e9, 1),
        "utilisation": None if rate is None else round(efficiency.utilisation(rate), 4),
        "device": device_name(mesh),
        "tokens_of_one_pass": corpus.tokens_of_one_pass,
        "validation": {
            source: {name: round(value, 4) for name, value in figures.items()}
            for source, figures in validation.items()
        },
    }
    return Outcome(state.params, plan.dtype, metrics, history)
