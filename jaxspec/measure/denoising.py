"""Comparison of self-speculation with stepwise decoding, for diffusion language models."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.types import Stop
from jaxspec.decoding.denoise import (
    DenoiseConfig,
    Denoised,
    DenoiseRequest,
    prepare_denoising,
)
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import PromptLike
from jaxspec.diffusion import SelfSpeculation
from jaxspec.diffusion.passes import DenoisePlan
from jaxspec.diffusion.unmask import Canvas, Prediction, ThresholdPace
from jaxspec.measure.comparison import Divergence
from jaxspec.measure.figures import STEPWISE, Sample


def divergence_of_canvas(
    model: Model,
    prompt_index: int,
    prompt: PromptLike,
    config: DenoiseConfig,
    expected: np.ndarray,
    other: np.ndarray,
    seed: int = 0,
) -> Divergence | None:
    """Returns where a text leaves that of stepwise decoding; `None` if they are equal.

    The gap is the least of stepwise decoding's decisions, up to the first one whose token the other
    text does not have: see `closest_decision`.

    Args:
        model: a diffusion language model.
        prompt_index: the prompt's place, to name it with.
        prompt: the prompt.
        config: settings of decoding.
        expected: tokens of stepwise decoding.
        other: tokens of a method.
        seed: seed of the randomness.

    Example:
        >>> import jaxspec
        >>> model, config = jaxspec.load("demo-block-diffusion"), DenoiseConfig(max_new_tokens=8)
        >>> text = jaxspec.denoise(model, "1, 2, 3,", config)[0].tokens
        >>> divergence_of_canvas(model, 0, "1, 2, 3,", config, text, text) is None
        True
        >>> divergence_of_canvas(model, 0, "1, 2, 3,", config, text, text[:3]).position
        3
    """
    theirs, ours = expected.tolist(), other.tolist()
    if ours == theirs:
        return None
    common = min(len(ours), len(theirs))
    place = next((i for i in range(common) if ours[i] != theirs[i]), common)
    pair = [each[place] if place < len(each) else None for each in (theirs, ours)]
    # Without drafts nothing is verified, by whatever rule; the likeliest tokens are listed.
    request = prepare_denoising(model, [prompt], config, SelfSpeculation(0, lossy_top_k=2), seed)
    return Divergence(prompt_index, place, *pair, gap=_least_gap(request, ours))


def _least_gap(request: DenoiseRequest, text: Sequence[int]) -> float:
    """Returns the least gap of the decisions before a text is contradicted."""
    states, gaps = request.begin(), []
    while int(states.canvas.stop[0]) == Stop.RUNNING:
        before = jax.device_get(states.canvas)
        states, _ = request.step(states)
        said = jax.device_get(states.prediction)
        (after,) = np.asarray(states.canvas.tokens)
        canvas, prediction = jax.tree.map(lambda leaf: leaf[0], (before, said))
        threshold = _threshold_of(request)
        gaps.append(closest_decision(request.plan, canvas, after, prediction, threshold))
        (written,) = request.continuations(after[None])
        masks = written == request.plan.rules.mask_token_id
        common = min(len(text), len(written))
        if np.any((written[:common] != text[:common]) & ~masks[:common]):
            break
    return min(gaps)


def _threshold_of(request: DenoiseRequest) -> float | None:
    pace = request.prompts.pace
    return float(pace.log_threshold[0]) if isinstance(pace, ThresholdPace) else None


def closest_decision(
    plan: DenoisePlan,
    before: Canvas,
    after: np.ndarray,
    said: Prediction,
    threshold: float | None = None,
) -> float:
    """Returns how far a decision of stepwise decoding was from another one.

    It is the least of these:

    - of each token filled in, the distance of its logit from the next likeliest one's;
    - the distance of scores between the last position filled in and the first one left, or of any
      score from the threshold, relative to the larger of the two. Scores are log-probabilities, and
      those of sure tokens are all close to 0.

    Args:
        plan: static settings.
        before: the canvas before the decision.
        after: its tokens after it.
        said: the prediction for that canvas, with the two likeliest tokens of each position.
        threshold: least score that is filled in, if there is one.
    """
    assert said.likeliest_logits is not None, "asked for"
    window = said.start + np.arange(len(said.tokens))
    masks = before.tokens[window] == plan.rules.mask_token_id
    filled = masks & (after[window] != before.tokens[window])
    left = masks & ~filled & (window < before.start + plan.block)
    logits = said.likeliest_logits[filled]
    gaps = [float("inf"), *(logits[:, 0] - logits[:, 1]).tolist()]
    pairs: list[tuple[float, float]] = []
    is_ordered = not (plan.rules.opens_with_first and before.step == 0)
    if is_ordered and threshold is None and filled.any() and left.any():
        pairs = [(np.min(said.scores[filled]), np.max(said.scores[left]))]
    if is_ordered and threshold is not None:
        pairs = [(score, threshold) for score in said.scores[filled | left]]
    gaps += [float(abs(one - other) / max(abs(one), abs(other), _TINY)) for one, other in pairs]
    return min(gaps)


_TINY = float(np.finfo(np.float32).tiny)


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
        del method, request
        prompt, texts = row.prompt_tokens.tolist(), (expected.tokens, row.tokens)
        return divergence_of_canvas(self.model, index, prompt, self.config, *texts, seed)

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
