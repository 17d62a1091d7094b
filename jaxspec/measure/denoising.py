"""Comparison of self-speculation with stepwise decoding, for diffusion language models."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

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
from jaxspec.diffusion.unmask import (
    Canvas,
    Pace,
    Prediction,
    Rules,
    ThresholdPace,
    places_filled,
)
from jaxspec.measure.comparison import Divergence
from jaxspec.measure.figures import STEPWISE, Sample


class StepwisePath(NamedTuple):
    """The decisions of stepwise decoding of one prompt.

    Attributes:
        gaps: how far each decision was from another one; see `closest_decision`.
        tokens: the text.
        filled_by: the decision that filled in each place of the text; the number of decisions for
            a place that stayed a mask.
    """

    gaps: Float[np.ndarray, " decisions"]
    tokens: Int[np.ndarray, " places"]
    filled_by: Int[np.ndarray, " places"]

    def least_gap(self, text: Sequence[int]) -> float:
        """Returns the least gap of the decisions, up to the first one that contradicts a text."""
        common = min(len(text), len(self.tokens))
        wrong = self.tokens[:common] != text[:common]
        last = np.min(self.filled_by[:common], where=wrong, initial=len(self.gaps) - 1)
        return float(np.min(self.gaps[: last + 1]))


def divergence_of_canvas(
    model: Model,
    prompt_index: int,
    prompt: PromptLike,
    config: DenoiseConfig,
    expected: np.ndarray,
    other: np.ndarray,
    seed: int = 0,
    *,
    lossless: bool = True,
    known: dict[tuple[int, int], StepwisePath] | None = None,
) -> Divergence | None:
    """Returns where a text leaves that of stepwise decoding; `None` if they are equal.

    The gap is the least of stepwise decoding's decisions, up to the first one whose token the other
    text does not have: see `closest_decision`. It is `None` where one text ends and the other goes
    on, and for a method that is not lossless, whose texts need no explanation.

    Args:
        model: a diffusion language model.
        prompt_index: the prompt's place, to name it with.
        prompt: the prompt, decoded alone.
        config: settings of decoding.
        expected: tokens of stepwise decoding.
        other: tokens of a method.
        seed: seed of the randomness.
        lossless: the method must give equal texts.
        known: stepwise decoding of prompts that other texts were compared with, by index and seed;
            the prompt's is added. `None`: there is none.

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
    one, two = (each[place] if place < len(each) else None for each in (theirs, ours))
    gap = None
    if lossless and one is not None and two is not None:  # Rounding ends no text.
        paths = {} if known is None else known
        if (prompt_index, seed) not in paths:
            # Without drafts nothing is verified, by whatever rule; the likeliest tokens are listed.
            listing = SelfSpeculation(0, lossy_top_k=2)
            request = prepare_denoising(model, [prompt], config, listing, seed)
            paths[prompt_index, seed] = _follow(request)
        gap = paths[prompt_index, seed].least_gap(ours) * _sharpness(config)
    return Divergence(prompt_index, place, one, two, gap)


def _sharpness(config: DenoiseConfig) -> float:
    """Returns a factor that undoes what temperature and guidance do to the size of rounding."""
    temperature = float(np.max(config.temperature))
    return min(temperature or 1.0, 1.0) / (2 * config.guidance + 1)


def _follow(request: DenoiseRequest) -> StepwisePath:
    """Decodes one prompt stepwise, and returns its decisions."""
    states, gaps, masks = request.begin(), [], []

    def written() -> np.ndarray:
        return request.continuations(np.asarray(states.canvas.tokens))[0]

    pace: Pace = jax.tree.map(lambda leaf: leaf[0], request.prompts.pace)
    while int(states.canvas.stop[0]) == Stop.RUNNING:
        before = jax.device_get(states.canvas)
        states, _ = request.step(states)
        said = jax.device_get(states.prediction)
        canvas: Canvas = jax.tree.map(lambda leaf: leaf[0], before)
        prediction: Prediction = jax.tree.map(lambda leaf: leaf[0], said)
        gaps.append(closest_decision(request.plan.rules, pace, canvas, prediction))
        masks.append(written() == request.plan.rules.mask_token_id)
    return StepwisePath(np.asarray(gaps), written(), np.sum(masks, axis=0))


def closest_decision(rules: Rules, pace: Pace, canvas: Canvas, said: Prediction) -> float:
    """Returns how far a decision of stepwise decoding was from another one.

    It is the least of these:

    - of each token chosen, the distance of its logit from the next likeliest one's;
    - the distance of scores between the last position chosen and the first one left, or of any
      score from the threshold, relative to the larger of the two. Scores are log-probabilities, and
      those of sure tokens are all close to 0. A random order has no rounding.

    Args:
        rules: static settings.
        pace: number of positions to fill in.
        canvas: the canvas before the decision.
        said: the prediction for that canvas, with the two likeliest tokens of each position.
    """
    assert said.likeliest_logits is not None, "asked for"
    filled = np.asarray(places_filled(rules, *jax.tree.map(jnp.asarray, (pace, canvas, said))))
    window = said.start + np.arange(len(said.tokens))
    masks = canvas.tokens[window] == rules.mask_token_id
    left = masks & ~filled & (window < canvas.start + rules.block)
    logits, scores = said.likeliest_logits[filled], said.scores
    gaps = [float("inf"), *(logits[:, 0] - logits[:, 1]).tolist()]
    pairs: list[tuple[float, float]] = []
    if rules.order != "random" and not (rules.opens_with_first and canvas.step == 0):
        if filled.any() and left.any():
            pairs = [(np.min(scores[filled]), np.max(scores[left]))]
        if isinstance(pace, ThresholdPace):
            pairs += [(score, float(pace.log_threshold)) for score in scores[filled | left]]
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
        self._paths: dict[tuple[int, int], StepwisePath] = {}

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
        prompt, texts = row.prompt_tokens.tolist(), (expected.tokens, row.tokens)
        lossless, known = self.is_lossless(method), self._paths
        return divergence_of_canvas(
            self.model, index, prompt, self.config, *texts, seed, lossless=lossless, known=known
        )

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
