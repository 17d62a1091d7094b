"""What a run of training depends on, and how it is written down."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.core.tree import EAGLE_PATHS, normalize_paths
from jaxspec.models import (
    Diffusion,
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
TARGET = "target"
"""How a state folder names the files of the target among those of the sources."""
DECODING = "decoding"
"""How figures name what decoding with a head gave."""
TAU = "tau_with_bonus"
"""Tokens per target pass; says its convention wherever it is printed."""
EAGLE_VERSIONS = (1, 3)
DEER_STAGES = (1, 2)
CUTS = ("one", "all")
DTYPES = ("float32", "bfloat16")
# Settings of the trainers that name a model's folder.
_MODELS = (TARGET, "teacher", "start_from", "tokenizer")
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


SMALL = ModelConfig(
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
"""About 3 M parameters, Llama format: a first run takes minutes on a CPU."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run of any trainer depends on, but for the files' contents and the machine.

    sources: what to read.
    num_steps: updates; None: as many as fit into `minutes`, timed once at the beginning.
    minutes: of updates; compiling, saving and validation come on top.
    sequence_length, rows_per_batch: tokens of a sequence, sequences of an update.
    dtype: of products, see `NextToken`; "auto": the faster one, timed once at the beginning.
    validation_rows: sequences per source for validation during the run; the end takes all.
    own_text: how many texts the teacher or target writes before training, as one more source; see
        `write_own_text`.
    """

    sources: tuple[Source, ...]
    _: dataclasses.KW_ONLY
    num_steps: int | None = None
    minutes: float | None = 15.0
    sequence_length: int = 384
    rows_per_batch: int = 6
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    dtype: str = "auto"
    seed: int = 0
    validation_rows: int = 24
    own_text: int = 0
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
        if self.own_text and OWN_TEXT in names:
            raise ValueError(f"The name {OWN_TEXT!r} is taken by own_text: rename that source.")
        if (self.num_steps is None) == (self.minutes is None):
            raise ValueError(
                "Give either num_steps or minutes, and None for the other; got "
                f"num_steps={self.num_steps}, minutes={self.minutes}."
            )
        check_positive(self, "num_steps", "minutes", "sequence_length", "rows_per_batch")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be 'auto' or one of {DTYPES}, got {self.dtype!r}.")

    @property
    def models_read(self) -> dict[str, str]:
        """Folders of models that the run depends on, by the name of their setting."""
        folders = {name: getattr(self, name, None) for name in _MODELS}
        return {name: folder for name, folder in folders.items() if folder is not None}

    @property
    def files_read(self) -> dict[str, str]:
        """Other files that the run depends on, by the name of their setting."""
        return {}


def check_positive(settings: RunSettings, *names: str) -> None:
    """Refuses settings that are given and not above 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")


@dataclasses.dataclass(frozen=True)
class LMTrainingSettings(RunSettings):
    """What a run of `train_lm` depends on besides.

    model: what to train. Its `vocab_size` is the most the tokenizer may have.
    layer_drop, early_exit: see `NextToken`.
    tokenizer: folder with a tokenizer of an earlier run; None: the teacher's, or a new one.
    start_from: folder with weights to begin with; None: random ones.
    teacher: folder with a network whose distributions to learn; None: the text alone.
    soft_share: see `SoftLabels`.
    own_text_weight: passes over the teacher's own texts while a source of weight 1 is passed once.
    """

    model: ModelConfig = SMALL
    layer_drop: float = 0.0
    early_exit: float = 0.0
    tokenizer: str | None = None
    start_from: str | None = None
    teacher: str | None = None
    soft_share: float = 0.9
    own_text_weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.own_text and self.teacher is None:
            raise ValueError("own_text is written by a teacher: name one (--teacher FOLDER).")
        check_positive(self, "own_text_weight")
        if self.sequence_length > self.model.max_positions:
            raise ValueError(
                f"sequence_length must be at most max_positions ({self.model.max_positions}), "
                f"got {self.sequence_length}."
            )
        for name in ("layer_drop", "early_exit"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class MaskedTrainingSettings(RunSettings):
    """What a run of `train_masked` depends on besides.

    block: the network sees its own block of so many slots and all blocks before it; 0: both sides.
    shift: the output at a slot decides the next slot; None: as the model of `start_from` does it,
        where a causal one is kept as it is (True); for random weights False.
    start_from: folder of a causal or a diffusion model with weights to begin with; None: random
        ones of `model`.
    layers: which layers of `start_from` to keep, in this order; None: all.
    model: what to train where `start_from` is None; its `diffusion` is set from the rest.
    tokenizer: folder with the tokenizer; None: that of `start_from`.
    random_lengths, answers_only: see `MaskedTokens`.
    teacher: folder of a model, causal or diffusion, that writes `own_text` texts to be read too;
        None: nobody.
    own_text_weight: passes over those texts while a source of weight 1 is passed once.
    """

    block: int = 0
    shift: bool | None = None
    start_from: str | None = None
    layers: tuple[int, ...] | None = None
    model: ModelConfig = SMALL
    tokenizer: str | None = None
    random_lengths: float = 0.01
    answers_only: bool = False
    teacher: str | None = None
    own_text_weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.tokenizer is None and self.start_from is None:
            raise ValueError(
                "A tokenizer is needed: name a folder with one (--tokenizer FOLDER), or a model to "
                "start from (--start-from FOLDER)."
            )
        if bool(self.own_text) != (self.teacher is not None):
            raise ValueError(
                "teacher and own_text go together: name who writes (--teacher FOLDER) and how many "
                f"texts (--own-text N); got teacher={self.teacher!r}, own_text={self.own_text}."
            )
        if self.layers is not None and self.start_from is None:
            raise ValueError("layers are those of start_from: name a model (--start-from FOLDER).")
        check_positive(self, "own_text_weight")
        if self.block < 0:
            raise ValueError(f"block must be 0 (both sides) or more, got {self.block}.")
        if not 0 <= self.random_lengths <= 1:
            raise ValueError(f"random_lengths must be in [0, 1], got {self.random_lengths}.")


@dataclasses.dataclass(frozen=True)
class DraftingSettings(RunSettings):
    """What a run depends on besides that makes a drafter for a target.

    The prompts of the target's own texts are the beginnings of the sources' documents.

    target: folder of the causal model to draft for.
    decoding_prompts: how many held-out beginnings each validation decodes; 0: none.
    """

    target: str
    _: dataclasses.KW_ONLY
    decoding_prompts: int = 8

    def __post_init__(self):
        super().__post_init__()
        ours = {DECODING, *self.models_read, *self.files_read}
        taken = ours & {source.name for source in self.sources}
        if taken:
            raise ValueError(f"The names {sorted(taken)} are taken: rename these sources.")
        if self.decoding_prompts < 0:
            raise ValueError(f"decoding_prompts must be 0 or more, got {self.decoding_prompts}.")


@dataclasses.dataclass(frozen=True)
class EagleTrainingSettings(DraftingSettings):
    """What a run of `train_eagle` depends on besides.

    version: 1 for EAGLE-1, whose heads EAGLE-2 uses too; 3 for EAGLE-3.
    sources_weight: passes over a source of weight 1 while the own text is passed once; 0: the
        sources give prompts only.
    draft_vocab: how many tokens the head drafts from, the most frequent ones of the own text (of
        the sources, where there is none); 0: all.
    noise, token_weight: of EAGLE-1, see `FeatureRegression`.
    num_unrolled, decay: of EAGLE-3, see `TrainingTimeTest`.
    taps: of EAGLE-3, layers of the target whose inputs to read; None: `eagle3_taps`.
    cache_features: compute the target's states once and keep them on disk, instead of anew with
        every batch.
    paths: the tree that validation decodes with, as for `tree_from_paths`.
    """

    version: int = 1
    sources_weight: float = 0.0
    draft_vocab: int = 0
    noise: float = 0.1
    token_weight: float = 0.1
    num_unrolled: int = 7
    decay: float = 0.8
    taps: tuple[int, ...] | None = None
    cache_features: bool = False
    paths: tuple[tuple[int, ...], ...] = EAGLE_PATHS

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "paths", normalize_paths(self.paths))
        if not self.paths:
            raise ValueError("paths must have at least one node; got none.")
        if self.version not in EAGLE_VERSIONS:
            raise ValueError(
                f"version must be one of {EAGLE_VERSIONS}, got {self.version}; EAGLE-2 drafts "
                "with the heads of version 1."
            )
        if self.version == 1 and self.taps is not None:
            raise ValueError(f"taps are of EAGLE-3: give version 3 or no taps; got {self.taps}.")
        if not (self.own_text or self.sources_weight):
            raise ValueError(
                "There is nothing to learn from: own_text and sources_weight are both 0. Give "
                "--own-text N or --sources-weight X."
            )
        check_positive(self, "num_unrolled", "decay")
        for name in ("sources_weight", "draft_vocab", "noise", "token_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class AnswersSettings(DraftingSettings):
    """What a run depends on besides whose drafter learns from what its target answers.

    answers: a JSON Lines file of prompts with the target's answers ("prompt", "answer"), read in
        place of texts that the target writes; None: it writes `own_text` of them.
    texts: folder in which the target's texts lie or will lie, so that several runs read the same;
        None: in the run's state folder.
    """

    _: dataclasses.KW_ONLY
    answers: str | None = None
    texts: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if bool(self.own_text) == (self.answers is not None):
            raise ValueError(
                "A drafter learns from what the target answers: let it write texts (--own-text N) "
                f"or give a file of them (--answers FILE), one of both; got own_text="
                f"{self.own_text}, answers={self.answers!r}."
            )
        if self.texts is not None and self.answers is not None:
            raise ValueError(
                f"texts ({self.texts}) are what the target writes itself, and it learns from "
                f"answers ({self.answers}): leave one of them out."
            )

    @property
    def files_read(self) -> dict[str, str]:
        return {} if self.answers is None else {"answers": self.answers}


@dataclasses.dataclass(frozen=True)
class DeerTrainingSettings(AnswersSettings):
    """What a run of `train_deer` depends on besides.

    start_from: folder of the diffusion model to align with the target.
    stage: 1 for `Continuation`, 2 for `Refinement`.
    separator: see `Continuation`.
    longest, alpha, normalise, cuts: of stage 2, see `Refinement`.
    block: tokens of the drafts that validation decodes with.
    """

    start_from: str
    stage: int = 1
    separator: bool | None = None
    longest: int = 96
    alpha: float = 1.01
    normalise: bool = True
    cuts: str = "one"
    block: int = 8

    def __post_init__(self):
        super().__post_init__()
        if self.stage not in DEER_STAGES:
            raise ValueError(f"stage must be one of {DEER_STAGES}, got {self.stage}.")
        if self.cuts not in CUTS:
            raise ValueError(f"cuts must be one of {CUTS}, got {self.cuts!r}.")
        for field in dataclasses.fields(self):
            of_stage_2 = field.name in ("longest", "alpha", "normalise", "cuts")
            if of_stage_2 and self.stage == 1 and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} is a setting of stage 2: leave it out in stage 1, got "
                    f"{getattr(self, field.name)!r}."
                )
        check_positive(self, "longest", "alpha", "block")


@dataclasses.dataclass(frozen=True)
class DFlashTrainingSettings(AnswersSettings):
    """What a run of `train_dflash` depends on besides.

    layers: of the head.
    mlp_dim: hidden units of a layer's MLP; None: as many as the target's layers have.
    taps: layers of the target whose inputs to read; None: `dflash_taps`, as many as `layers`.
    block, anchors, gamma: see `AnchoredBlocks`; validation decodes with drafts of `block` - 1
        tokens. gamma None: 7 for a block of 16, as in the paper, and for others in proportion.
    cache_features: compute the target's states once and keep them on disk, instead of anew with
        every batch.
    """

    layers: int = 2
    mlp_dim: int | None = None
    taps: tuple[int, ...] | None = None
    block: int = 8
    anchors: int = 32
    gamma: float | None = None
    cache_features: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "layers", "mlp_dim", "anchors", "gamma")
        if self.block < 2:
            raise ValueError(
                f"block must be at least 2 slots, the pending token counted, got {self.block}."
            )
        if self.taps is not None and not self.taps:
            raise ValueError("taps must name at least one layer of the target; got none.")

    @property
    def decay(self) -> float:
        """`gamma`, or what it is by default."""
        return 7 / 16 * self.block if self.gamma is None else self.gamma


def settings_to_json(settings: RunSettings) -> dict[str, Any]:
    """Plain values, as `settings_from_json` reads them."""
    plain = dataclasses.asdict(settings)
    for source, entry in zip(settings.sources, plain["sources"], strict=True):
        entry["split"] = {type(source.split).__name__: entry["split"]}
    if isinstance(settings, LMTrainingSettings):
        for name in ("rope", "sliding_rope"):
            rope, entry = getattr(settings.model, name), plain["model"][name]
            if rope is not None and rope.scaling is not None:
                entry["scaling"] = {type(rope.scaling).__name__: entry["scaling"]}
    return json.loads(json.dumps(plain))


Settings = TypeVar("Settings", bound=RunSettings)


def settings_from_json(
    plain: Mapping[str, Any], kind: type[Settings] = LMTrainingSettings
) -> Settings:
    """Settings from plain values; what is left out keeps its default.

    Raises:
        ValueError: a field that does not exist, or a value that is out of range.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        "sources": lambda entries: tuple(_source_from_json(entry) for entry in entries),
        "model": _model_from_json,
        "optimizer": lambda entry: _build(OptimizerSettings, entry),
        "pace": lambda entry: _build(Pace, entry),
        "paths": lambda entries: tuple(map(tuple, entries)),
    }
    values = {name: readers.get(name, lambda value: value)(value) for name, value in plain.items()}
    return _build(kind, values)


def default_state_folder(settings: RunSettings, name: str) -> Path:
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
        "diffusion": lambda fields: _build(Diffusion, fields),
    }
    values = {
        name: readers[name](value) if name in readers and value is not None else value
        for name, value in entry.items()
    }
    # The kinds of layers go by the number of layers unless they are listed.
    base = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(SMALL)}
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
