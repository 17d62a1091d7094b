"""Drafters against plain decoding: same process, same prompts, in turns, one token counter."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.bench.comparison import Comparison, ComparisonRow, Divergence, Failure
from jaxspec.bench.figures import Trial, figures_of_subsets, subsets_of
from jaxspec.bench.machine import num_bytes, read_bandwidth, this_machine
from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint import Model
from jaxspec.core.masks import causal
from jaxspec.core.types import Drafter, LanguageModel
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import (
    GenerationConfig,
    PromptLike,
    Request,
    generate,
    prepare,
    prompt_list,
    score,
    stream,
)
from jaxspec.progress import progress_bar
from jaxspec.result import Generation, GenerationResult

PLAIN = "plain"
FIRST_TOKEN_REPEATS = 5


def compare(
    model: Model,
    prompts: Sequence[PromptLike],
    drafters: Mapping[str, Drafter | LoadedDrafter],
    config: GenerationConfig | None = None,
    *,
    repeats: int = 3,
    seed: int = 0,
    categories: Sequence[str | None] | None = None,
    progress: bool = True,
) -> Comparison:
    """Decodes prompts one at a time, plainly and with every drafter, and sets them side by side.

    Plain decoding is always measured, in the same process, and methods take turns on each prompt.
    Each prompt's time is the median of its repeats. What a first call compiles is timed apart.

    Args:
        model: the target.
        prompts: strings, token ids or chats.
        drafters: what to compare, by the names to show.
        config: how to decode, `num_samples` 1 and one value of everything for all prompts. Greedy
            outputs are checked against plain decoding's; see `Comparison.outputs_agree`.
        repeats: timed runs of each prompt and method.
        seed: of sampling; prompt i has `seed + i`.
        categories: of the prompts, for figures by category.
        progress: show a bar where standard error is a terminal.

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
    config = config or GenerationConfig()
    prompts = prompt_list(prompts)
    categories = _check_arguments(prompts, drafters, config, repeats, categories)
    methods = {PLAIN: None, **drafters}
    machine = this_machine()
    going_on = dict(methods)  # what each method drafts its next prompt with

    def run(name: str, index: int) -> GenerationResult:
        # One seed for all would have their samples begin alike.
        return generate(model, prompts[index], config, going_on[name], seed + index)

    requests, failures = _requests(model, prompts, config, methods, seed)
    by_length = sorted(requests, key=lambda index: requests[index].prompt_lengths[0])
    longest, middle = prompts[by_length[-1]], prompts[by_length[len(by_length) // 2]]
    # Prompts that share a bucket share the programs of all methods.
    of_each_shape: dict[tuple[int, ...], list[int]] = {}
    for index in requests:
        of_each_shape.setdefault(requests[index].prompts.tokens.shape, []).append(index)

    parts = len(methods) * (len(of_each_shape) + repeats * len(requests) + 1) + 2
    with progress_bar(parts, progress) as advance:
        compile_seconds = dict.fromkeys(methods, 0.0)
        generations = {name: {} for name in methods}
        seconds = {name: {} for name in methods}
        for indices in of_each_shape.values():
            release_programs()
            for name in methods:
                advance(f"compiling {name}")
                compiling = run(name, indices[0])
                compile_seconds[name] += compiling.metrics.compile_seconds or 0.0
                if compiling.drafters[0] is not going_on[name]:
                    # What is carried on has another structure than what was begun with.
                    generate(model, prompts[indices[0]], config, compiling.drafters[0], seed)
            outputs, times = _decode_in_turns(run, going_on, indices, repeats, advance)
            for name in methods:
                generations[name] |= outputs[name]
                seconds[name] |= times[name]
        failures += _not_finite(generations)
        kept = sorted(set(requests) - {failure.prompt_index for failure in failures})
        if not kept:
            raise _nothing_left(prompts, failures)
        advance("scoring outputs")
        trials = {
            name: [trial_of(model, rows[index], seconds[name][index]) for index in kept]
            for name, rows in generations.items()
        }
        first_token = {}
        for name, drafter in methods.items():
            advance(f"first token of {name}")
            release_programs()
            first_token[name] = _first_token_seconds(model, middle, config, drafter, seed)
        advance("reading memory")
        weight_bytes = num_bytes(model.params)
        bandwidth = read_bandwidth(weight_bytes)

    greedy = not np.any(config.temperature)
    plain = trials[PLAIN]
    subsets = subsets_of(plain, [categories[index] for index in kept])

    def row(name: str, drafter: Drafter | LoadedDrafter | None) -> ComparisonRow:
        divergences = (
            find_divergences(model, [requests[index] for index in kept], kept, plain, trials[name])
            if greedy
            else ()
        )
        release_programs()
        return ComparisonRow(
            name=name,
            settings=describe(drafter),
            **figures_of_subsets(trials[name], plain, subsets)._asdict(),
            num_identical=len(kept) - len(divergences) if greedy else None,
            divergences=divergences,
            first_token_seconds=first_token[name],
            peak_bytes=prepare(model, longest, config, drafter, seed).peak_bytes(),
            compile_seconds=compile_seconds[name],
            trials=tuple(trials[name]),
        )

    return Comparison(
        rows=tuple(row(name, drafter) for name, drafter in methods.items()),
        config=config,
        seed=seed,
        repeats=repeats,
        failures=tuple(failures),
        prompt_indices=tuple(kept),
        model=model.name,
        dtype=str(model.network.dtype),
        weight_bytes=weight_bytes,
        read_bandwidth=bandwidth,
        machine=machine,
    )


def _check_arguments(
    prompts: Sequence[PromptLike],
    drafters: Mapping[str, Drafter | LoadedDrafter],
    config: GenerationConfig,
    repeats: int,
    categories: Sequence[str | None] | None,
) -> Sequence[str | None]:
    if PLAIN in drafters:
        raise ValueError(
            f"drafters: {PLAIN!r} names plain decoding, which is always measured; rename yours."
        )
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    if config.num_samples != 1:
        raise ValueError(
            f"config: num_samples must be 1 to compare, got {config.num_samples}; "
            "repeat the prompts instead."
        )
    for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p"):
        if np.ndim(getattr(config, name)):
            raise ValueError(f"config: {name} must be one value for all prompts to compare.")
    if not config.max_new_tokens:
        raise ValueError("config: max_new_tokens must be at least 1 to compare, got 0.")
    if categories is None:
        return [None] * len(prompts)
    if len(categories) != len(prompts):
        raise ValueError(
            f"categories: got {len(categories)} for {len(prompts)} prompts; give one for each."
        )
    return categories


def _requests(
    model: Model,
    prompts: Sequence[PromptLike],
    config: GenerationConfig,
    methods: Mapping[str, Drafter | LoadedDrafter | None],
    seed: int,
) -> tuple[dict[int, Request], list[Failure]]:
    """What can be decoded, by index, and what cannot."""
    requests, failures = {}, []
    for index, prompt in enumerate(prompts):
        try:
            requests[index] = prepare(model, prompt, config, None, seed)
        except ValueError as error:
            # `prepare` sees one prompt at a time, so to it each is the first.
            failures.append(Failure(index, str(error).replace("prompts[0]", "it")))
    if not requests:
        raise _nothing_left(prompts, failures)
    for drafter in methods.values():
        prepare(model, prompts[min(requests)], config, drafter, seed)
    return requests, failures


def _nothing_left(prompts: Sequence[PromptLike], failures: Sequence[Failure]) -> ValueError:
    return ValueError(
        f"prompts: none of {len(prompts)} can be decoded; the first because {failures[0].reason}"
    )


def _decode_in_turns(
    run: Callable[[str, int], GenerationResult],
    going_on: dict[str, Drafter | LoadedDrafter | None],
    indices: Sequence[int],
    repeats: int,
    advance: Callable[[str], None],
) -> tuple[dict[str, dict[int, Generation]], dict[str, dict[int, list[float]]]]:
    """Outputs and times, by method and prompt.

    A machine's speed drifts, so methods follow each other on every prompt, in rotating order.
    Drafters that learn from prompt to prompt go on where the last one left them.
    """
    names = list(going_on)
    generations = {name: {} for name in names}
    seconds = {name: {index: [] for index in indices} for name in names}
    for repeat in range(repeats):
        for turn, index in enumerate(indices):
            for place in range(len(names)):
                name = names[(turn + repeat + place) % len(names)]
                advance("decoding")
                result = run(name, index)
                going_on[name] = result.drafters[0]
                generations[name][index] = result[0]
                seconds[name][index].append(result.metrics.seconds)
    return generations, seconds


def _not_finite(generations: Mapping[str, Mapping[int, Generation]]) -> list[Failure]:
    return [
        Failure(index, f"the target's logits were not finite ({name})")
        for name, rows in generations.items()
        for index, row in rows.items()
        if row.finish_reason == "not_finite"
    ]


def find_divergences(
    model: Model,
    requests: Sequence[Request],
    indices: Sequence[int],
    plain: Sequence[Trial],
    trials: Sequence[Trial],
) -> tuple[Divergence, ...]:
    """Where greedy outputs leave the plain ones of the same prompts, all in the same order."""
    found = (
        find_divergence(model, request, index, expected.generation, trial.generation)
        for request, index, expected, trial in zip(requests, indices, plain, trials, strict=True)
    )
    return tuple(divergence for divergence in found if divergence is not None)


def find_divergence(
    model: Model, request: Request, prompt_index: int, plain: Generation, other: Generation
) -> Divergence | None:
    """Where an output leaves the plain one of the same prompt; `None` if they are the same.

    An end for another reason, or in another place, is a divergence that nothing ties.
    """
    bias = request.prompts.warp.bias
    return divergence_of(
        model,
        prompt_index,
        plain.prompt_tokens,
        plain.tokens,
        other.tokens,
        same_end=plain.finish_reason == other.finish_reason,
        bias=None if bias is None else np.asarray(bias[0]),
    )


def divergence_of(
    model: Model,
    prompt_index: int,
    prompt: np.ndarray,
    plain: np.ndarray,
    other: np.ndarray,
    same_end: bool = True,
    bias: np.ndarray | None = None,
) -> Divergence | None:
    """The same of token ids. `bias` is added to the logits that the gap is read from."""
    common = min(len(plain), len(other))
    differs = plain[:common] != other[:common]
    if not differs.any():
        if len(plain) == len(other) and same_end:
            return None
        following = [int(row[common]) if common < len(row) else None for row in (plain, other)]
        return Divergence(prompt_index, common, *following, gap=None)
    position = int(np.argmax(differs))
    logits = score(model, [*prompt, *plain[:position]]).logits[-1]
    if bias is not None:
        logits = logits + bias
    pair = int(plain[position]), int(other[position])
    gap = float(np.max(logits) - np.min(logits[list(pair)]))
    return Divergence(prompt_index, position, *pair, gap)


def trial_of(model: Model, row: Generation, seconds: Sequence[float]) -> Trial:
    """One prompt's output, the median of its times, and what the target says of it."""
    ids = np.concatenate([row.prompt_tokens, row.tokens])
    padded = np.zeros(1 << (len(ids) - 1).bit_length(), np.int32)
    padded[: len(ids)] = ids
    logprob = _output_logprob(model.network, padded, len(row.prompt_tokens), len(ids))
    return Trial(row, float(np.median(seconds)), float(logprob))


@jax.jit
def _output_logprob(
    network: LanguageModel,
    tokens: Int[Array, " bucket"],
    start: Int[Array, ""],
    end: Int[Array, ""],
) -> Float[Array, ""]:
    """Sum over tokens `start` up to `end`; 32 rows of logits exist at a time."""
    positions = jnp.arange(tokens.shape[0])
    hidden = network.forward(tokens, positions, causal(tokens.shape[0]), None)

    def logprob(feature_and_next):
        feature, following = feature_and_next
        return jax.nn.log_softmax(network.unembed(feature[None])[0])[following]

    logprobs = jax.lax.map(logprob, (hidden.features[:-1], tokens[1:]), batch_size=32)
    emitted = (positions[1:] >= start) & (positions[1:] < end)
    return jnp.sum(jnp.where(emitted, logprobs, 0.0))


def _first_token_seconds(
    model: Model,
    prompt: PromptLike,
    config: GenerationConfig,
    drafter: Drafter | LoadedDrafter | None,
    seed: int,
) -> float:
    """Median time until `stream` gives something, the first call (which compiles) left out."""
    seconds = []
    for _ in range(1 + FIRST_TOKEN_REPEATS):
        start = time.perf_counter()
        next(stream(model, prompt, config, drafter, seed))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def describe(drafter: Drafter | LoadedDrafter | None) -> str:
    """A drafter's settings in full, without its weights."""
    if drafter is None:
        return "plain decoding"
    return repr(drafter.drafter if isinstance(drafter, LoadedDrafter) else drafter)
