"""Comparison of drafters with plain decoding: same process, same prompts, in turns.

Diffusion models are compared by the same loop: self-speculation next to stepwise decoding.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.hub import check_is_model
from jaxspec.core.checks import Count, checked
from jaxspec.core.decode import Prompt
from jaxspec.core.masks import causal
from jaxspec.core.penalties import penalize
from jaxspec.core.proposal import tree_proposal
from jaxspec.core.sampling import warp_logits
from jaxspec.core.tree import chain
from jaxspec.core.types import Context, Params, Warp
from jaxspec.decoding.denoise import DenoiseConfig
from jaxspec.decoding.generate import generate, score, stream
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import (
    PENALTIES,
    GenerationConfig,
    PromptLike,
    Request,
    check_call,
    config_of,
    prepare,
    prompt_list,
)
from jaxspec.decoding.result import GenerationResult
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import DrafterLike, loaded_drafter
from jaxspec.measure.comparison import Comparison, ComparisonRow, Divergence, Failure
from jaxspec.measure.denoising import DenoiseRunner
from jaxspec.measure.figures import PLAIN, Output, Sample, figures_of_subsets, subsets_of
from jaxspec.measure.machine import num_bytes, read_bandwidth, this_machine
from jaxspec.measure.timing import decode_in_turns, release_programs
from jaxspec.progress import progress_bar

FIRST_TOKEN_REPEATS = 5


class JaxRunner:
    """Decodes prompts, or batches of them, with `generate`.

    Attributes:
        model: the target.
        methods: drafters by name; `None` decodes plainly.
        config: settings of decoding.
        carry: continue with the state of a drafter that learns from prompt to prompt.
        baseline: name of plain decoding.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> runner = JaxRunner(model, {"plain": None}, GenerationConfig(max_new_tokens=2))
        >>> runner.decode("plain", "1, 2, 3,", seed=0).num_tokens
        2
    """

    def __init__(
        self,
        model: Model,
        methods: Mapping[str, DrafterLike | None],
        config: GenerationConfig,
        carry: bool = True,
    ):
        self.model, self.config, self.carry = model, config, carry
        self.methods = dict(methods)

    baseline = PLAIN

    def request(self, method: str, prompt: PromptLike) -> Request:
        """Checks a method and one prompt; returns the call of `generate`.

        Raises:
            ValueError: as `generate` does.
        """
        return prepare(self.model, prompt, self.config, self.methods[method], 0)

    def decode(self, method: str, prompt: PromptLike | list[PromptLike], seed: int) -> Sample:
        """Decodes one prompt, or one batch, once."""
        result = generate(self.model, prompt, self.config, self.methods[method], seed)
        if self.carry:
            self.methods[method] = result.drafters[0]
        return sample_of(result)

    def compile(
        self, method: str, prompt: PromptLike | list[PromptLike], seed: int
    ) -> tuple[Sample, float]:
        """Decodes once or twice untimed; returns the first sample and the seconds of compiling."""
        before = self.methods[method]
        result = generate(self.model, prompt, self.config, before, seed)
        if self.carry and result.drafters[0] is not before:
            # The state that is carried has another structure than the first one.
            generate(self.model, prompt, self.config, result.drafters[0], seed)
        return sample_of(result), result.metrics.compile_seconds or 0.0

    def divergence(
        self, index: int, method: str, request: Request, seed: int, expected: Any, row: Any
    ) -> Divergence | None:
        """Returns where an output leaves plain decoding's, see `find_divergence`."""
        del method, seed
        return find_divergence(self.model, request, index, expected, row)

    @property
    def repeats_texts(self) -> bool:
        """True if methods without loss must give equal texts: greedy ones."""
        return not np.any(self.config.temperature)

    def is_lossless(self, method: str) -> bool:
        """Returns True: every drafter's greedy output must be plain decoding's."""
        del method
        return True

    def with_logprob(self, sample: Sample) -> Sample:
        """Returns the sample of one prompt with the target's log-probability of its output."""
        return with_logprob(self.model, sample)

    def first_token_seconds(self, method: str, prompt: PromptLike, seed: int) -> float:
        """Returns the median time until `stream` gives something, without compiling."""
        seconds = []
        for _ in range(1 + FIRST_TOKEN_REPEATS):
            start = time.perf_counter()
            next(stream(self.model, prompt, self.config, self.methods[method], seed))
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds[1:]))

    def describe(self, method: str) -> str:
        """Returns the settings of a method."""
        return describe(self.methods[method])


def sample_of(result: GenerationResult) -> Sample:
    """Returns what one call of `generate` gave, as a sample.

    Example:
        >>> import jaxspec
        >>> config = GenerationConfig(max_new_tokens=2)
        >>> result = jaxspec.generate(jaxspec.load("demo"), "1, 2, 3,", config)
        >>> sample_of(result).counts.tau
        1.0
    """
    rows, metrics = tuple(result), result.metrics
    counts = Counts(
        num_tokens=metrics.num_tokens,
        num_steps=metrics.num_verify_steps,
        num_nodes=metrics.num_draft_tokens,
        num_from_draft=int(sum(row.from_draft.sum() for row in rows)),
        accepted=metrics.acceptance_histogram,
        drafted=metrics.drafted_histogram,
    )
    return Sample(rows, metrics.seconds or 0.0, counts)


def compare(
    model: Model,
    prompts: Sequence[PromptLike],
    drafters: Mapping[str, DrafterLike] | Mapping[str, SelfSpeculation],
    config: GenerationConfig | DenoiseConfig | None = None,
    *,
    repeats: int = 3,
    seed: int = 0,
    categories: Sequence[str | None] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Decodes prompts one at a time, plainly and with every drafter, and compares the methods.

    Plain decoding is always measured, in the same process; of a diffusion model, stepwise decoding
    is. Methods take turns on each prompt. A prompt's time is the median of its repeats. Compiling
    is timed apart.

    Args:
        model: the target; causal, or a diffusion language model.
        prompts: strings, token ids or chats.
        drafters: the methods to compare, by the names to show; for a diffusion model, each a
            `SelfSpeculation`.
        config: settings of decoding, `num_samples` 1 and one value of each for all prompts. Greedy
            outputs are checked against plain decoding's; see `Comparison.outputs_agree`. For a
            diffusion model, a `DenoiseConfig`; sampled texts are checked too.
        repeats: timed runs of each prompt and method.
        seed: seed of sampling; prompt i has `seed + i`.
        categories: each prompt's category, for figures by category.
        progress: show a bar where standard error is a terminal.
        **settings: fields of the config in place of those of `config`.

    Raises:
        ValueError: for settings that do not fit, or if no prompt at all can be decoded.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> lookup = jaxspec.PromptLookup()
        >>> comparison = jaxspec.compare(
        ...     model, ["1, 2, 3, 1, 2, 3,"], {"lookup": lookup}, repeats=1, progress=False
        ... )
        >>> comparison.outputs_agree
        True
    """
    check_is_model(model)
    kind = DenoiseConfig if model.is_diffusion else GenerationConfig
    asked: Any = config
    asked = config_of(asked, settings, kind)
    check_call(asked, kind, seed)
    prompts, repeats = prompt_list(prompts), checked("repeats", repeats, Count)
    runner_of: Any = DenoiseRunner if model.is_diffusion else JaxRunner
    baseline = runner_of.baseline
    categories = _check_arguments(prompts, drafters, asked, categories, baseline)
    names = [baseline, *drafters]
    runner = runner_of(model, {baseline: None, **drafters}, asked)
    machine = this_machine()
    requests, failures = _requests(runner, names, prompts)
    lengths = {index: int(request.prompts.length[0]) for index, request in requests.items()}
    by_length = sorted(requests, key=lengths.__getitem__)
    longest, middle = prompts[by_length[-1]], prompts[by_length[len(by_length) // 2]]
    # Prompts that share a bucket share the programs of all methods.
    of_each_shape: dict[tuple[int, ...], list[int]] = {}
    for index in requests:
        of_each_shape.setdefault(requests[index].prompts.tokens.shape, []).append(index)

    parts = len(names) * (len(of_each_shape) + repeats * len(requests) + 1) + 2
    with progress_bar(parts, progress) as advance:
        compile_seconds = dict.fromkeys(names, 0.0)
        decoded: dict[str, dict[int, Sample]] = {name: {} for name in names}
        for indices in of_each_shape.values():
            release_programs()
            for name in names:
                advance(f"compiling {name}")
                first = indices[0]
                compile_seconds[name] += runner.compile(name, prompts[first], seed + first)[1]
            group = {index: prompts[index] for index in indices}
            found = decode_in_turns(runner, names, group, repeats, seed, advance)
            for name in names:
                decoded[name] |= found[name]
        failures += _not_finite(decoded)
        kept = sorted(set(requests) - {failure.prompt_index for failure in failures})
        if not kept:
            raise _nothing_left(prompts, failures)
        advance("scoring outputs")
        samples = {
            name: [runner.with_logprob(by_index[index]) for index in kept]
            for name, by_index in decoded.items()
        }
        first_token = {}
        for name in names:
            advance(f"first token of {name}")
            release_programs()
            first_token[name] = runner.first_token_seconds(name, middle, seed)
        advance("reading memory")
        weight_bytes = num_bytes(model.params)
        bandwidth = read_bandwidth(weight_bytes)

    plain = samples[baseline]
    subsets = subsets_of(plain, [categories[index] for index in kept])

    def row(name: str) -> ComparisonRow:
        places = zip(kept, plain, samples[name], strict=True) if runner.repeats_texts else ()
        found = (
            runner.divergence(
                index, name, requests[index], seed + index, expected.rows[0], sample.rows[0]
            )
            for index, expected, sample in places
        )
        divergences = tuple(filter(None, found))
        release_programs()
        return ComparisonRow(
            name=name,
            settings=runner.describe(name),
            **figures_of_subsets(samples[name], plain, subsets)._asdict(),
            num_identical=len(kept) - len(divergences) if runner.repeats_texts else None,
            divergences=divergences,
            lossless=runner.is_lossless(name),
            first_token_seconds=first_token[name],
            peak_bytes=runner.request(name, longest).peak_bytes(),
            compile_seconds=compile_seconds[name],
            samples=tuple(samples[name]),
        )

    return Comparison(
        rows=tuple(map(row, names)),
        config=asked,
        seed=seed,
        repeats=repeats,
        failures=tuple(failures),
        prompt_indices=tuple(kept),
        model=model.name,
        dtype=str(model.dtype),
        weight_bytes=weight_bytes,
        read_bandwidth=bandwidth,
        machine=machine,
    )


def _check_arguments(
    prompts: Sequence[PromptLike],
    drafters: Mapping[str, Any],
    config: Any,
    categories: Sequence[str | None] | None,
    baseline: str,
) -> Sequence[str | None]:
    if not isinstance(drafters, Mapping):
        raise ValueError(
            "drafters: give a dictionary of drafters by name, such as {'lookup': PromptLookup()}; "
            f"got {type(drafters).__name__}."
        )
    checked("drafters", drafters, Mapping[str, Any])
    if baseline in drafters:
        raise ValueError(
            f"drafters: {baseline!r} names {baseline} decoding, which is always measured; rename "
            "yours."
        )
    if getattr(config, "num_samples", 1) != 1:
        raise ValueError(
            f"config: num_samples must be 1 to compare, got {config.num_samples}; "
            "repeat the prompts instead."
        )
    for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", *PENALTIES):
        if np.ndim(getattr(config, name, 0)):
            raise ValueError(f"config: {name} must be one value for all prompts to compare.")
    if not config.max_new_tokens:
        raise ValueError("config: max_new_tokens must be at least 1 to compare, got 0.")
    if categories is None:
        return [None] * len(prompts)
    of_each = checked("categories", categories, Sequence[str | None])
    if len(of_each) != len(prompts):
        raise ValueError(
            f"categories: got {len(of_each)} for {len(prompts)} prompts; give one for each."
        )
    return of_each


def _requests(
    runner: Any, names: Sequence[str], prompts: Sequence[PromptLike]
) -> tuple[dict[int, Any], list[Failure]]:
    """Returns the prompts that can be decoded, by index, and those that cannot."""
    requests, failures = {}, []
    for index, prompt in enumerate(prompts):
        try:
            requests[index] = runner.request(names[0], prompt)
        except ValueError as error:
            # A request sees one prompt at a time, so to it each is the first.
            failures.append(Failure(index, str(error).replace("prompts[0]", "it")))
    if not requests:
        raise _nothing_left(prompts, failures)
    for name in names[1:]:
        runner.request(name, prompts[min(requests)])
    return requests, failures


def _nothing_left(prompts: Sequence[PromptLike], failures: Sequence[Failure]) -> ValueError:
    return ValueError(
        f"prompts: none of {len(prompts)} can be decoded; the first because {failures[0].reason}"
    )


def _not_finite(decoded: Mapping[str, Mapping[int, Sample]]) -> list[Failure]:
    return [
        Failure(index, f"the target's logits were not finite ({name})")
        for name, by_index in decoded.items()
        for index, sample in by_index.items()
        if any(row.finish_reason == "not_finite" for row in sample.rows)
    ]


def find_divergence(
    model: Model,
    request: Request,
    prompt_index: int,
    plain: Output,
    other: Output,
) -> Divergence | None:
    """Returns where an output leaves the plain one of the same prompt; `None` if they are equal.

    An end for another reason, or in another place, is a divergence that is never a tie.
    """
    return divergence_of(
        model,
        prompt_index,
        np.asarray(plain.prompt_tokens),
        np.asarray(plain.tokens),
        np.asarray(other.tokens),
        same_end=plain.finish_reason == other.finish_reason,
        prompts=request.prompts,
    )


def _biased_and_penalized(
    logits: np.ndarray, prompts: Prompt, prompt: np.ndarray, emitted: np.ndarray
) -> np.ndarray:
    """Returns logits of what follows a text, as decoding of the first prompt compares them."""
    warp, stop_ids = jax.tree.map(
        lambda rows: jnp.asarray(rows[0]), (prompts.warp, prompts.stop_ids)
    )
    text = jnp.asarray([*prompt, *emitted], jnp.int32)
    unread: Any = None
    row = Context(text, jnp.int32(len(text)), jnp.int32(1), stop_ids, warp, unread, unread)
    root = tree_proposal(chain(0), text[-1:], jnp.ones(1, bool), None)

    def penalized(logits: Array) -> Array:
        if warp.penalties is None:
            return logits
        return penalize(logits, warp.penalties, row, jnp.int32(len(emitted)), root)

    greedy = Warp(bias=warp.bias)
    return np.asarray(warp_logits(jnp.asarray(logits)[None], greedy, penalized)[0])


def divergence_of(
    model: Model,
    prompt_index: int,
    prompt: np.ndarray,
    plain: np.ndarray,
    other: np.ndarray,
    same_end: bool = True,
    prompts: Prompt | None = None,
) -> Divergence | None:
    """Returns where token ids leave the plain ones; see `find_divergence`.

    Args:
        model: the target, to read the gap from.
        prompt_index: the prompt's place, to name it with.
        prompt: ids of the prompt.
        plain: ids that plain decoding emitted.
        other: ids that a method emitted.
        same_end: True if both outputs ended for the same reason.
        prompts: of the request; its bias and penalties apply to the logits that the gap is read
            from. `None`: there are none.

    Example:
        >>> import jaxspec
        >>> model, ids = jaxspec.load("demo"), np.asarray([5, 6, 7])
        >>> divergence_of(model, 0, ids, ids, ids) is None
        True
        >>> divergence_of(model, 0, ids, ids, ids[:2]).position
        2
    """
    common = min(len(plain), len(other))
    differs = plain[:common] != other[:common]
    if not differs.any():
        if len(plain) == len(other) and same_end:
            return None
        following = [int(row[common]) if common < len(row) else None for row in (plain, other)]
        return Divergence(prompt_index, common, *following, gap=None)
    position = int(np.argmax(differs))
    logits = score(model, [*prompt, *plain[:position]]).logits[-1]
    if prompts is not None:
        logits = _biased_and_penalized(logits, prompts, prompt, plain[:position])
    pair = int(plain[position]), int(other[position])
    gap = float(np.max(logits) - np.min(logits[list(pair)]))
    return Divergence(prompt_index, position, *pair, gap)


def with_logprob(model: Model, sample: Sample) -> Sample:
    """Returns the sample of one prompt with the target's log-probability of its output."""
    (row,) = sample.rows
    ids = np.concatenate([np.asarray(row.prompt_tokens), np.asarray(row.tokens)])
    padded = np.zeros(1 << (len(ids) - 1).bit_length(), np.int32)
    padded[: len(ids)] = ids
    logprob = _output_logprob(Params(model.network, ()), padded, len(row.prompt_tokens), len(ids))
    return sample._replace(logprob=float(logprob))


@jax.jit
def _output_logprob(
    params: Params,
    tokens: Int[Array, " bucket"],
    start: Int[Array, ""],
    end: Int[Array, ""],
) -> Float[Array, ""]:
    """Adds up tokens `start` to `end`; 32 rows of logits exist at a time."""
    network, positions = params.target, jnp.arange(tokens.shape[0])
    hidden = network.forward(tokens, positions, causal(tokens.shape[0]), None)

    def logprob(feature_and_next):
        feature, following = feature_and_next
        return jax.nn.log_softmax(network.unembed(feature[None])[0])[following]

    logprobs = jax.lax.map(logprob, (hidden.features[:-1], tokens[1:]), batch_size=32)
    emitted = (positions[1:] >= start) & (positions[1:] < end)
    return jnp.sum(jnp.where(emitted, logprobs, 0.0))


def describe(drafter: DrafterLike | SelfSpeculation | None) -> str:
    """Returns a drafter's settings in full, without its weights and what passes cost.

    Example:
        >>> describe(None)
        'plain decoding'
    """
    if drafter is None:
        return "plain decoding"
    if isinstance(drafter, SelfSpeculation):
        return repr(dataclasses.replace(drafter, costs=None))
    return repr(loaded_drafter(drafter).drafter)
