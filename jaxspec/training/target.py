"""The model that a drafter in training is for: its states, its answers' worth, fitting heads.

States of the target are computed with every batch, or once, and then read by memory map.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import Model, load
from jaxspec.checkpoint.files import recover_files, replacing_files
from jaxspec.core.masks import causal, same_document
from jaxspec.core.types import PyTree
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import LoadedDrafter
from jaxspec.models import ModelConfig, Network, Rope
from jaxspec.progress import progress_bar
from jaxspec.sharding import spread_rows
from jaxspec.training.data import Batches, Corpus, Sequences, in_order
from jaxspec.training.generated import beginnings
from jaxspec.training.loop import Validation
from jaxspec.training.settings import DECODING, TAU, DraftingSettings, RunSettings
from jaxspec.training.train import STORED, Run
from jaxspec.training.vocabulary import TrainingVocabulary


class TargetStates(NamedTuple):
    """States of a target over rows of text.

    Attributes:
        features: states after the final norm, which the output head reads.
        taps: inputs of the tapped layers, concatenated; of width 0 for EAGLE-1.
    """

    features: Float[Array, "*rows length embed"]
    taps: Float[Array, "*rows length tapped"]


class Observed(NamedTuple):
    """A batch with the target whose states or tokens are to be predicted.

    Attributes:
        sequences: rows of text; without the target's states, they are computed when needed.
        target: the target.
        draft_ids: the target's ids of the tokens that a head drafts from, ascending; `None`: all.
        frozen: weights of a head that are read, but not trained; `None`: all are trained.
    """

    sequences: Sequences
    target: Network
    draft_ids: Int[Array, " draft_vocab"] | None = None
    frozen: PyTree | None = None

    def states(self, taps: tuple[int, ...]) -> TargetStates:
        """Returns the target's states over the text: those that were kept, or new ones."""
        kept = self.sequences
        if kept.features is None or kept.taps is None:
            return target_states(self.target, kept, taps)
        return TargetStates(jnp.asarray(kept.features), jnp.asarray(kept.taps))


class OpenedTarget(NamedTuple):
    """The target of a run, its vocabulary, and the layers that a head reads."""

    model: Model
    vocabulary: TrainingVocabulary
    taps: tuple[int, ...]


def load_target(run: Run[DraftingSettings]) -> tuple[Model, TrainingVocabulary]:
    """Loads the model to draft for, with its vocabulary.

    Raises:
        ValueError: no drafter can be trained for it, or `out` is its own folder.
    """
    folder, out = run.settings.target, run.out
    if out is not None and out.resolve() == Path(folder).resolve():
        raise ValueError(f"out must not be the target's own folder, {out}: name another.")
    model = load(folder)
    if model.config.diffusion is not None:
        raise ValueError(f"target must be a causal model, but {folder} is a diffusion one.")
    if model.tokenizer is None:
        raise ValueError(f"The target in {folder} must have a tokenizer.json.")
    return model, TrainingVocabulary.of_model(model, folder)


def head_config(target: ModelConfig, num_layers: int = 1) -> ModelConfig:
    """Returns the layers of a head: of the target's shape, and of the kind that files describe."""
    return ModelConfig(
        vocab_size=target.vocab_size,
        embed_dim=target.embed_dim,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        mlp_dim=target.mlp_dim,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        rope=Rope(theta=target.rope.theta),
    )


def check_length(sequence_length: int, target: Model) -> None:
    """Refuses sequences that are too long for the target.

    Raises:
        ValueError: naming both lengths.
    """
    if sequence_length > target.config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the target's max_positions "
            f"({target.config.max_positions}), got {sequence_length}."
        )


def check_taps(taps: tuple[int, ...], target: Model) -> None:
    """Refuses taps that are no layers of the target.

    Raises:
        ValueError: naming the layers.
    """
    if not taps or not all(0 <= layer < target.config.num_layers for layer in taps):
        raise ValueError(
            f"taps must be layers in 0..{target.config.num_layers - 1} of the target, got {taps}."
        )


def as_stored(params: PyTree, target: Network) -> PyTree:
    """Returns a drafter's weights rounded to `STORED`, on the target's device, in its dtype."""
    (device,) = jax.tree.leaves(target.params)[0].devices()
    params = jax.device_put(params, device)
    return jax.tree.map(lambda leaf: leaf.astype(STORED).astype(target.dtype), params)


def decoding_of(
    run: Run[DraftingSettings],
    model: Model,
    held_out: Mapping[str, Sequences],
    drafter_of: Callable[[PyTree], LoadedDrafter],
) -> Callable[[PyTree], Validation] | None:
    """Returns a function of weights: figures of greedy decoding with their drafter.

    Args:
        run: says how many prompts to decode; its seed draws them.
        model: the target.
        held_out: packed documents by source; prompts are beginnings of them.
        drafter_of: from weights to a drafter.

    Returns:
        The function; `tau_with_bonus` counts tokens per target pass, the bonus token included.
        `None` where there is nothing to decode.
    """
    settings = run.settings
    sources = tuple(rows for rows in held_out.values() if len(rows.tokens))
    if not (settings.decoding_prompts and sources):
        return None
    count = min(settings.decoding_prompts, sum(len(rows.tokens) for rows in sources))
    rows = Batches(sources, (1.0,) * len(sources), count, settings.seed)(0)
    rng = np.random.default_rng((settings.seed, 3))
    prompts, new_tokens = beginnings(rows, model.config.max_positions, rng)
    config = GenerationConfig(max_new_tokens=new_tokens)

    def decode(params: PyTree) -> Validation:
        metrics = generate(model, prompts, config, drafter_of(params)).metrics
        shares = enumerate(metrics.acceptance_per_position, start=1)
        figures = {f"accepted_at_{depth}": share for depth, share in shares}
        return {DECODING: {TAU: metrics.mean_acceptance_length, **figures}}

    return decode


def target_states(
    target: Network, sequences: Sequences, taps: tuple[int, ...] = ()
) -> TargetStates:
    """Returns the states of one pass over rows of documents, which do not see each other."""

    def read(tokens, segments, positions) -> TargetStates:
        mask = causal(len(tokens)) & same_document(segments)
        hidden = target.forward(tokens, positions, mask, None, taps=taps)
        return TargetStates(hidden.features, hidden.taps)

    return jax.lax.stop_gradient(jax.vmap(read)(*map(jnp.asarray, sequences[:3])))


def with_states(
    run: Run[RunSettings], corpus: Corpus, target: Network, taps: tuple[int, ...], features: bool
) -> Corpus:
    """Returns a corpus with the target's states, from files in the run's state folder.

    Args:
        run: the run.
        corpus: rows to observe.
        target: the target, on all devices of the run.
        taps: layers of it whose inputs to keep.
        features: keep its states after the final norm too; False: none of their numbers.
    """
    folder, rows_per_batch = run.state_folder / "features", run.settings.rows_per_batch

    @jax.jit
    def states_of(target: Network, sequences: Sequences) -> TargetStates:
        states = target_states(target, sequences, taps)
        return states if features else states._replace(features=states.features[..., :0])

    def observe(sequences: Sequences) -> TargetStates:
        return states_of(target, spread_rows(run.mesh, sequences))

    def seen(kind: str, texts: dict[str, Sequences]) -> dict[str, Sequences]:
        # By number: a source's name may hold any character.
        filled = {name: rows for name, rows in texts.items() if len(rows.tokens)}
        parts = {name: f"{kind}-{i}" for i, name in enumerate(texts) if name in filled}
        rows = {part: filled[name] for name, part in parts.items()}
        states = cached_states(observe, rows, rows_per_batch, folder)
        return {name: filled[name]._replace(**states[parts[name]]._asdict()) for name in filled}

    return Corpus(
        seen("train", corpus.train), seen("validation", corpus.validation), corpus.weights
    )


def cached_states(
    observe: Callable[[Sequences], TargetStates],
    parts: Mapping[str, Sequences],
    rows_per_batch: int,
    folder: Path,
) -> dict[str, TargetStates]:
    """Returns a target's states over rows of text, in the dtype they were computed in.

    The states lie in one folder per part, which appears when it is complete; parts that are there
    are not computed again.

    Args:
        observe: computes the states of a batch of rows.
        parts: rows by name.
        rows_per_batch: rows of each call of `observe`.
        folder: folder of the states; those that lie there must come from the same rows and target.

    Raises:
        ValueError: the disk has too little space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover_files(folder)
    shapes = {name: _shapes(observe, part, rows_per_batch) for name, part in parts.items()}
    missing = {name: parts[name] for name in parts if not (folder / name).is_dir()}
    _check_space(folder, sum(_num_bytes(shapes[name]) for name in missing))
    num_batches = sum(-(-len(part.tokens) // rows_per_batch) for part in missing.values())
    with progress_bar(num_batches) as advance:
        for name, part in missing.items():
            with replacing_files(folder) as staging:
                (staging / name).mkdir()
                arrays = _open(staging / name, shapes[name], "w+")
                start = 0
                for batch in in_order(part, rows_per_batch):
                    advance("the target's states")
                    for array, values in zip(arrays, observe(batch), strict=True):
                        rows = array[start : start + rows_per_batch]
                        rows[:] = np.asarray(values)[: len(rows)]
                    start += rows_per_batch
                for array in arrays:
                    if isinstance(array, np.memmap):
                        array.flush()
    return {
        # Plain arrays over the maps, because JAX takes no subclasses.
        name: jax.tree.map(np.asarray, TargetStates(*_open(folder / name, shapes[name], "r")))
        for name in parts
    }


def _shapes(observe: Callable, part: Sequences, rows_per_batch: int) -> TargetStates:
    """Returns shapes and dtypes of the states of all rows."""
    size = (rows_per_batch, part.tokens.shape[1])
    batch = jax.tree.map(lambda _: np.zeros(size, np.int32), part)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(part.tokens), *leaf.shape[1:]), leaf.dtype),
        jax.eval_shape(observe, batch),
    )


def _open(folder: Path, shapes: TargetStates, mode) -> list[Any]:
    # A map of no bytes cannot be made.
    return [
        np.memmap(folder / name, shape.dtype, mode, shape=shape.shape)
        if shape.size
        else np.zeros(shape.shape, shape.dtype)
        for name, shape in zip(TargetStates._fields, shapes, strict=True)
    ]


def _num_bytes(shapes: TargetStates) -> int:
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"The target's states take {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} "
            "GB are free: leave out cache_features (--cache-features), read less, or choose "
            "another state folder (--state)."
        )
