"""`generate`, `stream` and `score`: prompts in, text out, plain or speculative.

Passing `drafter=` is the only difference between the two: plain decoding is the same program with
a one-node tree.
"""

import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.memory import check_texts_fit
from jaxspec.compilation import CompileClock
from jaxspec.core.checks import checked
from jaxspec.core.masks import causal
from jaxspec.core.types import CarriesOn, DecodeState, Info, Params
from jaxspec.decoding.metrics import Metrics
from jaxspec.decoding.profile import DraftingMode, DraftingProfile, profile_asked
from jaxspec.decoding.request import (
    GenerationConfig,
    PromptLike,
    Request,
    bucket_of,
    check_causal,
    config_and_drafter,
    encode_prompt,
    prepare,
    prompt_list,
)
from jaxspec.decoding.result import (
    FINISH_REASONS,
    Generation,
    GenerationResult,
    TextStream,
    Trace,
    TraceStep,
    host_rows,
    trace_steps,
)
from jaxspec.drafters import DrafterLike, LoadedDrafter
from jaxspec.sharding import on_mesh_of

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

_BYTES_SCORED = 12  # of each logit: itself in the model's dtype and in float32, and its logarithm


def generate(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: GenerationConfig | DrafterLike | None = None,
    drafter: DrafterLike | GenerationConfig | None = None,
    seed: int = 0,
    return_trace: bool = False,
    drafting: DraftingMode | DraftingProfile = "always",
    **settings: Any,
) -> GenerationResult:
    """Continues prompts in one compiled program; each row advances at its own pace.

    Args:
        model: the target, from `load`.
        prompts: one prompt or several: a string, token ids, or chat messages
            (`[{"role": "user", "content": ...}, ...]`). Several are a list, a generator, or a
            column of pandas or `datasets`.
        config: settings; greedy, at most 128 tokens by default.
        drafter: a drafter, or one with its weights (`DraftModel.of(...)`); `None` decodes plainly.
            Both are told apart by what they are: `generate(model, prompts, drafter)` will do.
        seed: seed of the randomness, in 0..2**31 - 1. A row depends on it, its place among the
            prompts and its sample number, never on its neighbours.
        return_trace: record the tree and the verdict of every step; a loop on the host then runs
            the steps, which is slower. Where drafts are drawn, a step's record holds their laws,
            each as wide as the vocabulary: a trace that may not fit into memory is refused.
            With `logprobs` or `warped_logprobs` it also holds the target's log-probability of every
            drafted token.
        drafting: "always" drafts, "never" does not. "auto" drafts where that is measured to be
            faster: once for this machine, model, drafter, sampling and number of rows, before the
            call decodes, which takes seconds and more on a slow machine. A `DraftingProfile`
            decides without measuring. With sampling or in 16 bits, drawn tokens depend on the
            choice; their distribution does not. Without a drafter nothing is measured.
        **settings: fields of `GenerationConfig`, such as `temperature=0.7`, in place of those of
            `config`.

    Returns:
        One `Generation` per prompt and sample, and `Metrics` of the whole.

    Raises:
        ValueError: a prompt is empty or too long, ids are out of range, chat messages meet no
            template, `drafting` is something else, or the drafter was made for another target or
            vocabulary.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> drafter = jaxspec.PromptLookup()
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", max_new_tokens=16)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", drafter, max_new_tokens=16)
        >>> plain[0].tokens.tolist() == fast[0].tokens.tolist()
        True
    """
    config, drafter = config_and_drafter(config, drafter, settings)
    return_trace = checked("return_trace", return_trace, bool)
    request, profile = _prepare(model, prompts, config, drafter, seed, drafting)
    traces = None
    if return_trace:
        request.check_trace_fits()
        traces = [[] for _ in request.prompt_lengths]
    with CompileClock() as clock:
        start = time.perf_counter()
        if traces is None:
            states = request.decode()
        else:
            steps = request.decode_stream()
            states, _ = next(steps)
            for states, info, took in _timed(steps, clock):  # noqa: B007, the last is the result
                found = trace_steps(info, request.tokenizer, took)
                for trace, step in zip(traces, found, strict=False):  # not of rows that fill up
                    trace.extend([] if step is None else [step])
        final, states = states, jax.device_get(_without_caches(states))
        seconds = time.perf_counter() - start - clock.seconds
    hosts = host_rows(states, request.prompt_lengths)
    rows = tuple(
        Generation(
            prompt_tokens=request.prompt_tokens(row),
            tokens=host.tokens,
            text=request.text(host.tokens, host.finish_reason),
            finish_reason=host.finish_reason,
            from_draft=host.from_draft,
            logprobs=host.logprobs,
            warped_logprobs=host.warped_logprobs,
            metrics=host.metrics(),
            prompt_index=row // request.plan.num_samples,
            sample_index=row % request.plan.num_samples,
            trace=None if traces is None else Trace(traces[row]),
            tokenizer=request.tokenizer,
        )
        for row, host in enumerate(hosts)
    )
    metrics = Metrics.of(
        [host.counts for host in hosts],
        [host.tokens.tolist() for host in hosts],
        seconds,
        clock.seconds,
    )
    drafters = tuple(_for_next_prompt(drafter, request, final, row) for row in range(len(rows)))
    return GenerationResult(rows, metrics, drafters, profile)


def _prepare(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: GenerationConfig,
    drafter: DrafterLike | None,
    seed: int,
    drafting: DraftingMode | DraftingProfile,
) -> tuple[Request, DraftingProfile | None]:
    """Returns the request, with the drafter or without, and the profile that decided."""
    prompts = prompt_list(prompts)  # it may be read only once
    request = prepare(model, prompts, config, drafter, seed)
    profile = profile_asked(drafting, model, drafter, config, request.num_rows)
    if drafting == "never" or (profile is not None and not profile.drafts):
        request = prepare(model, prompts, config, None, seed)
    return request, profile


def _timed(
    steps: Iterator[tuple[DecodeState, Info | None]], clock: CompileClock
) -> Iterator[tuple[DecodeState, Info, float]]:
    """Yields what follows the first state, with the seconds of each step without compilation."""
    while True:
        start = time.perf_counter() - clock.seconds
        states, info = next(steps, (None, None))
        if states is None:
            return
        assert info is not None, "only the first state comes without a step"
        yield states, info, time.perf_counter() - clock.seconds - start


def _without_caches(states: DecodeState) -> DecodeState:
    """Returns the part of the states that results need: nothing larger is fetched."""
    context = states.context._replace(cache=(), recent=(), warp=())
    return states._replace(context=context, draft=(), key=())


def _for_next_prompt(
    drafter: DrafterLike | None, request: Request, states: DecodeState, row: int
) -> DrafterLike | None:
    """Returns the drafter for a row's next prompt, see `GenerationResult.drafters`."""
    method = request.drafter
    if not isinstance(method, CarriesOn):
        return drafter
    context = states.context._replace(cache=())
    draft, context = jax.tree.map(itemgetter(row), (states.draft, context))
    return LoadedDrafter(request.drafter, method.carried(request.params.draft, draft, context))


class StreamStep(NamedTuple):
    """Tokens and text that one step of a streamed row added.

    Attributes:
        tokens: ids emitted by this step.
        from_draft: one entry per token: True if it was drafted and accepted.
        text: the text that is now certain. Incomplete characters, and text that may begin a stop
            string, come with a later step. All pieces joined are `Generation.text` if the tokens
            spell valid UTF-8; otherwise replacement characters may stand elsewhere.
        finish_reason: `None` while the row is running; see `Generation`.
        trace: the step's tree and verdict; `None` for runtimes that do not give them.
    """

    tokens: np.ndarray
    from_draft: np.ndarray
    text: str
    finish_reason: str | None
    trace: TraceStep | None


def stream(
    model: "Model",
    prompt: PromptLike,
    config: GenerationConfig | DrafterLike | None = None,
    drafter: DrafterLike | GenerationConfig | None = None,
    seed: int = 0,
    drafting: DraftingMode | DraftingProfile = "always",
    **settings: Any,
) -> Iterator[StreamStep]:
    """Yields the continuation of ONE prompt step by step, as it is decoded.

    The tokens are those of `generate` with the same arguments.

    Args:
        model: see `generate`.
        prompt: one prompt, see `generate`.
        config: see `generate`, also for its place; `num_samples` must be 1.
        drafter: see `generate`.
        seed: see `generate`.
        drafting: see `generate`.
        **settings: see `generate`.

    Raises:
        ValueError: as `generate` does, or there are several prompts or samples.

    Example:
        >>> import jaxspec
        >>> model, drafter = jaxspec.load("demo"), jaxspec.PromptLookup()
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> steps = list(jaxspec.stream(model, "What is 2 + 3?", config, drafter))
        >>> sum(len(step.tokens) for step in steps), steps[-1].finish_reason
        (16, 'length')
    """
    config, drafter = config_and_drafter(config, drafter, settings)
    request, _ = _prepare(model, prompt, config, drafter, seed, drafting)
    if len(request.prompt_lengths) != 1:
        raise ValueError(
            f"stream shows one row, got {len(request.prompt_lengths)}; use generate for several."
        )
    shown = TextStream(request.tokenizer, request.stop_strings)
    steps = request.decode_stream()
    next(steps)
    for states, info in steps:
        assert info is not None
        # Draft distributions are as wide as the vocabulary; only `return_trace` fetches them.
        slim = info._replace(proposal=info.proposal._replace(draft_logprobs=None))
        stop, info = jax.device_get((states.stop, slim))
        step, *_ = trace_steps(info, request.tokenizer)  # on a mesh, others fill up its parts
        reason = FINISH_REASONS[stop[0]] if stop[0] else None
        if step is None:  # the row ended without a token: its logits were not finite
            empty = np.zeros(0, np.int32)
            step = TraceStep(empty, empty, empty.astype(bool), None, empty, empty, empty, 0)
        from_draft = np.arange(len(step.emitted)) < len(step.path) - 1
        yield StreamStep(step.emitted, from_draft, shown.push(step.emitted, reason), reason, step)


class Score(NamedTuple):
    """Scores of a given text.

    Attributes:
        logits: `[tokens, vocab]`; row i scores the token that follows token i.
        logprobs: `[tokens - 1]`; entry i is the log-probability of token i + 1 given those before,
            in nats.
    """

    logits: np.ndarray
    logprobs: np.ndarray


def score(model: "Model", tokens: str | Sequence[int]) -> Score:
    """Scores every token of a text in one pass: no temperature or filter, at least float32.

    Args:
        model: the model, from `load`.
        tokens: a text or its token ids.

    Raises:
        ValueError: the text is empty or too long, ids are out of range, the logits of all places do
            not fit into memory, or the model is a diffusion language model.

    Example:
        >>> import jaxspec
        >>> scores = jaxspec.score(jaxspec.load("demo"), [1, 2, 3])
        >>> scores.logits.shape[0], scores.logprobs.shape
        (3, (2,))
    """
    count, padded = _padded(model, tokens)
    with on_mesh_of(model.params):
        logits, logprobs = _score(Params(model.network, ()), padded)
    return Score(np.asarray(logits)[:count], np.asarray(logprobs)[: count - 1])


def likelihoods(model: "Model", tokens: str | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Scores every token of a text as `score` does, and leaves the logits on the device.

    Args:
        model: see `score`.
        tokens: see `score`.

    Returns:
        For each token but the first: its log-probability after those before it, and the id that is
        the likeliest there.

    Raises:
        ValueError: as for `score`.

    Example:
        >>> import jaxspec
        >>> logprobs, likeliest = likelihoods(jaxspec.load("demo"), [1, 2, 3])
        >>> logprobs.shape, likeliest.shape
        ((2,), (2,))
    """
    count, padded = _padded(model, tokens)
    with on_mesh_of(model.params):
        logprobs, likeliest = _likelihoods(Params(model.network, ()), padded)
    return np.asarray(logprobs)[: count - 1], np.asarray(likeliest)[: count - 1]


def _padded(model: "Model", tokens: str | Sequence[int]) -> tuple[int, np.ndarray]:
    """Returns the number of a text's tokens, and their ids with padding at the end."""
    check_causal(model)
    ids = encode_prompt(model, tokens, "tokens", spare=0)
    # Texts of similar lengths share a program: padding at the end changes nothing before it.
    padded = np.zeros(bucket_of(len(ids)), np.int32)
    padded[: len(ids)] = ids
    check_texts_fit(_BYTES_SCORED * model.vocab_size * len(padded), len(padded), 1)
    return len(ids), padded


@jax.jit
def _likelihoods(params, tokens):
    logits, logprobs = _score(params, tokens)
    return logprobs, jnp.argmax(logits[:-1], axis=-1)


@jax.jit
def _score(params, tokens):
    network, count = params.target, tokens.shape[0]
    hidden = network.forward(tokens, jnp.arange(count), causal(count), None)
    logits = network.unembed(hidden.features)
    logprobs = jax.nn.log_softmax(logits[:-1], axis=-1)
    return logits, jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]
