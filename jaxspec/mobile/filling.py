"""Filling in masks with an exported diffusion language model, pass by pass.

The runtime's buffers hold the canvas, the last prediction and the cache. A pass decides in the
graph, and the host reads a few integers: the window, and how far it moved.
"""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jaxspec.core.types import Stop
from jaxspec.decoding.result import FINISH_REASONS
from jaxspec.mobile.room import check_token_ids, prompt_parts
from jaxspec.mobile.runtime import Decoded, MobileModel


class Filled(Decoded):
    """A filled-in continuation.

    Attributes:
        tokens: ids, up to the stop id if there is one.
        counts: decisions of each pass: the drafts that were kept, and its own.
        finish_reason: "stop_token" or "length".
    """

    @property
    def num_calls(self) -> int:
        """Number of passes."""
        return len(self.counts)


def fill_in(
    model: MobileModel,
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

    Example:
        >>> import tempfile
        >>> from jaxspec import load
        >>> from jaxspec.mobile import ExportConfig, MobileModel, export, fill_in
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     shapes = ExportConfig(capacity=64, prefill=(8,), quantization="float32")
        ...     manifest = export(load("demo-block-diffusion"), folder, config=shapes)
        ...     model = MobileModel(f"{folder}/model.tflite")
        >>> prompt = model.tokenizer.encode("A farmer has 12 apples")
        >>> model.tokenizer.decode(fill_in(model, prompt, max_new_tokens=16).tokens)
        ' and 10 oranges. He sold 10 oranges to his market'
    """
    stream = fill_in_stream(model, prompt, max_new_tokens, stop_token_ids, num_drafts)
    while True:
        try:
            next(stream)
        except StopIteration as ended:
            return ended.value


def fill_in_stream(
    model: MobileModel,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | None = None,
) -> Generator[np.ndarray, None, Filled]:
    """Does the same, and yields the tokens after the prompt as they are after each pass.

    Raises:
        ValueError: the model is causal, the file has no such number of drafts or too little
            capacity, or the prompt or the length does not fit.

    Example:
        >>> import tempfile
        >>> from jaxspec import load
        >>> from jaxspec.mobile import ExportConfig, MobileModel, export, fill_in_stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     shapes = ExportConfig(capacity=64, prefill=(8,), quantization="float32")
        ...     manifest = export(load("demo-block-diffusion"), folder, config=shapes)
        ...     model = MobileModel(f"{folder}/model.tflite")
        >>> prompt = model.tokenizer.encode("A farmer has 12 apples")
        >>> texts = [model.tokenizer.decode(tokens) for tokens in fill_in_stream(model, prompt, 16)]
        >>> texts[2], texts[-1]
        (' and 1', ' and 10 oranges. He sold 10 oranges to his market')
    """
    text = _Text(model, prompt, max_new_tokens, stop_token_ids)
    rounds = _round_name(model, num_drafts)
    text.read_prompt()
    counts: list[int] = []
    while text.is_open:
        # Before the first pass there is nothing to draft from.
        counts.append(text.decide(rounds if counts else None))
        yield text.continuation
    return text.filled(counts)


def _round_name(model: MobileModel, num_drafts: int | None) -> str | None:
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

    Attributes:
        tokens: the whole canvas, as the host knows it.
        at: first position of the window.
    """

    def __init__(
        self,
        model: MobileModel,
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
        needed = end
        if self._settings["causal"]:
            # Blocks begin at multiples of their length; the window reaches one past the last.
            start, end = start - start % self._block, -(-end // self._block) * self._block
            needed = end + self._block
        if not self._length:
            raise ValueError("prompt is empty; give at least one token.")
        if needed > manifest.capacity:
            raise ValueError(
                f"prompt: its {self._length} tokens and {max_new_tokens} new ones need a capacity "
                f"of {needed}, and this file has {manifest.capacity}; shorten it, or export with "
                "more."
            )
        check_token_ids(manifest, prompt, never=self._mask)
        self.tokens = np.zeros(manifest.capacity + 2 * self._block, np.int32)
        self.tokens[: self._length] = prompt
        self.tokens[self._length : end] = self._mask
        self.at, self._end = start, end
        stops = model.stop_token_ids if stop_token_ids is None else stop_token_ids
        self._stops = np.asarray(list(stops), np.int32)

    @property
    def continuation(self) -> np.ndarray:
        return self.tokens[self._length : self._length + self._count].copy()

    @property
    def is_open(self) -> bool:
        """True while a mask is left in the continuation that no stop id precedes."""
        text = self.continuation
        masks, ends = np.flatnonzero(text == self._mask), self._ends(text)
        return len(masks) > 0 and (len(ends) == 0 or ends[0] > masks[0])

    def _ends(self, text: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.isin(text, self._stops))

    def read_prompt(self) -> None:
        """Caches the prompt's whole blocks, or lays out the canvas."""
        model, capacity = self._model, self._model.manifest.capacity
        self._inputs: dict[str, Any] = {"window": self._window}
        if not self._settings["causal"]:
            self._inputs["canvas"] = self.tokens[:capacity]
            return
        sizes = model.manifest.sizes("prefill")
        for first, size in prompt_parts(sizes, 0, self.at, capacity, self._block):
            inputs = {"prompt": self.tokens[first : first + size], "length": [first]}
            if "last" in model.inputs(f"prefill_{size}"):
                inputs["last"] = [min(self.at, first + size) - first - 1]
            model.call(f"prefill_{size}", **inputs)

    @property
    def _window(self) -> np.ndarray:
        return self.tokens[self.at : self.at + 2 * self._block]

    def decide(self, rounds: str | None) -> int:
        """Makes one pass, with a round's drafts or without, and returns its decisions."""
        model = self._model
        signature = rounds or "denoise"
        if rounds is None and self._settings["causal"]:
            has_masks = np.any(self._window[: self._block] == self._mask)
            signature = "denoise_1" if has_masks else "denoise_2"
        model.call(signature, length=[self.at], end=[self._end], **self._inputs)
        self._inputs = {}
        decided = model.read(signature, "decided")[0]
        count = int(model.read(signature, "count")[0])
        self.tokens[self.at : self.at + len(decided)] = decided
        self.at = int(model.read(signature, "o_length")[0])
        return count + 1

    def filled(self, counts: Sequence[int]) -> Filled:
        text = self.continuation
        ends = self._ends(text)
        reason = Stop.TOKEN if len(ends) else Stop.LENGTH
        text = text[: ends[0] + 1] if len(ends) else text
        return Filled(text, tuple(counts), FINISH_REASONS[reason])
