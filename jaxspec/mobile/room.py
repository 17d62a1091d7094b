"""Room in the caches of a file: checks before a call, as LiteRT overwrites rows in silence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.mobile.manifest import Manifest


def check_room(manifest: Manifest, signature: str, inputs: Mapping[str, Any]) -> None:
    """Refuses a call that would write behind the end of a cache, or without saying where.

    Args:
        manifest: of the file.
        signature: one of the file's.
        inputs: the new values of a call.

    Raises:
        ValueError: naming the input, and the capacity that the file has.
    """
    described = manifest.signatures[signature]["inputs"]
    if "length" in described:
        _check_target(manifest, signature, described, inputs)
    if "scratch_k_0" in described:
        size, capacity = described["tokens"]["shape"][1], described["scratch_k_0"]["shape"][2]
        first = _number(inputs, "drafted")
        if not 0 <= first <= capacity - size:
            raise ValueError(
                f"drafted: {signature} writes {size} nodes from {first} on, and its scratch has "
                f"room for {capacity}; give the number that is drafted, of fewer levels."
            )
    if "block_k_0" in described:
        capacity, size = described["block_k_0"]["shape"][2], described["window"]["shape"][1]
        start = _number(inputs, "start")
        if not 0 <= start <= capacity - size:
            raise ValueError(
                f"start: {signature} writes {size} tokens from {start} on, and the capacity of "
                f"this file's drafter is {capacity}; give where it writes, or end the text."
            )


def _check_target(
    manifest: Manifest, signature: str, described: Mapping[str, Any], inputs: Mapping[str, Any]
) -> None:
    if "length" not in inputs:
        raise ValueError(f"length: give where {signature} writes, so that its room is checked.")
    kind, _, size = signature.rpartition("_")
    rows, levels, start = 0, manifest.depth + 1, _number(inputs, "length")
    if signature == "decode":
        rows = 1
    elif kind == "step" or signature == "step":
        rows = levels
    elif kind in ("step_block", "step_block_sampled"):
        rows = manifest.signatures[signature]["outputs"]["o_tokens"]["shape"][1]
    elif signature == "draft_1" and "drafted" in described:
        rows = _number(inputs, "drafted") + 1
    elif signature in ("draft", "absorb") and "count" in described:
        # A head reads states, which end before the pending token; a draft model reads that too.
        start, rows = start - _number(inputs, "count", 1) + ("states" not in described), levels
    elif kind in ("prefill", "commit", "accept"):
        rows = int(size)
    elif kind in ("denoise", "round") and "kv_k_0" in described:
        # Whole windows; their second half must have a place in the text, too.
        rows = math.prod(described["window"]["shape"])
    if start < 0 or start + rows > manifest.capacity:
        raise ValueError(
            f"length: {signature} writes {rows} rows from {start} on, and the capacity of this "
            f"file is {manifest.capacity}; export it with more, or end the text."
        )
    positions = int(np.max(inputs.get("positions", 0)))
    if positions >= manifest.capacity:
        raise ValueError(
            f"positions: must be below the capacity of this file, {manifest.capacity}, got "
            f"{positions}."
        )


def check_token_ids(manifest: Manifest, prompt: Any, never: int | None = None) -> None:
    """Refuses ids of a prompt that the model does not know, or one that stands for a mask.

    Raises:
        ValueError: naming the id.
    """
    known = manifest.num_tokens
    for token in prompt:
        if not 0 <= token < known or token == never:
            but = "" if never is None else f" and not the mask ({never})"
            raise ValueError(f"prompt: ids must be in 0..{known - 1}{but}, got {token}.")


def prompt_parts(
    sizes: Sequence[int], start: int, end: int, capacity: int, multiple: int = 1
) -> Iterator[tuple[int, int]]:
    """Yields the first token and the size N of each `prefill_N` that reads a prompt.

    The last part may overlap cached tokens: reading a token again changes nothing.

    Args:
        sizes: N of every `prefill_N`, ascending.
        start: first token to read.
        end: number of tokens to read up to.
        capacity: of the cache, in which whole parts must fit.
        multiple: of which every first token must be.

    Example:
        >>> list(prompt_parts((4, 16), 0, 19, 20))
        [(0, 16), (16, 4)]
    """
    at = start
    while at < end:
        size = next((n for n in sizes if n >= end - at), sizes[-1])
        first = max(0, min(at, (capacity - size) // multiple * multiple))
        yield first, size
        at = first + size


def _number(inputs: Mapping[str, Any], name: str, default: int = -1) -> int:
    return int(np.asarray(inputs.get(name, default)).reshape(()))
