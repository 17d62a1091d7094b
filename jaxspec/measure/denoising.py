"""Comparison of self-speculation with stepwise decoding, for diffusion language models."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxspec.checkpoint import Model
from jaxspec.decoding.denoise import (
    DenoiseConfig,
    Denoised,
    DenoiseRequest,
    denoise,
    prepare_denoising,
)
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import PromptLike
from jaxspec.diffusion import SelfSpeculation
from jaxspec.measure.comparison import Divergence
from jaxspec.measure.figures import STEPWISE, Sample


def equal_in_one_shape(
    model: Model,
    prompts: Sequence[PromptLike],
    config: DenoiseConfig,
    speculation: SelfSpeculation,
    seed: int = 0,
) -> list[bool]:
    """Says of each prompt whether drafting gives the stepwise text, both in passes of one shape.

    Where places or tokens are as close as rounding, passes of other shapes may decide otherwise.
    """
    fixed = dataclasses.replace(speculation, deterministic=True, costs=None)
    ours, theirs = (denoise(model, prompts, config, each, seed) for each in (fixed, fixed.stepwise))
    return [
        one.tokens.tolist() == other.tokens.tolist()
        for one, other in zip(ours, theirs, strict=True)
    ]


class DenoiseRunner:
    """Fills in prompts, or batches of them, as `denoise` does.

    Attributes:
        model: a diffusion language model.
        methods: drafting by name; `None` decodes stepwise.
        config: settings of decoding.
        baseline: name of stepwise decoding.
        repeats_texts: True: methods without loss must give equal texts, sampled ones too, as noise
            depends on the seed and the position alone.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo-block-diffusion")
        >>> runner = DenoiseRunner(model, {"stepwise": None}, DenoiseConfig(max_new_tokens=8))
        >>> runner.decode("stepwise", "1, 2, 3,", seed=0).counts.num_steps
        8
    """

    baseline = STEPWISE
    repeats_texts = True

    def __init__(
        self, model: Model, methods: Mapping[str, SelfSpeculation | None], config: DenoiseConfig
    ):
        self.model, self.config = model, config
        self.methods = dict(methods)
        self._requests: dict[tuple[str, str, int], DenoiseRequest] = {}

    def request(
        self, method: str, prompt: PromptLike | Sequence[Any], seed: int = 0
    ) -> DenoiseRequest:
        """Returns the prepared call of a method on one prompt, or on one batch.

        Raises:
            ValueError: as `denoise` does.
        """
        key = (method, repr(prompt), seed)
        if key not in self._requests:
            speculation = self.methods[method]
            self._requests[key] = prepare_denoising(
                self.model, prompt, self.config, speculation, seed
            )
        return self._requests[key]

    def decode(self, method: str, prompt: PromptLike | Sequence[Any], seed: int) -> Sample:
        """Decodes one prompt, or one batch, once."""
        request = self.request(method, prompt, seed)
        start = time.perf_counter()
        outcome = jax.block_until_ready(request.denoise())
        seconds = time.perf_counter() - start
        rows: Any = tuple(request.result(outcome))
        return Sample(rows, seconds, sum((row.counts for row in rows), Counts()))

    def compile(
        self, method: str, prompt: PromptLike | Sequence[Any], seed: int
    ) -> tuple[Sample, float]:
        """Decodes twice untimed; returns the first sample and the seconds of compiling."""
        first = self.decode(method, prompt, seed)
        return first, max(0.0, first.seconds - self.decode(method, prompt, seed).seconds)

    def divergence(
        self,
        index: int,
        method: str,
        request: DenoiseRequest,
        seed: int,
        expected: Denoised,
        row: Denoised,
    ) -> Divergence | None:
        """Returns where a text leaves stepwise decoding's; `None` if they are equal."""
        del request
        theirs, ours = (each.tokens.tolist() for each in (expected, row))
        speculation = self.methods[method]
        if speculation is None or ours == theirs:
            return None
        common = min(len(ours), len(theirs))
        place = next((i for i in range(common) if ours[i] != theirs[i]), common)
        tokens = [each[place] if place < len(each) else None for each in (theirs, ours)]
        prompts = [row.prompt_tokens]
        (equal,) = equal_in_one_shape(self.model, prompts, self.config, speculation, seed)
        return Divergence(index, place, *tokens, gap=None, in_one_shape=equal)

    def with_logprob(self, sample: Sample) -> Sample:
        """Returns the sample: texts of these models have no probability that a pass gives."""
        return sample

    def first_token_seconds(self, method: str, prompt: PromptLike, seed: int) -> None:
        """Returns `None`: places are filled in in any order."""
        del method, prompt, seed

    def is_lossless(self, method: str) -> bool:
        """Returns whether the text must be that of stepwise decoding."""
        speculation = self.methods[method]
        return speculation is None or speculation.lossy_top_k is None

    def describe(self, method: str) -> str:
        """Returns the settings of a method."""
        speculation = self.methods[method]
        return "stepwise decoding" if speculation is None else repr(speculation)
