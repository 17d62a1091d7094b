"""The training loop: any objective, any state, batches by step number."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxspec.checkpoint import CheckpointError
from jaxspec.checkpoint.files import naming, parse_json, read_text
from jaxspec.core.checks import Natural, NotNegative, Requirement, checked, shown
from jaxspec.core.types import PyTree
from jaxspec.models import NARROW
from jaxspec.progress import error_console
from jaxspec.sharding import on_every_device
from jaxspec.training.efficiency import Efficiency
from jaxspec.training.optimizer import make_optimizer
from jaxspec.training.settings import OptimizerSettings, TrainingPace
from jaxspec.training.state import StateKeeper, TrainState

StepMetrics = dict[str, Float[Array, ""]]
TrainStep = Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]
Validation = dict[str, dict[str, float]]
"""Figures by source, then by metric."""


# Types of a record's entries; a figure of a held-out text need not be finite.
_Figure = Annotated[Any, Requirement("a number", lambda value: isinstance(value, int | float))]
_HINTS: Mapping[str, Any] = {
    "step": Natural,
    "seconds": NotNegative,
    "validation": Mapping[str, Mapping[str, _Figure]],
}


class DivergedError(FloatingPointError):
    """A loss, gradient or weight is no longer finite."""


class Objective(Protocol):
    """Loss of a model, as a function of weights, a batch and a key.

    Hashable and compared by value, as a frozen dataclass is. A batch is any pytree; it also holds
    what is read but not trained, such as a teacher. The metrics must hold "tokens", the number of
    tokens learned from.
    """

    def __call__(
        self, params: PyTree, batch: Any, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]: ...


def products_in(dtype: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which networks multiply operands of a dtype and sum in float32.

    Args:
        dtype: one of `settings.DTYPES`.
    """
    return jax.default_matmul_precision(NARROW if dtype == "bfloat16" else "highest")


def same_choice(
    first: Float[Array, "*places vocab"], second: Float[Array, "*places vocab"]
) -> Bool[Array, "*places"]:
    """Returns True where two networks find the same token the likeliest."""
    # Comparing with the maximum is several times faster on CPUs than an arg-max.
    best = [logits >= jnp.max(logits, axis=-1, keepdims=True) for logits in (first, second)]
    return jnp.any(best[0] & best[1], axis=-1)


def make_evaluation(
    objective: Objective,
) -> Callable[[PyTree, Iterable[Any]], dict[str, float]]:
    """Returns a function of weights and batches: the objective's metrics, averaged over tokens."""
    measure = jax.jit(lambda params, batch: objective(params, batch, jax.random.key(0))[1])

    def evaluate(params: PyTree, batches: Iterable[Any]) -> dict[str, float]:
        totals: dict[str, float] = {}
        for batch in batches:
            metrics = {name: float(value) for name, value in measure(params, batch).items()}
            tokens = metrics.pop("tokens")
            for name, value in (metrics | {"tokens": 1.0}).items():
                totals[name] = totals.get(name, 0.0) + value * tokens
        tokens = totals.pop("tokens")
        return {name: total / tokens for name, total in totals.items()}

    return evaluate


def run_record(line: str) -> dict[str, Any]:
    """Returns the record of a line: of a step's figures, or of a validation's.

    Raises:
        ValueError: saying what is wrong.
    """
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"it must be an object, got {shown(record)}")
    needed = ("step", "seconds", *(("tokens_per_second",) if "loss" in record else ()))
    if missing := [name for name in needed if name not in record]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return {name: checked(name, value, _HINTS.get(name, _Figure)) for name, value in record.items()}


class History:
    """A run's figures, one line of JSON each, in a file that outlives the run."""

    def __init__(self, path: Path, record_in: Callable[[str], dict[str, Any]] = run_record):
        """Reads what the file holds, if there is one.

        Args:
            path: the file.
            record_in: reads a line, or raises a `ValueError` that says what is wrong with it.

        Raises:
            CheckpointError: a line is no such record.
        """
        self.path = path
        self.records: list[dict[str, Any]] = []
        *lines, last = read_text(path).split("\n") if path.exists() else [""]
        # A killed run may leave half a line at the end; no half of an object is valid JSON.
        with contextlib.suppress(ValueError):
            parse_json(last)
            lines.append(last)
        for number, line in enumerate(lines, start=1):
            try:
                self.records.append(record_in(line))
            except ValueError as error:
                raise CheckpointError(
                    f"{path}:{number} is no record of a run ({error}): the file is damaged; begin "
                    "anew, with another folder for the state."
                ) from None

    @property
    def seconds(self) -> float:
        """Seconds of updates so far, without compiling, saving and validating."""
        return max((record["seconds"] for record in self.records), default=0.0)

    def add(self, **record: Any) -> None:
        """Adds a record, in the file too."""
        self.records.append(record)
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Forgets the steps past `step`, which a resumed run does again."""
        self.records = [record for record in self.records if record["step"] <= step]
        # Under another name first: the figures outlive a run that is killed here.
        draft = self.path.with_name(self.path.name + ".draft")
        with naming(self.path):
            draft.write_text("".join(json.dumps(record) + "\n" for record in self.records))
            draft.replace(self.path)


def make_train_step(
    objective: Objective,
    settings: OptimizerSettings,
    num_steps: int,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> TrainStep:
    """Returns a compiled update of a run of `num_steps` steps, which donates the state.

    Equal objectives, settings, seeds and meshes share a compilation for any number of steps.

    Args:
        objective: what to train for.
        settings: settings of the optimizer.
        num_steps: steps of the whole run.
        seed: seed of the draws of the objective.
        mesh: devices that each keep the whole state; batches lie where they were put. `None`: all
            on one device.
    """
    return partial(
        _update,
        num_steps=np.int32(num_steps),
        objective=objective,
        settings=settings,
        seed=seed,
        mesh=mesh,
    )


@partial(
    jax.jit, static_argnames=("objective", "settings", "seed", "mesh"), donate_argnames="state"
)
def _update(
    state: TrainState,
    batch: Any,
    *,
    num_steps: Int[Array, ""],
    objective: Objective,
    settings: OptimizerSettings,
    seed: int,
    mesh: Mesh | None,
) -> tuple[TrainState, StepMetrics]:
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    differentiate = jax.value_and_grad(objective, has_aux=True)
    (loss, metrics), gradient = differentiate(state.params, batch, key)
    optimizer = make_optimizer(settings, num_steps)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    figures = {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}
    state = TrainState(state.step + 1, params, opt_state)
    if mesh is not None:
        state = jax.lax.with_sharding_constraint(state, on_every_device(mesh))
    return state, metrics | figures


def fit(
    train_step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any],
    num_steps: int,
    *,
    keeper: StateKeeper | None = None,
    history: History | None = None,
    validate: Callable[[PyTree], Validation] | None = None,
    pace: TrainingPace | None = None,
    efficiency: Efficiency | None = None,
    console: Console | None = None,
) -> TrainState:
    """Trains up to step `num_steps`, from the newest state kept or else from `state`.

    A run that was killed and is resumed by another call ends with the same bits as a run left
    alone, on the same machine and versions.

    Args:
        train_step: such as `make_train_step` returns; may donate the state.
        state: state to begin with if none was saved.
        batches: from a step, counted from 0, to what `train_step` learns from.
        num_steps: updates in all, those before a resume included.
        keeper: saves the state at intervals and at the end; `None`: nothing is kept.
        history: takes the figures; a resume drops those of steps that were lost.
        validate: measures weights at intervals and at the end.
        pace: the intervals.
        efficiency: turns a rate of tokens into a share of the devices' peak; `None`: not shown.
        console: where progress goes; standard error unless given.

    Raises:
        DivergedError: when a figure or a weight is not finite. The states kept are from before.
        ValueError: when the state is past `num_steps` already.
    """
    pace = pace or TrainingPace()
    if keeper is not None:
        state = keeper.restore(state) or state
    first = int(state.step)
    if first > num_steps:
        raise ValueError(
            f"num_steps is {num_steps}, but the state to resume is of step {first}: train "
            "longer, or begin with another state folder."
        )
    if history is not None:
        history.rewind(first)
    watch = _Watch(first, num_steps, pace, history, efficiency, console or error_console())
    saved_at = time.monotonic()
    unread = None
    with watch.bar:
        for step in range(first + 1, num_steps + 1):
            state, metrics = train_step(state, batches(step - 1))
            # The figures of a step are read while the next one is computed.
            if unread is not None:
                watch.read(*unread)
            unread = (step, metrics)

            last = step == num_steps
            to_save = last or time.monotonic() - saved_at > pace.save_seconds
            to_validate = last or step % pace.validate_steps == 0
            if not (to_save or to_validate):
                continue
            watch.read(*unread)
            unread = None
            if to_save and keeper is not None:
                _check_weights(state)
                keeper.save(state)
                saved_at = time.monotonic()
            if to_validate and validate is not None:
                watch.validated(step, validate(state.params))
            watch.restart_clock()
    return state


def _check_weights(state: TrainState) -> None:
    weights = jax.tree_util.tree_leaves_with_path(state.params)
    broken = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, weight in weights
        if not bool(jnp.all(jnp.isfinite(weight)))
    ]
    if broken:
        raise DivergedError(
            f"Step {int(state.step)}: weights are not finite in {', '.join(broken)}. "
            "Lower learning_rate or clip; the last state saved is from before."
        )


class _Watch:
    """Progress of a run: a bar on a terminal, lines elsewhere, records in a file."""

    def __init__(
        self,
        first: int,
        num_steps: int,
        pace: TrainingPace,
        history: History | None,
        efficiency: Efficiency | None,
        console: Console,
    ):
        self.num_steps, self.pace, self.history, self.console = num_steps, pace, history, console
        self.efficiency = efficiency
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(
            "training", completed=first, total=num_steps, figures="compiling"
        )
        self.seconds = 0.0 if history is None else history.seconds
        self.clock: float | None = None
        self.unrecorded: list[dict[str, float]] = []
        self.span, self.tokens = 0.0, 0.0
        self.reported_at = time.monotonic()

    def read(self, step: int, metrics: StepMetrics) -> None:
        """Waits for the figures of a step and adds them to the sums."""
        figures = {name: float(value) for name, value in metrics.items()}
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(figures[name]):
                raise DivergedError(
                    f"Step {step}: {name} is {figures[name]}. Lower learning_rate or clip; the "
                    "last state saved is from before."
                )
        self.unrecorded.append(figures)
        now = time.monotonic()
        if self.clock is not None:
            self.span += now - self.clock
            self.seconds += now - self.clock
            self.tokens += figures["tokens"]
        self.clock = now
        if step % self.pace.record_steps == 0 or step == self.num_steps:
            self._record(step)

    def _record(self, step: int) -> None:
        """Averages over the steps since the last record; writes and shows the means."""
        count = len(self.unrecorded)
        means = {
            name: sum(figures[name] for figures in self.unrecorded) / count
            for name in self.unrecorded[0]
        }
        rate = self.tokens / self.span if self.span else 0.0
        record = means | {"seconds": self.seconds, "tokens_per_second": rate}
        figures = f"loss {means['loss']:.3f}  {rate:,.0f} tokens/s"
        if self.efficiency is not None:
            record["utilisation"] = self.efficiency.utilisation(rate)
            figures += f"  {100 * record['utilisation']:.1f} % of peak"
        self.bar.update(self.task, completed=step, figures=figures)
        if self.history is not None:
            self.history.add(step=step, **{name: round(value, 5) for name, value in record.items()})
        late = time.monotonic() - self.reported_at > self.pace.report_seconds
        if not self.console.is_terminal and (late or step == self.num_steps):
            self._say(f"step {step}/{self.num_steps}  {figures}")
            self.reported_at = time.monotonic()
        self.unrecorded, self.span, self.tokens = [], 0.0, 0.0

    def validated(self, step: int, validation: Validation) -> None:
        """Writes and shows the figures of a validation."""
        if self.history is not None:
            self.history.add(step=step, seconds=round(self.seconds, 5), validation=validation)
        parts = [
            name + " " + " ".join(f"{metric} {value:.3f}" for metric, value in figures.items())
            for name, figures in validation.items()
        ]
        self._say(f"step {step}  held out: " + "; ".join(parts))

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def restart_clock(self) -> None:
        """Leaves the time since the last figures out of every rate."""
        self.clock = time.monotonic()
