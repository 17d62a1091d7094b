"""Search over the sets of attention and MLP sub-layers to skip in drafting.

Zhang et al. 2024 search by Bayesian optimization. Here each method is a function from the
evaluations so far to the next set. So an interrupted search continues from its trace as if it had
not been interrupted, and all methods have the same first sets and the same budget.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import jax
import numpy as np

from jaxspec.checkpoint.files import CheckpointError, parse_json, replacing_files, write_json
from jaxspec.core.checks import Natural, checked
from jaxspec.drafters.skip_sets import skipped_layers, skips_of
from jaxspec.extras import needs_extra
from jaxspec.models import Network, Skips
from jaxspec.models.storage import widened
from jaxspec.training.loop import History
from jaxspec.tuning.skip_objective import SkipScore

_LARGEST_SHARE = 0.75  # of the sub-layers, in a random set
# Candidates of Bayesian optimization: neighbours of the best sets, walks from each, random sets.
_BEST = 5
_WALKS = 60
_DRAWS = 300
_EXPLORATION = 1.0  # standard deviations


class Evaluation(NamedTuple):
    """One set and its score."""

    skip: Skips
    score: SkipScore

    @property
    def seconds(self) -> float:
        """Seconds per token, the objective."""
        return self.score.seconds_per_token


SkipObjective = Callable[[Skips], SkipScore]
Method = Callable[[Sequence[Evaluation], np.random.Generator], Skips | None]
"""Returns the next set, given the evaluations so far (at least one); `None` ends the search."""


def uniform_sets(num_layers: int) -> list[Skips]:
    """Returns the first sets of every search: nothing skipped, then every 4th, 3rd, 2nd layer.

    They keep the first and the last layer, which matter most; a search may skip those later.

    Example:
        >>> [sum(skip.mlp) for skip in uniform_sets(12)]
        [0, 2, 3, 5]
    """
    inner = range(1, num_layers - 1)
    every = [[layer for layer in inner if layer % step == step - 1] for step in (4, 3, 2)]
    sets = [skips_of(num_layers, layers, layers) for layers in ([], *every)]
    return list(dict.fromkeys(sets))  # shallow networks have fewer


def propose_random(history: Sequence[Evaluation], rng: np.random.Generator) -> Skips | None:
    """Draws a share of sub-layers to skip, up to three quarters, and then the sub-layers."""
    seen = {evaluation.skip for evaluation in history}
    size = 2 * len(history[0].skip.attention)
    for _ in range(1000):
        share = rng.uniform(0, _LARGEST_SHARE)
        skip = _from_bits(rng.uniform(size=size) < share)
        if skip not in seen:
            return skip
    return None


def propose_greedily(history: Sequence[Evaluation], rng: np.random.Generator) -> Skips | None:
    """Takes the best of all single changes, again and again, until no change is better.

    It starts from the best of the first sets. A change skips one sub-layer more or one less.
    """
    del rng
    seen = {evaluation.skip: evaluation.seconds for evaluation in history}
    first = uniform_sets(len(history[0].skip.attention))
    here = min(filter(seen.__contains__, first), key=seen.__getitem__)
    while True:
        neighbours = list(_neighbours(here))
        for skip in neighbours:
            if skip not in seen:
                return skip
        best = min(neighbours, key=seen.__getitem__)
        if seen[best] >= seen[here]:
            return None
        here = best


def propose_by_bayes(history: Sequence[Evaluation], rng: np.random.Generator) -> Skips | None:
    """Returns the set with the best upper confidence bound of a Gaussian process over all sets.

    The process predicts the logarithm of the seconds. The candidates are neighbours of the best
    sets, at one change and at several, and random sets, because sets are discrete: a gradient in
    continuous coordinates mostly leads back to its start.

    Raises:
        MissingExtra: the package `bayesian-optimization` is not installed.
    """
    with needs_extra("Bayesian optimization", "search"):
        from bayes_opt import BayesianOptimization
        from sklearn.gaussian_process.kernels import Matern
    asked = sorted(_asked(history, rng))
    if not asked:
        return None
    names = [f"{index:04d}" for index in range(len(_bits(history[0].skip)))]
    optimizer = BayesianOptimization(
        None, {name: (0.0, 1.0) for name in names}, random_state=0, verbose=0
    )
    kernel = Matern(length_scale=math.sqrt(len(names)), length_scale_bounds=(0.3, 100.0), nu=2.5)
    optimizer.set_gp_params(kernel=kernel, alpha=1e-4, n_restarts_optimizer=0)

    def named(skip: Skips) -> dict[str, float]:
        return dict(zip(names, map(float, _bits(skip)), strict=True))

    for evaluation in history:
        optimizer.register(named(evaluation.skip), -math.log(evaluation.seconds))
    mean, spread = optimizer.predict([named(skip) for skip in asked], return_std=True)
    return asked[int(np.argmax(mean + _EXPLORATION * spread))]


METHODS: dict[str, Method] = {
    "bayes": propose_by_bayes,
    "random": propose_random,
    "greedy": propose_greedily,
}


def _asked(history: Sequence[Evaluation], rng: np.random.Generator) -> set[Skips]:
    size = len(_bits(history[0].skip))
    asked = set()
    for evaluation in sorted(history, key=lambda each: each.seconds)[:_BEST]:
        asked.update(_neighbours(evaluation.skip))
        bits = _bits(evaluation.skip)
        for _ in range(_WALKS):
            changed = rng.uniform(size=size) < rng.choice([2, 3, 4, 6]) / size
            asked.add(_from_bits(bits ^ changed))
    for _ in range(_DRAWS):
        asked.add(_from_bits(rng.uniform(size=size) < rng.uniform(0, _LARGEST_SHARE)))
    return asked - {evaluation.skip for evaluation in history}


def _bits(skip: Skips) -> np.ndarray:
    return np.array([*skip.attention, *skip.mlp], bool)


def _from_bits(bits: np.ndarray) -> Skips:
    attention, mlp = np.split(bits, 2)
    return Skips(tuple(attention.tolist()), tuple(mlp.tolist()))


def _neighbours(skip: Skips) -> Iterator[Skips]:
    bits = _bits(skip)
    for index in range(len(bits)):
        changed = bits.copy()
        changed[index] ^= True
        yield _from_bits(changed)


class SearchTrace:
    """A file with the evaluations of some searches, one line of JSON each.

    The first line describes what was searched; a trace of something else is refused. It also holds
    what was measured at the beginning, so that a continued search uses the same numbers.

    Attributes:
        measured: result of `measure` when the trace began.
    """

    def __init__(
        self,
        path: Path,
        num_layers: int,
        about: Mapping[str, Any],
        measure: Callable[[], Any] = lambda: None,
    ):
        """Opens a trace, or begins one.

        Args:
            path: the file.
            num_layers: layers of the network.
            about: everything that the evaluations depend on, as plain values.
            measure: returns plain values; called when a trace begins.

        Raises:
            ValueError: the file is a trace of another model or of other settings.
        """
        try:
            self._history = History(path, parse_json)
        except CheckpointError as error:
            raise ValueError(f"{path} is not a trace of `jaxspec tune skips`: {error}") from None
        about = json.loads(json.dumps({"num_layers": num_layers, **about}))
        records = self._history.records
        known = about
        if records:
            if not all(
                isinstance(record, dict) and type(record.get("step")) is int for record in records
            ) or not ({"about", "measured"} <= records[0].keys()):
                raise ValueError(
                    f"{path} is not a trace of `jaxspec tune skips`; name another folder, or "
                    "move it away."
                )
            number = 1
            try:
                known = checked("about", records[0]["about"], Mapping[str, Any])
                for record in records[1:]:
                    number += 1
                    _evaluation_of(record, num_layers)
            except ValueError as error:
                raise ValueError(
                    f"{path}:{number} is not of `jaxspec tune skips`: {error} Name another folder, "
                    "or move it away."
                ) from None
        different = sorted(
            name for name in known.keys() | about.keys() if known.get(name) != about.get(name)
        )
        if different:
            raise ValueError(
                f"{path} is the trace of another search: {', '.join(different)} differ. Name "
                "another folder, or move the trace away."
            )
        if records:
            # An interrupted search may have left half a line at the end.
            self._history.rewind(len(records))
        else:
            self._history.add(step=0, about=about, measured=measure())
        self.num_layers = num_layers
        self.measured = json.loads(json.dumps(self._history.records[0]["measured"]))

    def evaluations(self, name: str) -> list[Evaluation]:
        """Evaluations of the search of that name, in order."""
        return [
            _evaluation_of(record, self.num_layers)
            for record in self._history.records[1:]
            if record["search"] == name
        ]

    def seconds(self, name: str) -> float | None:
        """Seconds of the search of that name so far; `None` if the trace does not record them."""
        records = [record for record in self._history.records[1:] if record["search"] == name]
        if not all("seconds" in record for record in records):
            return None
        return sum(record["seconds"] for record in records)

    def add(self, name: str, evaluation: Evaluation, seconds: float) -> None:
        """Adds an evaluation; `seconds` is the time of choosing and evaluating the set."""
        self._history.add(
            step=len(self._history.records),
            search=name,
            seconds=seconds,
            **skipped_layers(evaluation.skip),
            score=evaluation.score._asdict(),
        )


def _evaluation_of(record: Mapping[str, Any], num_layers: int) -> Evaluation:
    """Reads a line of a trace that `SearchTrace.add` wrote.

    Raises:
        ValueError: naming the entry that is missing or wrong.
    """
    checked("search", record.get("search"), str)
    checked("seconds", record.get("seconds", 0.0), float)
    attention, mlp = (checked(n, record.get(n), tuple[Natural, ...]) for n in ("attention", "mlp"))
    stated = checked("score", record.get("score"), Mapping[str, Any])
    score = {
        name: checked(f"score.{name}", stated.get(name), hint)
        for name, hint in get_type_hints(SkipScore).items()
    }
    return Evaluation(skips_of(num_layers, attention, mlp), SkipScore(**score))


def search(
    objective: SkipObjective,
    method: Method,
    num_evaluations: int,
    trace: SearchTrace,
    name: str,
    *,
    seed: int = 0,
    watch: Callable[[Sequence[Evaluation]], None] = lambda history: None,
) -> list[Evaluation]:
    """Evaluates sets until the budget is used up or the method ends; continues from the trace.

    Args:
        objective: returns the score of a set; lower seconds are better.
        method: one of `METHODS`.
        num_evaluations: evaluations in all, those in the trace included.
        trace: receives every evaluation.
        name: name of this search in the trace.
        seed: seed of the method's draws.
        watch: called with all evaluations after each one.
    """
    history = trace.evaluations(name)[:num_evaluations]
    first = uniform_sets(trace.num_layers)
    while len(history) < num_evaluations:
        start, place = time.perf_counter(), len(history)
        rng = np.random.default_rng((seed, place))
        skip = first[place] if place < len(first) else method(history, rng)
        if skip is None:
            break
        history.append(Evaluation(skip, objective(skip)))
        trace.add(name, history[-1], time.perf_counter() - start)
        watch(history)
    return history


def best_of(history: Sequence[Evaluation]) -> Evaluation:
    """Returns the evaluation with the fewest seconds per token."""
    return min(history, key=lambda evaluation: evaluation.seconds)


def network_fingerprint(network: Network) -> str:
    """Names a network: a hash of its unusual settings and of the beginning of every weight."""
    config = network.config
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    settings = {name: value for name, value in vars(config).items() if value != usual[name]}
    digest = hashlib.sha256(repr(settings).encode())
    for leaf in jax.tree.leaves(widened(network).params):
        digest.update(np.asarray(leaf.reshape(-1)[:4096]).tobytes())
    return digest.hexdigest()[:16]


def write_result(folder: Path, best: Evaluation, facts: Mapping[str, Any]) -> None:
    """Writes `skips.json`, which `LayerSkip.read` reads, with `facts` as further fields."""
    score = best.score
    result = {
        "num_layers": len(best.skip.attention),
        **skipped_layers(best.skip),
        "num_speculative_tokens": score.num_speculative_tokens,
        "threshold": score.threshold,
        "seconds_per_token": score.seconds_per_token,
        "tau_bonus_included": score.tau,
        "drafted_per_step": score.drafted,
        "acceptance_rate_bonus_excluded": score.acceptance_rate,
        "agreement": score.agreement,
        **facts,
    }
    with replacing_files(folder) as staging:
        write_json(staging / "skips.json", json.loads(json.dumps(result)))
