"""What a run of `jaxspec train lm` depends on, and how it is written down."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.models import (
    DynamicScaling,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from jaxspec.training.data import SPLITS, Source

OPTIMIZERS = ("adamw", "muon")
OWN_TEXT = "own-text"
"""How figures name the source that the teacher writes."""
DTYPES = ("float32", "bfloat16")
_SCALINGS = {
    kind.__name__: kind
    for kind in (LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling, LongRopeScaling)
}


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """How weights move.

    name: "adamw", or "muon": orthogonalised momentum for the layers' matrices, Adam for the rest.
    learning_rate: the highest, reached after `warmup_steps`.
    decay_fraction: the last part of the run, in which half a cosine takes the learning rate down
        to `final_fraction` of itself. With less than 1 it is constant before, so that a run may
        be made longer or shorter until then.
    adam_learning_rate: the same for what Muon leaves to Adam; unused by "adamw".
    weight_decay: times the learning rate, each step; norms, biases and embeddings do not decay.
    clip: the largest norm of a whole gradient; larger ones are scaled down to it.
    """

    name: str = "muon"
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.004
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    warmup_steps: int = 50
    decay_fraction: float = 1.0
    final_fraction: float = 0.02
    clip: float = 1.0

    def __post_init__(self):
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer name must be one of {OPTIMIZERS}, got {self.name!r}.")
        for name in ("learning_rate", "adam_learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        for name in ("weight_decay", "warmup_steps", "final_fraction"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction must be in (0, 1], got {self.decay_fraction}.")


@dataclasses.dataclass(frozen=True)
class Pace:
    """How often `fit` does something besides training."""

    save_seconds: float = 120.0
    validate_steps: int = 200
    record_steps: int = 10
    report_seconds: float = 30.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be above 0, got {getattr(self, field.name)}.")


DEMO = ModelConfig(
    vocab_size=4096,
    embed_dim=192,
    num_layers=6,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    mlp_dim=512,
    max_positions=1024,
    tied_head=True,
    rope=Rope(theta=10_000.0),
)
"""About 3 M parameters, Llama format."""


@dataclasses.dataclass(frozen=True)
class LMTrainingSettings:
    """Everything a run depends on, but for the files' contents and the machine.

    model: what to train. Its `vocab_size` is the most the tokenizer may have.
    sources: what to read.
    num_steps: updates; None: as many as fit into `minutes`, timed once at the beginning.
    minutes: of updates; compiling, saving and validation come on top.
    sequence_length, rows_per_batch: tokens of a sequence, sequences of an update.
    layer_drop, early_exit: see `NextToken`.
    dtype: of products, see `NextToken`; "auto": the faster one, timed once at the beginning.
    validation_rows: sequences per source for validation during the run; the end takes all.
    tokenizer: folder with a tokenizer of an earlier run; None: the teacher's, or a new one.
    start_from: folder with weights to begin with; None: random ones.
    teacher: folder with a network whose distributions to learn; None: the text alone.
    soft_share: see `SoftLabels`.
    own_text: how many texts the teacher writes before training, as one more source; see
        `write_own_text`.
    own_text_weight: passes over them while a source of weight 1 is passed once.
    """

    sources: tuple[Source, ...]
    model: ModelConfig = DEMO
    num_steps: int | None = None
    minutes: float | None = 15.0
    sequence_length: int = 384
    rows_per_batch: int = 6
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    layer_drop: float = 0.0
    early_exit: float = 0.0
    dtype: str = "auto"
    seed: int = 0
    validation_rows: int = 24
    tokenizer: str | None = None
    start_from: str | None = None
    teacher: str | None = None
    soft_share: float = 0.9
    own_text: int = 0
    own_text_weight: float = 1.0
    pace: Pace = dataclasses.field(default_factory=Pace)

    def __post_init__(self):
        if not self.sources:
            raise ValueError("sources must name at least one source of text; got none.")
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"sources must have different names; given twice: {repeated}.")
        if self.own_text < 0:
            raise ValueError(f"own_text must be 0 or more, got {self.own_text}.")
        if self.own_text and self.teacher is None:
            raise ValueError("own_text is written by a teacher: name one (--teacher FOLDER).")
        if self.own_text and OWN_TEXT in names:
            raise ValueError(f"The name {OWN_TEXT!r} is taken by own_text: rename that source.")
        if (self.num_steps is None) == (self.minutes is None):
            raise ValueError(
                "Give either num_steps or minutes, and None for the other; got "
                f"num_steps={self.num_steps}, minutes={self.minutes}."
            )
        for name in (
            "num_steps",
            "minutes",
            "sequence_length",
            "rows_per_batch",
            "own_text_weight",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}.")
        if self.sequence_length > self.model.max_positions:
            raise ValueError(
                f"sequence_length must be at most max_positions ({self.model.max_positions}), "
                f"got {self.sequence_length}."
            )
        for name in ("layer_drop", "early_exit"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be 'auto' or one of {DTYPES}, got {self.dtype!r}.")


def settings_to_json(settings: LMTrainingSettings) -> dict[str, Any]:
    """Plain values, as `settings_from_json` reads them."""
    plain = dataclasses.asdict(settings)
    for source, entry in zip(settings.sources, plain["sources"], strict=True):
        entry["split"] = {type(source.split).__name__: entry["split"]}
    for name in ("rope", "sliding_rope"):
        rope, entry = getattr(settings.model, name), plain["model"][name]
        if rope is not None and rope.scaling is not None:
            entry["scaling"] = {type(rope.scaling).__name__: entry["scaling"]}
    return json.loads(json.dumps(plain))


def settings_from_json(plain: Mapping[str, Any]) -> LMTrainingSettings:
    """Settings from plain values; what is left out keeps its default.

    Raises:
        ValueError: a field that does not exist, or a value that is out of range.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        "sources": lambda entries: tuple(_source_from_json(entry) for entry in entries),
        "model": _model_from_json,
        "optimizer": lambda entry: _build(OptimizerSettings, entry),
        "pace": lambda entry: _build(Pace, entry),
    }
    values = {name: readers.get(name, lambda value: value)(value) for name, value in plain.items()}
    return _build(LMTrainingSettings, values)


def default_state_folder(settings: LMTrainingSettings, name: str) -> Path:
    """Where a run of these settings keeps its state: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    identity = json.dumps(settings_to_json(settings), sort_keys=True).encode()
    return Path(cache) / "jaxspec" / "train" / f"{name}-{hashlib.sha256(identity).hexdigest()[:12]}"


def _source_from_json(entry: Mapping[str, Any]) -> Source:
    values = dict(entry)
    if "split" in values:
        values["split"] = _build_one_of("split", SPLITS, values["split"])
    return _build(Source, values)


def _model_from_json(entry: Mapping[str, Any]) -> ModelConfig:
    readers = {
        "rope": _rope_from_json,
        "sliding_rope": _rope_from_json,
        "experts": lambda fields: _build(Experts, fields),
    }
    values = {
        name: readers[name](value) if name in readers and value is not None else value
        for name, value in entry.items()
    }
    # The kinds of layers go by the number of layers unless they are listed.
    base = {field.name: getattr(DEMO, field.name) for field in dataclasses.fields(DEMO)}
    return _build(ModelConfig, base | {"layer_types": ()} | values)


def _rope_from_json(entry: Mapping[str, Any]) -> Rope:
    values = dict(entry)
    if values.get("scaling") is not None:
        values["scaling"] = _build_one_of("scaling", _SCALINGS, values["scaling"])
    return _build(Rope, values)


def _build_one_of(name: str, kinds: Mapping[str, type], entry: Mapping[str, Any]) -> Any:
    """A settings object from its class's name and its fields."""
    [(kind, fields)] = entry.items()
    if kind not in kinds:
        raise ValueError(f"{name} must be one of {sorted(kinds)}, got {kind!r}.")
    return _build(kinds[kind], fields)


def _build(kind: type, values: Mapping[str, Any]) -> Any:
    """A settings object from plain values; lists become tuples."""
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(f"{kind.__name__} has no settings {unknown}; it has {sorted(known)}.")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
