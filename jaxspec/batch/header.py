"""The header of a job's output: everything that decides its records, as plain values."""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.batch.rows import Row, digest_of
from jaxspec.batch.settings import (
    AnyConfig,
    AnyDrafter,
    JobSettings,
    Shard,
    drafts_change_nothing,
)
from jaxspec.core.loop import round_up
from jaxspec.core.types import PyTree
from jaxspec.decoding.denoise import DenoiseConfig
from jaxspec.decoding.grammars import languages_of
from jaxspec.decoding.request import GenerationConfig, with_rules_of
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import loaded_drafter
from jaxspec.extras import installed_version
from jaxspec.measure.compare import describe

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model, Tokenizer

_SAMPLED = 64
"""Numbers of each array that a header vouches for."""


def job_header(
    model: "Model",
    rows: Sequence[Row],
    config: AnyConfig | None = None,
    drafter: AnyDrafter = None,
    seed: int = 0,
    settings: JobSettings | None = None,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Returns the settings that decide a job's records; a job that is resumed must share them.

    Arguments are those of `run`, except that `rows` are all rows of the job. Rows at once, devices
    and, where outputs are the same either way, drafting are left out: they decide the speed.

    Args:
        model: the target.
        rows: rows of the whole job, other shards included.
        config: settings of decoding.
        drafter: see `run`.
        seed: seed of the randomness.
        settings: settings of the job.
        shard: the part of the rows that this output answers; `None`: all of them.

    Example:
        >>> import jaxspec
        >>> from jaxspec import batch
        >>> header = job_header(jaxspec.load("demo"), batch.rows_of(["Two and two"]), seed=3)
        >>> header["num_rows"], header["seed"], header["shard"]
        (1, 3, '1/1')
    """
    settings, shard = settings or JobSettings(), shard or Shard()
    if isinstance(drafter, SelfSpeculation) and not drafter.num_drafts:
        drafter = None
    steps = "plain" if drafter is None or settings.drafting == "never" else "drafted"
    capacity, weights = settings.capacity, ()
    if not isinstance(drafter, SelfSpeculation):
        weights = loaded_drafter(drafter).params
    config = config or (DenoiseConfig() if model.is_diffusion else GenerationConfig())
    if isinstance(config, GenerationConfig):
        config = with_rules_of(model, config)
    # A given capacity holds what drafts overhang, so drafts decide which rows fit.
    either = capacity is None and drafts_change_nothing(model, config, drafter)
    return {
        "format": 6,
        "jaxspec": installed_version(),
        "model": model.name,
        "architecture": repr(model.config),
        "dtype": str(np.dtype(model.network.dtype)),
        "weights": _sample_of(model.network),
        "tokenizer": _checksum_of(model.tokenizer),
        "stop_token_ids": list(model.stop_token_ids),
        "drafter": describe(drafter),
        "draft_weights": _sample_of(weights),
        "config": _described(config),
        "num_samples": 1 if isinstance(config, DenoiseConfig) else config.num_samples,
        "drafting": "either" if either else steps,
        "capacity": None if capacity is None else round_up(capacity),
        "seed": seed,
        "num_rows": len(rows),
        "rows": digest_of(rows),
        "shard": str(shard),
    }


def header_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Names what two headers say differently; empty if they are equal.

    Example:
        >>> header_differences({"seed": 0, "config": {"top_k": 5}}, {"config": {"top_k": 7}})
        'seed is 0 there and None here; config.top_k is 5 there and 7 here'
    """
    pairs = {name: (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    for name, (there, own) in list(pairs.items()):
        if isinstance(there, Mapping) and isinstance(own, Mapping):
            del pairs[name]
            inner = {**there, **own}
            pairs |= {f"{name}.{key}": (there.get(key), own.get(key)) for key in inner}
    return "; ".join(
        f"{name} is {there!s:.200} there and {own!s:.200} here"
        for name, (there, own) in pairs.items()
        if there != own
    )


def _described(config: AnyConfig) -> dict[str, str]:
    fields = {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, GenerationConfig):
        # A schema may come as a class, whose name says nothing about it.
        fields["json_schema"] = repr(languages_of(None, None, config.json_schema))
    return fields


def _sample_of(weights: PyTree) -> str:
    """Returns a checksum of some numbers of every array, which other weights change."""
    checksum = 0
    for leaf in jax.tree.leaves(weights):
        some = leaf[(0,) * (leaf.ndim - 1)][:_SAMPLED] if leaf.ndim else leaf
        numbers = np.asarray(some)
        # Matrices that are kept in bfloat16 are the same numbers elsewhere in float32.
        if numbers.dtype == jnp.bfloat16:
            numbers = numbers.astype(np.float32)
        checksum = zlib.crc32(numbers.tobytes(), checksum)
    return f"{checksum:08x}"


def _checksum_of(tokenizer: "Tokenizer | None") -> str | None:
    """Returns a checksum of how a tokenizer splits texts and renders chats."""
    if tokenizer is None:
        return None
    parts = [tokenizer.backend.to_str(), *sorted(tokenizer.templates.items())]
    parts += sorted(tokenizer.special_tokens.items())
    return f"{zlib.crc32(repr(parts).encode()):08x}"
