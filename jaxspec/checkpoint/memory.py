"""Checks, before anything large is allocated, that a network and its caches fit."""

import os
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np

from jaxspec.checkpoint.files import CheckpointError
from jaxspec.checkpoint.params import leaves_by_path
from jaxspec.core.checks import Count, at_least, checks_arguments
from jaxspec.models.config import ModelConfig
from jaxspec.models.storage import is_matrix
from jaxspec.models.transformer import param_shapes

SHORT_TEXT = 1024
"""Tokens of a text that there must be room for: with less, loading is of no use."""

# No text is as long, but a question may be asked about one.
_Tokens = Annotated[int, at_least(0)]
_Texts = Annotated[int, at_least(1)]

_BYTES_LOGIT = 4
_BYTES_SORTED = 64  # of each token of a corpus: ranks, their order, and copies of both
_BYTES_SEARCHED = 8  # of each token of a corpus: itself, and a place in the order


class MemoryEstimate(NamedTuple):
    """Bytes that a network needs.

    Attributes:
        weights: all leaves in the dtype asked for.
        cache: keys and values of `batch_size` texts of `capacity` tokens.
        transient: while loading: the largest leaf's worth twice over, an upper bound on the tensors
            that are read and cast.
    """

    weights: int
    cache: int
    transient: int

    @property
    def total(self) -> int:
        """Loading and decoding do not overlap, so only the larger of the two extras counts."""
        return self.weights + max(self.cache, self.transient)


@checks_arguments
def estimate_memory(
    config: ModelConfig,
    dtype: np.dtype,
    capacity: _Tokens = 0,
    batch_size: _Texts = 1,
    matrices: np.dtype | None = None,
) -> MemoryEstimate:
    """Estimates the memory that the weights and the caches of a network take.

    Args:
        config: the network.
        dtype: of weights and cache.
        capacity: tokens that each row's cache holds.
        batch_size: texts decoded at once.
        matrices: dtype of those that `jaxspec.models.storage` calls matrices; `None`: `dtype`.

    Raises:
        ValueError: an argument is of another type, or below 0.

    Example:
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> estimate_memory(config, np.dtype("float32"), capacity=128).cache
        32768
    """
    narrow = np.dtype(dtype if matrices is None else matrices)
    sizes = [
        leaf.size * (narrow if is_matrix(tuple(path.split("/"))) else np.dtype(dtype)).itemsize
        for path, leaf in leaves_by_path(param_shapes(config)).items()
    ]
    return MemoryEstimate(
        sum(sizes), _cache_bytes(config, dtype, capacity, batch_size), 2 * max(sizes)
    )


def _cache_bytes(config: ModelConfig, dtype: np.dtype, capacity: int, batch_size: int) -> int:
    entries = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return batch_size * capacity * entries * np.dtype(dtype).itemsize


def available_memory() -> int | None:
    """Returns the bytes that can still be allocated on the default device; `None`: unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _available_host_memory()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_network_fits(
    config: ModelConfig, dtype: np.dtype, shares: int = 1, matrices: np.dtype | None = None
) -> None:
    """Refuses, before loading, a network that leaves no room for itself and one short text.

    Args:
        config: the network.
        dtype: of weights and cache.
        shares: devices, each with its own memory, that it is divided over.
        matrices: as for `estimate_memory`.

    Raises:
        CheckpointError: the estimate is larger than the memory that is available; with figures.

    Example:
        >>> from jaxspec.models import ModelConfig
        >>> config = ModelConfig(
        ...     vocab_size=10**8, embed_dim=10**5, num_layers=1, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> check_network_fits(config, np.dtype("bfloat16"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        jaxspec.checkpoint.files.CheckpointError: This network needs ...
    """
    capacity = min(config.max_positions, SHORT_TEXT)
    matrices = np.dtype(dtype if matrices is None else matrices)
    needed = estimate_memory(config, dtype, capacity, matrices=matrices)
    _refuse_if_more(
        needed.total,
        shares,
        f"This network needs {_gigabytes(needed.total)}: weights {_gigabytes(needed.weights)} in "
        f"{matrices.name}, and more by {_gigabytes(needed.transient)} while loading, or by "
        f"{_gigabytes(needed.cache)} for the cache of one text of {capacity} tokens",
        "Use a smaller network, or more devices (mesh)"
        + (", or dtype='bfloat16'." if matrices.itemsize > 2 else "."),
    )


@checks_arguments
def check_cache_fits(
    config: ModelConfig,
    dtype: np.dtype,
    capacity: _Tokens,
    batch_size: _Texts,
    shares: Count = 1,
    scored: _Tokens = 0,
) -> None:
    """Refuses, before decoding with a network that is already loaded, caches that cannot fit.

    Args:
        config: the network.
        dtype: of the cache.
        capacity: tokens that each row's cache holds; 0 without a cache.
        batch_size: texts decoded at once.
        shares: devices, each with its own memory, that they are divided over.
        scored: places of each text that have logits at the same time.

    Raises:
        CheckpointError: the caches are larger than the memory that is available; with figures.
        ValueError: an argument is of another type, or below 0.

    Example:
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> check_cache_fits(config, np.dtype("float32"), capacity=128, batch_size=8)
        >>> check_cache_fits(
        ...     config, np.dtype("float32"), capacity=128, batch_size=10**12
        ... )  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        jaxspec.checkpoint.files.CheckpointError: 1000000000000 texts of 128 tokens need ...
    """
    logits = scored * config.vocab_size * _BYTES_LOGIT
    each = _cache_bytes(config, dtype, capacity, 1) + logits
    check_texts_fit(each, max(capacity, scored), batch_size, shares)


def check_texts_fit(each: int, length: int, batch_size: int, shares: int = 1) -> None:
    """Refuses texts that are held at once and cannot fit.

    Args:
        each: bytes of one text.
        length: tokens of one text.
        batch_size: number of texts.
        shares: devices, each with its own memory, that they are divided over.

    Raises:
        CheckpointError: they are larger than the memory that is available; with figures.
    """
    needed = each * batch_size
    _refuse_if_more(
        needed,
        shares,
        f"{batch_size} texts of {length} tokens need {_gigabytes(needed)} for caches and logits, "
        f"{each // length:,} bytes a token",
        "Decode fewer texts at once, or shorter ones.",
    )


def check_trace_fits(each: int, num_steps: int) -> None:
    """Refuses a trace, before anything is decoded, that cannot fit into the memory of the host.

    Args:
        each: bytes of the record of one step of all rows.
        num_steps: steps that may be taken.

    Raises:
        CheckpointError: it is larger than the memory that is available; with figures.
    """
    _refuse_if_more(
        each * num_steps,
        1,
        f"return_trace: {num_steps} steps need {_gigabytes(each * num_steps)} for their records, "
        f"{each:,} bytes a step",
        "Trace fewer tokens (max_new_tokens) or rows, or draft fewer nodes.",
        _available_host_memory(),
    )


def check_head_fits(needed: int) -> None:
    """Refuses a head of a drafter, before it is loaded, that needs so many bytes and cannot fit.

    Raises:
        CheckpointError: they are more than are available; with figures.
    """
    what = f"This head needs {_gigabytes(needed)} while it is loaded"
    _refuse_if_more(needed, 1, what, "Use a smaller head.")


def check_corpus_fits(num_tokens: int) -> None:
    """Refuses texts to look tokens up in, before they are sorted, that cannot fit.

    Raises:
        CheckpointError: sorting needs more than the memory of the host that is available, or
            searching more than that of the device; with figures.
    """
    for each, where, available in (
        (_BYTES_SORTED, "while they are sorted", _available_host_memory()),
        (_BYTES_SEARCHED, "on the device", available_memory()),
    ):
        needed = each * num_tokens
        what = f"corpus: {num_tokens:,} tokens need {_gigabytes(needed)} {where}"
        _refuse_if_more(needed, 1, what, "Give fewer texts.", available)


def _refuse_if_more(
    needed: int, shares: int, what: str, remedy: str, available: int | None = None
) -> None:
    """Refuses it; `available` is what the device has, if it is left out."""
    available, share = available or available_memory(), needed // shares
    if available is None or share <= available:
        return
    if shares > 1:
        what += f"; that is {_gigabytes(share)} on each of {shares} devices"
    raise CheckpointError(f"{what}; {_gigabytes(available)} are available. {remedy}")


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def _available_host_memory() -> int | None:
    asked = (_system_memory(), _container_memory(), _process_memory())
    return min((figure for figure in asked if figure is not None), default=None)


def _system_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _container_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    # A container's own limit. What it holds of files can be dropped, so only the rest counts.
    try:
        limit = int((group / "memory.max").read_text())
        entries = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - int(entries["anon"])
    except (OSError, ValueError, KeyError):
        return None


def _process_memory(status: Path = Path("/proc/self/status")) -> int | None:
    """Returns what `ulimit -d` and `ulimit -v` leave this process; `None` without such limits."""
    try:
        import resource

        lines = status.read_text().splitlines()
    except (ImportError, OSError):  # Windows, macOS
        return None
    left = []
    for kind, name in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
            left.append(max(0, limit - used))
    return min(left, default=None)
