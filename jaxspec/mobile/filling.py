"""Filling in masks with an exported diffusion language model, pass by pass.

The runtime's buffers hold the canvas, the prediction in hand and what is cached; a pass decides in
the graph, and the host sees a few integers: the window, and how far it moved.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.core.types import Stop
from jaxspec.result import FINISH_REASONS

if TYPE_CHECKING:
    from jaxspec.mobile.runtime import MobileModel


class Filled(NamedTuple):
    """A filled-in continuation.

    tokens: ids, up to the stop id if there is one.
    counts: decisions of each pass: the drafts that were kept, and its own.
    finish_reason: "stop_token" or "length".
    """

    tokens: np.ndarray
    counts: tuple[int, ...]
    finish_reason: str

    @property
    def num_calls(self) -> int:
        return len(self.counts)


def fill_in(
    model: "MobileModel",
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | None = None,
) -> Filled:
    """Continues a prompt as `jaxspec.denoise` does, greedily, one token per stepwise decision.

    Args:
        model: an open file of a diffusion language model.
        prompt: ids.
        max_new_tokens: masks after it; a multiple of the block.
        stop_token_ids: end the text; `None`: those of the model.
        num_drafts: of each round; 0 decodes stepwise; `None`: the most that the file has.

    Raises:
        ValueError: as `fill_in_stream`.
    """
    stream = fill_in_stream(model, prompt, max_new_tokens, stop_token_ids, num_drafts)
    while True:
        try:
            next(stream)
        except StopIteration as ended:
            return ended.value


def fill_in_stream(
    model: "MobileModel",
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | None = None,
) -> Generator[np.ndarray, None, Filled]:
    """The same, yielding the slots after the prompt as they are after each pass.

    Raises:
        ValueError: the file continues texts, has no such number of drafts or too few slots, or
            the prompt or the length cannot be.
    """
    text = _Text(model, prompt, max_new_tokens, stop_token_ids)
    rounds = _round_name(model, num_drafts)
    text.read_prompt()
    counts: list[int] = []
    while text.goes_on:
        # Before the first pass there is nothing to draft from.
        counts.append(text.decide(rounds if counts else None))
        yield text.continuation
    return text.filled(counts)


def _round_name(model: "MobileModel", num_drafts: int | None) -> str | None:
    sizes = model.manifest.sizes("round")
    if num_drafts is None:
        num_drafts = max(sizes, default=0)
    if num_drafts and num_drafts not in sizes:
        raise ValueError(
            f"num_drafts: this file has rounds of {list(sizes)} drafts, or 0 for none, got "
            f"{num_drafts}; export it with --drafts {num_drafts}."
        )
    return f"round_{num_drafts}" if num_drafts else None


class _Text:
    """One text that is filled in.

    tokens: the whole canvas, as the host knows it. at: the first slot of the window.
    """

    def __init__(
        self,
        model: "MobileModel",
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None,
    ):
        manifest = model.manifest
        if manifest.diffusion is None:
            raise ValueError(
                f"model: {manifest.model} is causal and cannot fill in masks; use `generate`."
            )
        self._model, self._settings = model, manifest.diffusion
        self._block, self._mask = self._settings["block"], self._settings["mask_token_id"]
        if max_new_tokens < 1 or max_new_tokens % self._block:
            raise ValueError(
                f"max_new_tokens must be a multiple of the block ({self._block}), got "
                f"{max_new_tokens}."
            )
        self._length, self._count = len(prompt), max_new_tokens
        start, end = self._length, self._length + max_new_tokens
        slots = end
        if self._settings["causal"]:
            # Blocks lie at multiples of their length; the window looks one past the last.
            start, end = start - start % self._block, -(-end // self._block) * self._block
            slots = end + self._block
        if not self._length:
            raise ValueError("prompt is empty; give at least one token.")
        if slots > manifest.slots:
            raise ValueError(
                f"prompt: its {self._length} tokens and {max_new_tokens} new ones need {slots} "
                f"slots, and this file has {manifest.slots}; shorten it, or export with more."
            )
        for token in prompt:
            if not 0 <= token < manifest.num_tokens or token == self._mask:
                raise ValueError(
                    f"prompt: ids must be in 0..{manifest.num_tokens - 1} and not the mask "
                    f"({self._mask}), got {token}."
                )
        self.tokens = np.zeros(manifest.slots + 2 * self._block, np.int32)
        self.tokens[: self._length] = prompt
        self.tokens[self._length : end] = self._mask
        self.at, self._end = start, end
        stops = model.stop_token_ids if stop_token_ids is None else stop_token_ids
        self._stops = np.asarray(list(stops), np.int32)

    @property
    def continuation(self) -> np.ndarray:
        return self.tokens[self._length : self._length + self._count].copy()

    @property
    def goes_on(self) -> bool:
        """Whether a mask is left, in what was asked for, that no stop id stands before."""
        text = self.continuation
        masks, ends = np.flatnonzero(text == self._mask), np.flatnonzero(self._is_stop(text))
        return len(masks) > 0 and (len(ends) == 0 or ends[0] > masks[0])

    def _is_stop(self, text: np.ndarray) -> np.ndarray:
        return np.isin(text, self._stops)

    def read_prompt(self) -> None:
        """Caches the prompt's whole blocks, or lays out the canvas."""
        model = self._model
        if not self._settings["causal"]:
            self._inputs = {"canvas": self.tokens[: model.manifest.slots]}
        else:
            self._inputs = {}
            sizes = model.manifest.sizes("prefill")
            at = 0
            while at < self.at:
                left = self.at - at
                size = next((n for n in sizes if n >= left), sizes[-1])
                # The last part may overlap what is cached: reading it again changes nothing.
                first = min(at, (model.manifest.slots - size) // self._block * self._block)
                inputs = {"last": [min(self.at, first + size) - first - 1]}
                known = model.inputs(f"prefill_{size}")
                model.call(
                    f"prefill_{size}",
                    prompt=self.tokens[first : first + size],
                    length=[first],
                    **{name: value for name, value in inputs.items() if name in known},
                )
                at = first + size
        self._inputs["window"] = self._window

    @property
    def _window(self) -> np.ndarray:
        return self.tokens[self.at : self.at + 2 * self._block]

    def decide(self, rounds: str | None) -> int:
        """One pass, with a round's drafts or without; the decisions that it made."""
        model = self._model
        signature = rounds or "denoise"
        if rounds is None and self._settings["causal"]:
            has_masks = np.any(self._window[: self._block] == self._mask)
            signature = "denoise_1" if has_masks else "denoise_2"
        inputs: dict[str, Any] = {"length": [self.at], "end": [self._end], **self._inputs}
        model.call(signature, **inputs)
        self._inputs = {}
        decided = model.read(signature, "decided")[0]
        count = int(model.read(signature, "count")[0])
        self.tokens[self.at : self.at + len(decided)] = decided
        self.at = int(model.read(signature, "o_length")[0])
        return count + 1

    def filled(self, counts: Sequence[int]) -> Filled:
        text = self.continuation
        ends = np.flatnonzero(self._is_stop(text))
        reason = Stop.TOKEN if len(ends) else Stop.LENGTH
        text = text[: ends[0] + 1] if len(ends) else text
        return Filled(text, tuple(counts), FINISH_REASONS[reason])
