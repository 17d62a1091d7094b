"""Settings of training runs, and their form as JSON."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from jaxspec.core.checks import (
    Checked,
    Count,
    FileName,
    Natural,
    NotNegative,
    Positive,
    PositiveOrInfinite,
    Requirement,
    Share,
    above_up_to,
    at_least,
    from_up_to,
    one_of,
    shown,
    within,
)
from jaxspec.core.tree import EAGLE_PATHS, normalize_paths
from jaxspec.models import ModelConfig, Rope
from jaxspec.training.sources import SPLITS, Source, Split, Weight

OPTIMIZERS = ("adamw", "muon")
_MOST_TOKENS = 1 << 24  # of an update; the activations of smaller ones exceed most memories
OWN_TEXT = "own-text"
"""Name of the source that the teacher or the target writes, in figures and recipes."""
TARGET = "target"
"""Name of the target among the files that a state folder keeps fingerprints of."""
DECODING = "decoding"
"""Name of the figures that decoding held-out prompts gives."""
TAU = "tau_with_bonus"
"""Name of tokens per target pass, the bonus token included."""
EAGLE_VERSIONS = (1, 3)
DEER_STAGES = (1, 2)
CUTS = ("one", "all")
SCATTERED = "scattered"
HIDES = (SCATTERED, "suffix")
CROSS_ENTROPY = "cross-entropy"
LOSSES = (CROSS_ENTROPY, "overlap", "hybrid")
DTYPES = ("float32", "bfloat16")
Loss = Annotated[str, one_of(*LOSSES)]
Dtype = Annotated[str, one_of(*DTYPES)]
Version = Annotated[
    int,
    Requirement(
        "1 or 3 (EAGLE-2 drafts with the heads of version 1)",
        lambda value: value in EAGLE_VERSIONS,
        is_interval=False,
    ),
]
BelowOne = Annotated[float, from_up_to(0, 1)]
# Settings of the trainers that name a model's folder.
_MODELS = (TARGET, "teacher", "start_from", "tokenizer")
# Metadata of fields for the command line, as `jaxspec.commands.flags` reads it.
_FOLDER, _FILE, _NO_FLAG = {"metavar": "FOLDER"}, {"metavar": "FILE"}, {"flag": None}


@dataclass(frozen=True)
class OptimizerSettings(Checked):
    """The optimizer of a run and its learning rate.

    Attributes:
        name: "adamw", or "muon": orthogonalised momentum for the matrices of layers and Adam for
            the rest.
        learning_rate: the highest learning rate, reached after the warm-up.
        adam_learning_rate: the same for the weights that "muon" leaves to Adam.
        weight_decay: share of a weight that a step at learning rate 1 removes; norms, biases and
            embeddings do not decay.
        beta1: decay of the mean of gradients in Adam.
        beta2: decay of the mean of squared gradients in Adam.
        warmup_steps: steps in which the learning rate rises to its highest.
        decay_fraction: last part of the run, in which half a cosine takes the learning rate down.
            With less than 1 the length of the run may be changed until this part begins.
        final_fraction: the last learning rate as a share of the highest.
        clip: largest norm of a whole gradient; larger ones are scaled down to it. inf: none are.
    """

    name: str = field(default="muon", metadata={"flag": "--optimizer", "choices": OPTIMIZERS})
    learning_rate: Positive = 0.02
    adam_learning_rate: Positive = 0.004
    weight_decay: NotNegative = 0.1
    beta1: BelowOne = field(default=0.9, metadata=_NO_FLAG)
    beta2: BelowOne = field(default=0.95, metadata=_NO_FLAG)
    warmup_steps: Natural = field(default=50, metadata={"flag": "--warmup"})
    decay_fraction: Annotated[float, above_up_to(0, 1)] = 1.0
    final_fraction: NotNegative = field(default=0.02, metadata=_NO_FLAG)
    clip: PositiveOrInfinite = 1.0


@dataclass(frozen=True)
class TrainingPace(Checked):
    """Intervals at which `fit` does something else than training.

    Attributes:
        save_seconds: between two saved states.
        validate_steps: between two validations.
        record_steps: between two records in the history.
        report_seconds: between two lines of progress where there is no terminal.
    """

    save_seconds: PositiveOrInfinite = 120.0
    validate_steps: Count = 200
    record_steps: Count = 10
    report_seconds: Positive = 30.0


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


@dataclass(frozen=True)
class RunSettings(Checked):
    """Settings of every trainer. They, the files they name and the machine make the run.

    The fields keep the names that the `training.json` files next to trained weights have.

    Attributes:
        sources: text to read.
        num_steps: number of updates; `None`: as many as fit into `minutes`.
        minutes: minutes of updates, timed once at the beginning; compiling, saving and validation
            come on top.
        sequence_length: tokens of a sequence.
        rows_per_batch: sequences of one update, of up to 2**24 tokens in all.
        optimizer: how weights move.
        dtype: dtype of the operands of products; "auto": the faster one, timed once at the
            beginning.
        seed: seed of weights, order and all that is drawn.
        validation_rows: sequences per source for a validation during the run; the last one takes
            all.
        own_text: number of texts that the teacher or the target writes before training, to be read
            as one more source.
        pace: intervals of saving, validation and reports.
    """

    sources: tuple[Source, ...]
    _: KW_ONLY
    num_steps: Count | None = field(default=None, metadata={"flag": "--steps"})
    minutes: Positive | None = 15.0
    sequence_length: Count = 384
    rows_per_batch: Count = field(default=6, metadata={"flag": "--rows"})
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    dtype: str = field(default="auto", metadata={"choices": ("auto", *DTYPES)})
    seed: Natural = 0
    validation_rows: Count = field(default=24, metadata=_NO_FLAG)
    own_text: Natural = 0
    pace: TrainingPace = field(default_factory=TrainingPace)

    def __post_init__(self):
        super().__post_init__()
        if not self.sources:
            raise ValueError("sources must name at least one source of text; got none.")
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"sources must have different names; given twice: {shown(repeated)}.")
        if self.own_text and OWN_TEXT in names:
            raise ValueError(f"The name {OWN_TEXT!r} is taken by own_text: rename that source.")
        tokens = self.rows_per_batch * self.sequence_length
        if tokens > _MOST_TOKENS:
            raise ValueError(
                f"rows_per_batch (--rows) and sequence_length must make an update of at most "
                f"{_MOST_TOKENS:,} tokens, got {self.rows_per_batch} * {self.sequence_length} = "
                f"{tokens:,}; lower one of them."
            )
        if (self.num_steps is None) == (self.minutes is None):
            raise ValueError(
                "Give either num_steps or minutes, and None for the other; got "
                f"num_steps={self.num_steps}, minutes={self.minutes}."
            )

    @property
    def models_read(self) -> dict[str, str]:
        """Folders of the models that the run depends on, by the name of their setting."""
        folders = {name: getattr(self, name, None) for name in _MODELS}
        return {name: folder for name, folder in folders.items() if folder is not None}

    @property
    def files_read(self) -> dict[str, str]:
        """Other files that the run depends on, by the name of their setting."""
        return {}


@dataclass(frozen=True)
class MatchingSettings(RunSettings):
    """Settings of trainers whose model may match another one's distributions.

    Attributes:
        loss: what is learned from the other model's distributions: "cross-entropy"; "overlap", -log
            of the chance that a drawn token is accepted; "hybrid", from the Kullback-Leibler
            divergence to 1 - that chance, as the chance rises.
    """

    _: KW_ONLY
    loss: str = field(default=CROSS_ENTROPY, metadata={"choices": LOSSES})


@dataclass(frozen=True)
class LMTrainingSettings(MatchingSettings):
    """Settings of `LMTrainer`, after those of every trainer.

    Attributes:
        model: shape of the model to train; its `vocab_size` is the most the tokenizer may have.
            With `start_from`, left out: that model's.
        layer_drop: chance to leave out the last sub-layers, see `NextToken`.
        early_exit: share of the sequences that leave the layers early, see `NextToken`.
        tokenizer: folder with the tokenizer of an earlier run; `None`: that of the teacher or of
            `start_from`, or a new one.
        start_from: folder with weights to begin with; `None`: random ones.
        teacher: folder with the network whose distributions to learn; `None`: the text alone.
        soft_share: weight of the teacher's distributions, see `SoftLabels`.
        own_text_weight: passes over the teacher's texts while a source of weight 1 is passed once.
    """

    model: ModelConfig = SMALL
    layer_drop: BelowOne = 0.0
    early_exit: BelowOne = 0.0
    tokenizer: FileName | None = field(default=None, metadata=_FOLDER)
    start_from: FileName | None = field(default=None, metadata=_FOLDER)
    teacher: FileName | None = field(default=None, metadata=_FOLDER)
    soft_share: Share = 0.9
    own_text_weight: Weight = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.own_text and self.teacher is None:
            raise ValueError("own_text is written by a teacher: name one (--teacher FOLDER).")
        if self.loss != CROSS_ENTROPY and self.teacher is None:
            raise ValueError(
                f"loss {self.loss!r} compares with a teacher's distributions: name one (--teacher "
                "FOLDER), or leave it out."
            )
        if self.start_from is None and self.sequence_length > self.model.max_positions:
            raise ValueError(
                f"sequence_length must be at most max_positions ({self.model.max_positions}), "
                f"got {self.sequence_length}."
            )


@dataclass(frozen=True)
class MaskedTrainingSettings(RunSettings):
    """Settings of `MaskedTrainer`, after those of every trainer.

    Attributes:
        block: tokens of a block; a token sees its own block and all blocks before it. 0: the whole
            text.
        shift: let the output at a token decide the next token; `None`: as the model of
            `start_from` does it, where a causal one keeps its shift; random weights have none.
        start_from: folder of a causal or a diffusion model with weights to begin with; `None`:
            random ones of `model`.
        layers: layers of `start_from` to keep, in this order; `None`: all.
        model: shape of the model to train where `start_from` is `None`; its `diffusion` is set
            from the rest.
        tokenizer: folder with the tokenizer; `None`: that of `start_from`.
        random_lengths: share of the rows that are cut at a random place, see `MaskedTokens`.
        answers_only: hide only what assistants say in chats, for fine-tuning.
        teacher: folder of a causal or a diffusion model that writes `own_text` texts; `None`: none
            are written.
        own_text_weight: passes over those texts while a source of weight 1 is passed once.
    """

    block: Natural = 0
    shift: bool | None = None
    start_from: FileName | None = field(default=None, metadata=_FOLDER)
    layers: tuple[Natural, ...] | None = field(default=None, metadata={"flag": "--keep-layers"})
    model: ModelConfig = SMALL
    tokenizer: FileName | None = field(default=None, metadata=_FOLDER)
    random_lengths: Share = 0.01
    answers_only: bool = False
    teacher: FileName | None = field(default=None, metadata=_FOLDER)
    own_text_weight: Weight = 1.0

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
        names = [entry.name for entry in fields(ModelConfig)]
        given = [name for name in names if getattr(self.model, name) != getattr(SMALL, name)]
        if self.start_from is not None and given:
            raise ValueError(
                f"{', '.join(given)}: with start_from ({self.start_from}) the shape is that of its "
                "model; leave this out (--keep-layers names the layers to keep)."
            )


@dataclass(frozen=True)
class DraftingSettings(MatchingSettings):
    """Settings of trainers of drafters, after those of every trainer.

    The target's texts continue the beginnings of the sources' documents.

    Attributes:
        target: folder of the causal model to draft for.
        decoding_prompts: held-out prompts that every validation decodes; 0: none.
    """

    target: FileName = field(metadata=_FOLDER)
    _: KW_ONLY
    decoding_prompts: Natural = 8

    def __post_init__(self):
        super().__post_init__()
        ours = {DECODING, *self.models_read, *self.files_read}
        taken = ours & {source.name for source in self.sources}
        if taken:
            raise ValueError(f"The names {shown(sorted(taken))} are taken: rename these sources.")


@dataclass(frozen=True)
class EagleTrainingSettings(DraftingSettings):
    """Settings of `EagleTrainer`, after those of every trainer of drafters.

    Attributes:
        version: 1 for EAGLE-1, whose heads EAGLE-2 uses too; 3 for EAGLE-3.
        sources_weight: passes over a source of weight 1 while the target's texts are passed once;
            0: the sources give prompts only.
        draft_vocab: number of tokens to draft from, the most frequent ones of the sources and of
            the target's texts, which count alike; 0: all.
        noise: EAGLE-1: noise on the states that are read, see `FeatureRegression`.
        token_weight: EAGLE-1: weight of the tokens' loss.
        num_unrolled: EAGLE-3: passes of the head over each text, see `TrainingTimeTest`.
        decay: EAGLE-3: weight of a pass over that of the one before.
        taps: EAGLE-3: layers of the target whose inputs to read; `None`: `eagle3_taps`.
        cache_features: compute the target's states once and keep them on disk, instead of anew
            with every batch.
        paths: tree that validation decodes with, and the head after it: a file of
            `jaxspec tune tree`, a JSON list of rank paths, or eagle-25 (the default: EAGLE's 25
            nodes, the root not counted). In Python as for `tree_from_paths`.
    """

    version: Version = field(default=1, metadata={"choices": EAGLE_VERSIONS})
    sources_weight: Annotated[float, within(0, 1e3)] = 0.0
    draft_vocab: Natural = 0
    noise: NotNegative = 0.1
    token_weight: NotNegative = 0.1
    num_unrolled: Count = field(default=7, metadata={"flag": "--unroll"})
    decay: Positive = 0.8
    taps: tuple[Natural, ...] | None = None
    cache_features: bool = False
    paths: tuple[tuple[int, ...], ...] = field(
        default=EAGLE_PATHS, metadata={"flag": "--tree", **_FILE}
    )

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "paths", normalize_paths(self.paths))
        if not self.paths:
            raise ValueError("paths must have at least one node; got none.")
        if self.version == 1 and self.taps is not None:
            raise ValueError(f"taps are of EAGLE-3: give version 3 or no taps; got {self.taps}.")
        if not (self.own_text or self.sources_weight):
            raise ValueError(
                "There is nothing to learn from: own_text and sources_weight are both 0. Give "
                "--own-text N or --sources-weight X."
            )


@dataclass(frozen=True)
class AnswersSettings(DraftingSettings):
    """Settings of trainers whose drafter learns from the target's answers.

    Attributes:
        answers: JSON Lines file of prompts with the target's answers ("prompt", "answer"), read
            instead of texts that the target writes; `None`: it writes `own_text` of them.
        texts: folder of the target's texts, so that several runs read the same; `None`: in the
            run's state folder.
    """

    _: KW_ONLY
    answers: FileName | None = field(default=None, metadata=_FILE)
    texts: FileName | None = field(default=None, metadata=_FOLDER)

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


@dataclass(frozen=True)
class DeerTrainingSettings(AnswersSettings):
    """Settings of `DeerTrainer`, after those of every trainer that reads answers.

    Attributes:
        start_from: folder of the diffusion model to align with the target.
        stage: 1 for `Continuation`, 2 for `Refinement`.
        separator: put [SEP] where an answer is cut; `None`: for drafters that see the whole text.
        hide: stage 1: "scattered" tokens of an answer, or its "suffix", all that a draft may be.
        longest: stage 2, or a suffix: most hidden tokens of an answer.
        alpha: stage 2: weight of a hidden token over that of the next one.
        normalise: stage 2: divide by the sum of the weights.
        cuts: stage 2: cut an answer at "one" place or at "all" places, for drafters that are
            causal over blocks: twice the work for as many ends as there is room for.
        block: tokens of the drafts that validation decodes with.
        markov: stage 2: rank of a Markov head that the drafter gets, by which a token adds to the
            logits of the next one. 0: none.
    """

    start_from: FileName = field(metadata=_FOLDER)
    stage: int = field(default=1, metadata={"choices": DEER_STAGES})
    separator: bool | None = None
    hide: str = field(default=SCATTERED, metadata={"choices": HIDES})
    longest: Count = 96
    alpha: Positive = 1.01
    normalise: bool = True
    cuts: str = field(default="one", metadata={"choices": CUTS})
    block: Count = 8
    markov: Natural = field(default=0, metadata={"metavar": "RANK"})

    def __post_init__(self):
        super().__post_init__()
        late = ("alpha", "normalise", "cuts", "loss", "markov")
        of_stage = {name: 2 for name in late} | {"hide": 1}
        if not self.has_window:
            of_stage["longest"] = 2
        for entry in fields(self):
            stage = of_stage.get(entry.name, self.stage)
            if stage != self.stage and getattr(self, entry.name) != entry.default:
                also = ' and of hide "suffix"' if entry.name == "longest" else ""
                raise ValueError(
                    f"{entry.name} is a setting of stage {stage}{also}: leave it out in stage "
                    f"{self.stage}, got {getattr(self, entry.name)!r}."
                )

    @property
    def has_window(self) -> bool:
        """True if the last `longest` tokens of an answer are hidden at most."""
        return self.stage == 2 or self.hide != SCATTERED


@dataclass(frozen=True)
class DFlashTrainingSettings(AnswersSettings):
    """Settings of `DFlashTrainer`, after those of every trainer that reads answers.

    Attributes:
        layers: layers of the head.
        mlp_dim: hidden units of a layer's MLP; `None`: as many as the target's layers have.
        taps: layers of the target whose inputs to read; `None`: `dflash_taps`, as many as
            `layers`.
        block: places of a block, the pending token counted; validation decodes with drafts of one
            token less, or, with `markov`, of as many tokens.
        anchors: blocks of a sequence in an update.
        gamma: decay length of the weights within a block; `None`: 7 for a block of 16, as in the
            paper, and for others in proportion.
        cache_features: compute the target's states once and keep them on disk, instead of anew
            with every batch.
        markov: rank of a Markov head, by which a token adds to the logits of the next one; every
            place of a block then predicts a token (DSpark). 0: none.
        confidence: train a head too that predicts how likely a token of a block is accepted.
        selector: rank of a path selector, a Markov head that chooses among the 16 likeliest tokens
            of a place, with convolutions of two places around the sub-layers (DFlash 2). 0: none.
        start_from: folder of a DFlash head that stays as it is; only a Markov head, a confidence
            head or both are trained, over it. Its layers and its block are its own. `None`: a whole
            head is trained.
    """

    layers: Count = 2
    mlp_dim: Count | None = None
    taps: tuple[Natural, ...] | None = None
    block: Annotated[int, at_least(2)] = 8
    anchors: Count = 32
    gamma: PositiveOrInfinite | None = None
    cache_features: bool = False
    markov: Natural = field(default=0, metadata={"metavar": "RANK"})
    confidence: bool = False
    selector: Natural = field(default=0, metadata={"metavar": "RANK"})
    start_from: FileName | None = field(default=None, metadata=_FOLDER)

    def __post_init__(self):
        super().__post_init__()
        if self.selector and (self.markov or self.confidence or self.start_from is not None):
            raise ValueError(
                "selector makes a whole head of DFlash 2: leave out markov, confidence and "
                "start_from."
            )
        if self.start_from is not None:
            if not (self.markov or self.confidence):
                raise ValueError(
                    "start_from stays as it is, so say what to train over it: markov or confidence "
                    "(--markov RANK, --confidence)."
                )
            for entry in fields(self):
                of_the_head = entry.name in ("layers", "mlp_dim", "taps", "block")
                if of_the_head and getattr(self, entry.name) != entry.default:
                    raise ValueError(
                        f"{entry.name} is that of the head in start_from: leave it out, got "
                        f"{getattr(self, entry.name)!r}."
                    )
        if self.taps is not None and not self.taps:
            raise ValueError("taps must name at least one layer of the target; got none.")

    def decay_over(self, block: int) -> float:
        """`gamma`, or its default for a block of so many places."""
        return 7 / 16 * block if self.gamma is None else self.gamma


def settings_to_json(settings: RunSettings) -> dict[str, Any]:
    """Returns plain values, as `settings_from_json` reads them.

    >>> from jaxspec.training.sources import Source
    >>> plain = settings_to_json(RunSettings((Source("notes", "notes.txt"),), seed=3))
    >>> plain["seed"], plain["sources"][0]["split"]
    (3, {'EveryNth': {'n': 20}})
    """
    plain = asdict(settings)
    for source, entry in zip(settings.sources, plain["sources"], strict=True):
        entry["split"] = {type(source.split).__name__: entry["split"]}
    if isinstance(settings, LMTrainingSettings | MaskedTrainingSettings):
        for name in ("rope", "sliding_rope"):
            rope, entry = getattr(settings.model, name), plain["model"][name]
            if rope is not None and rope.scaling is not None:
                entry["scaling"] = {type(rope.scaling).__name__: entry["scaling"]}
    return json.loads(json.dumps(plain))


Settings = TypeVar("Settings", bound=RunSettings)


def settings_from_json(
    plain: Mapping[str, Any], kind: type[Settings] = LMTrainingSettings
) -> Settings:
    """Returns settings of a kind from plain values; a field that is left out keeps its default.

    >>> plain = {"sources": [{"name": "notes", "path": "notes.txt"}], "seed": 3}
    >>> settings_from_json(plain, RunSettings).seed
    3

    Raises:
        ValueError: a field that does not exist or is missing, or a value that is out of range.
    """
    return _read(kind, plain, "")


def check_names(kind: Any, plain: Mapping[str, Any], called: str) -> None:
    """Refuses names that are no fields of a dataclass.

    Args:
        kind: the dataclass.
        plain: values by their names.
        called: the noun for messages.

    Raises:
        ValueError: naming them, and the fields.
    """
    names = sorted(entry.name for entry in fields(kind))
    if unknown := sorted(plain.keys() - set(names)):
        raise ValueError(f"{called} has no settings {shown(unknown)}; it has {names}.")


def required(kind: Any) -> tuple[str, ...]:
    """Returns the names of the fields of a dataclass that have no default.

    >>> required(Source)
    ('name', 'path')
    """
    return tuple(
        field.name for field in fields(kind) if field.default is field.default_factory is MISSING
    )


def default_state_folder(settings: RunSettings, name: str) -> Path:
    """Returns the folder in the user's cache that keeps the state of a run of these settings."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    identity = json.dumps(settings_to_json(settings), sort_keys=True).encode()
    return Path(cache) / "jaxspec" / "train" / f"{name}-{hashlib.sha256(identity).hexdigest()[:12]}"


def _read(kind: Any, value: Any, name: str) -> Any:
    """Reads a value of a type from plain values; lists become tuples.

    Args:
        kind: type of the value.
        value: plain values.
        name: where it stands, such as "sources[0].split"; "": at the top.
    """
    kinds: list[Any] = [part for part in get_args(kind) or (kind,) if is_dataclass(part)]
    if kind is Split or len(kinds) > 1:
        # One of several dataclasses stands under its name.
        named = SPLITS if kind is Split else {part.__name__: part for part in kinds}
        if value is None:
            return None
        if not isinstance(value, Mapping) or len(value) != 1 or not named.keys() >= value.keys():
            raise ValueError(
                f"{name} must hold one of {sorted(named)} with its settings, got {shown(value)}."
            )
        [(chosen, value)] = value.items()
        return _read(named[chosen], value, f"{name}.{chosen}")
    if isinstance(value, list | tuple) and (not kinds or get_origin(kind) is tuple):
        part = get_args(kind)[0] if get_origin(kind) is tuple else Any
        return tuple(_read(part, entry, f"{name}[{i}]") for i, entry in enumerate(value))
    if not kinds or value is None:
        return value
    many = "a list of " if get_origin(kind) is tuple else ""
    (kind,) = kinds
    called = name or kind.__name__
    if many or not isinstance(value, Mapping):
        raise ValueError(f"{called} must be {many}settings by their names, got {shown(value)}.")
    known = get_type_hints(kind)
    check_names(kind, value, called)
    before = f"{name}." if name else ""
    # The model's have defaults: those of `SMALL`.
    for absent in required(kind) if kind is not ModelConfig else ():
        if absent not in value:
            raise ValueError(f"{before}{absent} is missing: give it, for it has no default.")
    values = {key: _read(known[key], entry, before + key) for key, entry in value.items()}
    try:
        if kind is not ModelConfig:
            return kind(**values)
        # The kinds of layers follow from the number of layers unless they are listed.
        return SMALL.replace(**{"layer_types": (), **values})
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None
