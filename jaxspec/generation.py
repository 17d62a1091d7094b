"""`generate`, `stream` and `score`: prompts in, text out, plain or speculative.

Passing `drafter=` is the only difference between the two: plain decoding is the same program with
a one-node tree.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.memory import check_cache_fits
from jaxspec.checkpoint.tokenizer import covers
from jaxspec.compilation import CompileClock
from jaxspec.core.decode import Prompt
from jaxspec.core.loop import DecodePlan, decode, decode_stream, plan_decoding
from jaxspec.core.masks import causal
from jaxspec.core.stopping import StopAutomaton, stop_automaton
from jaxspec.core.types import CarriesOn, ChecksFit, DecodeState, Drafter, Info, Params, Warp
from jaxspec.drafters import LoadedDrafter, NoDraft
from jaxspec.drafters.fit import OtherTargetError
from jaxspec.result import (
    FINISH_REASONS,
    Generation,
    GenerationResult,
    Trace,
    TraceStep,
    combine_metrics,
    host_rows,
    trace_steps,
)
from jaxspec.sharding import beside, mesh_of, on_mesh_of, shares_of_memory, spread_rows

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model, Tokenizer

MIN_BUCKET = 16

Message = Mapping[str, Any]
PromptLike = str | Sequence[int] | np.ndarray | Sequence[Message]
PerPrompt = float | Sequence[float]
PerRow = Callable[[str, type], Any]
"""A field of `GenerationConfig` as an array with one entry per prompt."""


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How to decode. Numbers may be given once, or as a sequence with one entry per prompt.

    Attributes:
        max_new_tokens: tokens to emit at most; never exceeded. 0 gives empty results.
        temperature: 0 (the default) is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens that hold this much probability; in (0, 1].
        min_p: keep tokens at least this likely relative to the likeliest; in [0, 1).
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: if given, no other id is ever emitted.
        banned_token_ids: ids never emitted.
        stop_token_ids: end a row after any of these; `None` takes the model's own, `()` none.
        stop: strings that end a row; the text is cut before them.
        num_samples: continuations per prompt, each with randomness of its own.
        logprobs: record the target's log-probability of each token, before any warping.
        warped_logprobs: the same after temperature and filters.
        repetition_penalty: only 1 is supported: a checkpoint whose `generation_config.json` asks
            for another is refused unless you set 1 here.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    max_new_tokens: int | Sequence[int] = 128
    temperature: PerPrompt = 0.0
    top_k: int | Sequence[int] = 0
    top_p: PerPrompt = 1.0
    min_p: PerPrompt = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    num_samples: int = 1
    logprobs: bool = False
    warped_logprobs: bool = False
    repetition_penalty: float | None = None

    def __post_init__(self):
        for name in ("max_new_tokens", "top_k", "num_samples"):
            check_numbers(name, getattr(self, name), "a whole number", lambda value: value % 1 == 0)
            check_numbers(name, getattr(self, name), "below 2 ** 31", lambda value: value < 2**31)
        check_numbers("max_new_tokens", self.max_new_tokens, "at least 0", lambda value: value >= 0)
        check_numbers("temperature", self.temperature, "at least 0", lambda value: value >= 0)
        check_numbers(
            "temperature", self.temperature, "finite in float32", lambda value: value < 3e38
        )
        check_numbers("top_k", self.top_k, "at least 0", lambda value: value >= 0)
        check_numbers("top_p", self.top_p, "in (0, 1]", lambda value: 0 < value <= 1)
        check_numbers("min_p", self.min_p, "in [0, 1)", lambda value: 0 <= value < 1)
        check_numbers("num_samples", self.num_samples, "at least 1", lambda value: value >= 1)
        if not isinstance(self.num_samples, int | np.integer):
            raise ValueError(f"num_samples must be one int, got {self.num_samples!r}.")
        strings = self.stop_strings if isinstance(self.stop, str | Sequence) else None
        if strings is None or not all(isinstance(string, str) for string in strings):
            raise ValueError(f"stop must be a string or several, got {self.stop!r}.")
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            check_id_list(name, getattr(self, name))
        if self.repetition_penalty not in (None, 1, 1.0):
            raise ValueError(
                f"repetition_penalty: only 1 is supported, got {self.repetition_penalty}."
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_numbers(
    name: str, values: Any, requirement: str, holds: Callable[[Any], bool | np.bool_]
) -> None:
    """Refuses a setting, one number or one for each prompt, that is not as it must be.

    Raises:
        ValueError: something is no number, or `holds` is not true of it.
    """
    numbers = np.atleast_1d(np.asarray(values))
    if numbers.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be {requirement}, got {values!r}.")
    for value in numbers:
        if not holds(value):
            raise ValueError(f"{name} must be {requirement}, got {values}.")


def check_id_list(name: str, ids: Any) -> None:
    """Refuses token ids that are not a list of whole numbers, or `None`.

    Raises:
        ValueError: naming the setting.
    """
    if ids is None:
        return
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a list of token ids, got {ids!r}.")


def one_per_prompt(name: str, values: Any, num_prompts: int, dtype: type) -> np.ndarray:
    """A setting as an array with one entry per prompt.

    Raises:
        ValueError: it is neither one number nor one for each prompt.
    """
    array = np.asarray(values, dtype)
    if array.ndim > 1:
        raise ValueError(
            f"{name}: give one number, or a list of one for each prompt; got {values}."
        )
    if array.ndim and len(array) != num_prompts:
        raise ValueError(
            f"{name}: got {len(array)} values for {num_prompts} prompts; give one, or one for each."
        )
    return np.broadcast_to(array, num_prompts)


def generate(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: GenerationConfig | None = None,
    drafter: Drafter | LoadedDrafter | None = None,
    seed: int = 0,
    return_trace: bool = False,
) -> GenerationResult:
    """Continues prompts, each row at its own pace, in one compiled program.

    Args:
        model: the target, from `load`.
        prompts: one prompt or several: a string, token ids, or chat messages
            (`[{"role": "user", "content": ...}, ...]`).
        config: how to decode; greedy, 128 tokens by default.
        drafter: a drafter, or one with its weights (`DraftModel.of(...)`); `None` decodes plainly.
        seed: of the randomness. A row depends on `seed`, its place among the prompts and its
            sample number, never on its neighbours.
        return_trace: record every step's tree and verdict; decodes by a host loop to do so.

    Returns:
        One `Generation` per prompt and sample, and `Metrics` of the whole.

    Raises:
        ValueError: for an empty or too long prompt, ids out of range, chat messages without a
            template, or a draft model with another vocabulary.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> prompt = "Question: What is 2 + 3?"
        >>> plain = jaxspec.generate(model, prompt)
        >>> fast = jaxspec.generate(model, prompt, drafter=jaxspec.PromptLookup())
        >>> plain[0].tokens.tolist() == fast[0].tokens.tolist()
        True
    """
    request = prepare(model, prompts, config or GenerationConfig(), drafter, seed)
    traces = [[] for _ in request.prompt_lengths] if return_trace else None
    with CompileClock() as clock:
        start = time.perf_counter()
        if traces is None:
            states = request.decode()
        else:
            steps = request.decode_stream()
            states, _ = next(steps)
            for states, info in steps:  # noqa: B007, the last state is the result
                assert info is not None, "only the first state comes without a step"
                for row, step in enumerate(trace_steps(info, request.tokenizer)):
                    traces[row].extend([] if step is None else [step])
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
            metrics=combine_metrics([host]),
            prompt_index=row // request.plan.num_samples,
            sample_index=row % request.plan.num_samples,
            trace=None if traces is None else Trace(traces[row]),
            tokenizer=request.tokenizer,
        )
        for row, host in enumerate(hosts)
    )
    drafters = tuple(_for_next_prompt(drafter, request, final, row) for row in range(len(rows)))
    return GenerationResult(rows, combine_metrics(hosts, seconds, clock.seconds), drafters)


class StreamStep(NamedTuple):
    """What one step of a streamed row added.

    tokens: ids emitted by this step.
    from_draft: for each of them, True if it was drafted and accepted.
    text: the text that is now certain; characters still incomplete, or that may turn out to begin
        a stop string, come with a later step. All pieces joined are `Generation.text`, if the
        tokens spell valid UTF-8: replacement characters may fall elsewhere.
    finish_reason: `None` while the row is running; see `Generation`.
    trace: the step's tree and verdict; `None` where another runtime keeps them to itself.
    """

    tokens: np.ndarray
    from_draft: np.ndarray
    text: str
    finish_reason: str | None
    trace: TraceStep | None


def stream(
    model: "Model",
    prompt: PromptLike,
    config: GenerationConfig | None = None,
    drafter: Drafter | LoadedDrafter | None = None,
    seed: int = 0,
) -> Iterator[StreamStep]:
    """The same decoding of ONE prompt, step by step as it happens.

    Args and errors: as for `generate`. `num_samples` must be 1.
    """
    config = config or GenerationConfig()
    request = prepare(model, prompt, config, drafter, seed)
    if len(request.prompt_lengths) != 1:
        raise ValueError(
            f"stream shows one row, got {len(request.prompt_lengths)}; use generate for several."
        )
    shown = TextStream(request.tokenizer, request.stop_strings)
    steps = request.decode_stream()
    next(steps)
    for states, info in steps:
        assert info is not None
        # The laws are a vocabulary wide, and nobody may look: `return_trace` fetches them.
        lawless = info._replace(proposal=info.proposal._replace(draft_logprobs=None))
        stop, info = jax.device_get((states.stop, lawless))
        (step,) = trace_steps(info, request.tokenizer)
        reason = FINISH_REASONS[stop[0]] if stop[0] else None
        if step is None:  # the row ended without a token: its logits were not finite
            empty = np.zeros(0, np.int32)
            step = TraceStep(empty, empty, empty.astype(bool), None, empty, empty, empty, 0)
        from_draft = np.arange(len(step.emitted)) < len(step.path) - 1
        yield StreamStep(step.emitted, from_draft, shown.push(step.emitted, reason), reason, step)


class Score(NamedTuple):
    """What a model says of a given text.

    logits: `[tokens, vocab]`; row i scores the token that follows token i.
    logprobs: `[tokens - 1]`; entry i is the log-probability of token i + 1 given those before.
    """

    logits: np.ndarray
    logprobs: np.ndarray


def score(model: "Model", tokens: str | Sequence[int]) -> Score:
    """Scores every token of a text in one pass; unwarped, at least float32.

    Raises:
        ValueError: for an empty or too long text, ids out of range, or a diffusion model.
    """
    _check_causal(model)
    ids = encode_prompt(model, tokens)
    check_ids(model, ids, "tokens", spare=0)
    # Texts of similar lengths share a program; what follows a text does not reach back into it.
    padded = np.zeros(bucket_of(len(ids)), np.int32)
    padded[: len(ids)] = ids
    with on_mesh_of(model.params):
        logits, logprobs = _score(model.network, padded)
    return Score(np.asarray(logits)[: len(ids)], np.asarray(logprobs)[: len(ids) - 1])


@jax.jit
def _score(network, tokens):
    count = tokens.shape[0]
    hidden = network.forward(tokens, jnp.arange(count), causal(count), None)
    logits = network.unembed(hidden.features)
    logprobs = jax.nn.log_softmax(logits[:-1], axis=-1)
    return logits, jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of `generate`, checked and turned into arrays.

    prompts: one entry per prompt, for `plan.num_samples` rows each.
    prompt_lengths: one per row.
    """

    params: Params
    prompts: Prompt
    automaton: StopAutomaton | None
    drafter: Drafter
    plan: DecodePlan
    prompt_lengths: tuple[int, ...]
    stop_strings: tuple[str, ...]
    tokenizer: "Tokenizer | None"

    def decode(self) -> DecodeState:
        with on_mesh_of(self.params):
            return decode(*self._arrays(), drafter=self.drafter, plan=self.plan)

    def decode_stream(self) -> Iterator[tuple[DecodeState, Info | None]]:
        with on_mesh_of(self.params):
            steps = decode_stream(*self._arrays(), drafter=self.drafter, plan=self.plan)
        while True:
            # What the caller does between steps is not done on the mesh.
            with on_mesh_of(self.params):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def peak_bytes(self) -> int:
        """What the program of `decode` holds at once, by its compiler: weights, rows, scratch.

        Costs nothing after `decode`, which has compiled that program.
        """
        with on_mesh_of(self.params):
            lowered = decode.lower(*self._arrays(), drafter=self.drafter, plan=self.plan)
            memory: Any = lowered.compile().memory_analysis()
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )

    def _arrays(self) -> tuple[Params, Prompt, StopAutomaton | None]:
        """What programs are given, the rows spread over the devices that the model lies on."""
        mesh = mesh_of(self.params)
        prompts = self.prompts if mesh is None else spread_rows(mesh, self.prompts)
        return self.params, prompts, self.automaton

    def prompt_tokens(self, row: int) -> np.ndarray:
        tokens = self.prompts.tokens[row // self.plan.num_samples]
        return np.asarray(tokens[: self.prompt_lengths[row]])

    def text(self, tokens: np.ndarray, finish_reason: str) -> str | None:
        return text_of(self.tokenizer, tokens, finish_reason, self.stop_strings)


def text_of(
    tokenizer: "Tokenizer | None",
    tokens: np.ndarray,
    finish_reason: str,
    stop_strings: Sequence[str],
) -> str | None:
    """See `Generation.text`."""
    if tokenizer is None:
        return None
    text = tokenizer.decode(tokens.tolist())
    return cut_at(text, stop_strings) if finish_reason == "stop_string" else text


def cut_at(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the stop string that came first."""
    starts = [text.find(string) for string in stop_strings if string in text]
    if not starts and any(
        string.startswith(" ") and text.startswith(string[1:]) for string in stop_strings
    ):
        return ""  # decoders of the SentencePiece kind drop the space that a text begins with
    return text[: min(starts)] if starts else text


def _for_next_prompt(
    drafter: Drafter | LoadedDrafter | None, request: Request, states: DecodeState, row: int
) -> Drafter | LoadedDrafter | None:
    """See `GenerationResult.drafters`."""
    method = request.drafter
    if not isinstance(method, CarriesOn):
        return drafter
    context = states.context._replace(cache=())
    draft, context = jax.tree.map(itemgetter(row), (states.draft, context))
    return LoadedDrafter(request.drafter, method.carried(request.params.draft, draft, context))


class TextStream:
    """Text of a growing row, withheld while it may turn out to begin a stop string."""

    def __init__(self, tokenizer: "Tokenizer | None", stop_strings: Sequence[str]):
        self._stop_strings = stop_strings
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._held = ""

    def push(self, tokens: np.ndarray, finish_reason: str | None) -> str:
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.push(tokens.tolist())
        if finish_reason is not None:
            self._held += self._detokenizer.finish()
            cut = finish_reason == "stop_string"
            piece = cut_at(self._held, self._stop_strings) if cut else self._held
            self._held = ""
            return piece
        certain = len(self._held) - max(map(self._overlap, self._stop_strings), default=0)
        piece, self._held = self._held[:certain], self._held[certain:]
        return piece

    def _overlap(self, string: str) -> int:
        """Longest end of the held text that begins `string`."""
        longest = min(len(string) - 1, len(self._held))
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if self._held.endswith(string[:size])), 0)


def _without_caches(states: DecodeState) -> DecodeState:
    """What a result is made of, so that nothing larger is fetched from the device."""
    context = states.context._replace(cache=(), recent=(), warp=())
    return states._replace(context=context, draft=(), key=())


def prepare(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: GenerationConfig,
    drafter: Drafter | LoadedDrafter | None,
    seed: int,
) -> Request:
    """Checks a call's arguments and builds the arrays of its rows: how `generate` begins.

    Raises:
        ValueError: as `generate` does.
    """
    loaded = check_request(model, config, drafter, seed)
    encoded = [encode_prompt(model, prompt) for prompt in prompt_list(prompts)]
    for index, ids in enumerate(encoded):
        check_ids(model, ids, f"prompts[{index}]")
    lengths = np.asarray([len(ids) for ids in encoded], np.int32)
    bucket = bucket_of(int(lengths.max()))
    tokens = np.zeros((len(encoded), bucket), np.int32)
    for prompt, ids in enumerate(encoded):
        tokens[prompt, : len(ids)] = ids

    def per_prompt(name: str, dtype: type) -> np.ndarray:
        return one_per_prompt(name, getattr(config, name), len(encoded), dtype)

    budget = per_prompt("max_new_tokens", np.int32)
    index = np.arange(len(encoded), dtype=np.int32)
    stop_ids = model.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "length": lengths,
        "room": np.minimum(budget, model.config.max_positions - lengths),
        "seed": np.stack([np.full_like(index, seed), index], axis=1),
        "stop_ids": np.tile(np.asarray([*stop_ids] or [-1], np.int32), (len(encoded), 1)),
    }
    requested = Prompt(**arrays, warp=warps_of(model, config, per_prompt, len(encoded)))
    plan = plan_decoding(
        bucket,
        int(requested.room.max()),
        loaded.drafter,
        num_samples=config.num_samples,
        logprobs=config.logprobs,
        warped_logprobs=config.warped_logprobs,
    )
    row_lengths = np.repeat(lengths, config.num_samples)
    check_cache_fits(
        model.config,
        model.network.dtype,
        plan.capacities[-1],
        len(row_lengths),
        shares_of_memory(mesh_of(model.params), rows=True),
    )
    return Request(
        params=Params(model.network, loaded.params),
        prompts=requested,
        automaton=automaton_of(model, config),
        drafter=loaded.drafter,
        plan=plan,
        prompt_lengths=tuple(row_lengths.tolist()),
        stop_strings=config.stop_strings,
        tokenizer=model.tokenizer,
    )


def check_request(
    model: "Model",
    config: GenerationConfig,
    drafter: Drafter | LoadedDrafter | None,
    seed: int,
) -> LoadedDrafter:
    """Checks what is the same for all prompts of a call; the drafter, its weights on our mesh.

    Raises:
        ValueError: as `generate` does.
    """
    loaded = _loaded(drafter)
    if not isinstance(config, GenerationConfig):
        raise ValueError(f"config must be a GenerationConfig, got {type(config).__name__}.")
    if not (isinstance(seed, int | np.integer) and 0 <= seed < 1 << 31):
        raise ValueError(f"seed must be in 0..{(1 << 31) - 1}, got {seed}.")
    _check_causal(model)
    check_vocabulary(model, loaded)
    if isinstance(loaded.drafter, ChecksFit):
        loaded.drafter.check_fit(Params(model.network, loaded.params))
    check_rules(model, config)
    return loaded._replace(params=beside(model.params, loaded.params))


def _loaded(drafter: Any) -> LoadedDrafter:
    """The drafter with its weights, `()` if it has none."""
    if isinstance(drafter, LoadedDrafter):
        return drafter
    if drafter is None:
        return LoadedDrafter(NoDraft(), ())
    if not hasattr(drafter, "propose"):
        raise ValueError(
            "drafter must be one such as PromptLookup(), DraftModel.of(model) or Eagle.of(head), "
            f"got {drafter!r:.80}."
        )
    return LoadedDrafter(drafter, ())


def bucket_of(num_tokens: int) -> int:
    """Slots for a text of so many tokens: a power of two, so that programs are few."""
    return max(MIN_BUCKET, 1 << (num_tokens - 1).bit_length())


def prompt_list(prompts) -> list[PromptLike]:
    """One prompt as a list of one: text, ids, or messages."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}.")
    if len(prompts) == 0:
        raise ValueError("prompts: got none; give at least one, of one token or more.")
    first = prompts[0]
    single = isinstance(first, Mapping | int | float | np.number)
    return [prompts] if single else list(prompts)


class Vocabulary(Protocol):
    """What settings and prompts are read against: a `Model`, or a model on another runtime."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> "Tokenizer | None": ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...


def encode_prompt(model: Vocabulary, prompt: Any) -> list[int]:
    """Token ids of text, chat messages or ids.

    Raises:
        ValueError: it is something else, or the model has no tokenizer or template for it.
    """
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return _tokenizer_of(model, "chat messages").encode_chat(prompt)
    if isinstance(prompt, str):
        # Of no text, a tokenizer would make a prompt of bos alone.
        return _tokenizer_of(model, "text").encode(prompt) if prompt else []
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            "prompts: one must be text, chat messages or a list of whole token ids, got "
            f"{prompt!r:.80}."
        )
    return ids.tolist()


def _tokenizer_of(model: Vocabulary, given: str) -> "Tokenizer":
    if model.tokenizer is None:
        raise ValueError(
            f"prompts: {model.name} has no tokenizer, so it takes token ids; got {given}."
        )
    return model.tokenizer


def check_ids(model: "Model", ids: Sequence[int], name: str, spare: int = 1) -> None:
    """Refuses ids that do not fit; `spare` places of the context must be left.

    Raises:
        ValueError: there are none or too many, or one is not of the vocabulary.
    """
    vocab, context = model.vocab_size, model.config.max_positions
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token.")
    if len(ids) + spare > context:
        places = "one place" if spare == 1 else f"{spare} places"
        left = f", and {places} must be left to decode into" if spare else ""
        raise ValueError(
            f"{name} has {len(ids)} tokens; the context of {model.name} holds {context}{left}. "
            f"Shorten it{', or decode less' * (spare > 1)}."
        )
    wrong = [token for token in ids if not 0 <= token < vocab]
    if wrong:
        raise ValueError(f"{name} has ids outside 0..{vocab - 1}: {wrong[:5]}.")


def _check_causal(model: "Model") -> None:
    if model.config.diffusion is not None:
        raise ValueError(
            f"model: {model.name} is a diffusion language model and does not continue text token "
            "by token; use `denoise`."
        )


def check_vocabulary(model: "Model", loaded: LoadedDrafter) -> None:
    """Refuses a drafter whose tokens mean something else to the target.

    Raises:
        OtherTargetError: saying what differs.
    """
    theirs, ours = loaded.tokenizer, model.tokenizer
    if theirs is not None and ours is not None:
        # Equal tokenizers suffice: families pad their vocabularies to different sizes. A diffusion
        # model's has its mask besides, which is never drafted.
        if not covers(theirs, ours):
            raise OtherTargetError(
                "drafter: its tokenizer differs from the target's, so its tokens would mean "
                "something else; use a draft model of the same family."
            )
        return
    size = getattr(loaded.params, "vocab_size", model.vocab_size)
    if size != model.vocab_size:
        raise OtherTargetError(
            f"drafter: its vocabulary has {size} ids, the target's {model.vocab_size}; "
            "they must be the same."
        )


# Rules of `generation_config.json` that would change the output and are not applied, with the
# values that ask for nothing.
_UNSUPPORTED_RULES = {
    "repetition_penalty": (None, 1),
    "encoder_repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
}


def check_rules(model: Vocabulary, config: GenerationConfig) -> None:
    """Refuses what `generation_config.json` asks for and nothing here applies.

    Raises:
        ValueError: naming the rule.
    """
    for rule, neutral in _UNSUPPORTED_RULES.items():
        asked = model.generation_defaults.get(rule)
        if asked in neutral or (rule == "repetition_penalty" and config.repetition_penalty):
            continue
        raise ValueError(
            f"{model.name}: generation_config.json asks for {rule} {asked}, which is not "
            "supported and would be ignored. Pass GenerationConfig(repetition_penalty=1) to decode "
            "without a repetition penalty, or take the rule out of `model.generation_defaults`."
        )


def warps_of(
    model: Vocabulary, config: GenerationConfig, per_prompt: PerRow, num_prompts: int
) -> Warp:
    """Parameters of each prompt; filters that none uses are left out of the program."""
    temperature, top_k = per_prompt("temperature", np.float32), per_prompt("top_k", np.int32)
    top_p, min_p = per_prompt("top_p", np.float32), per_prompt("min_p", np.float32)
    if top_k.max() > model.vocab_size:
        raise ValueError(
            f"top_k must be at most the vocabulary, {model.vocab_size}, got {top_k.max()}."
        )
    bias: Any = _bias(model, config)
    bias = None if bias is None else np.tile(bias, (num_prompts, 1))
    if not temperature.any():
        return Warp(bias=bias)
    return Warp(
        temperature=temperature,
        top_k=top_k if top_k.any() else None,
        top_p=top_p if (top_p < 1).any() else None,
        min_p=min_p if min_p.any() else None,
        bias=bias,
    )


def _bias(model: Vocabulary, config: GenerationConfig) -> np.ndarray | None:
    """What to add to the logits; ids that the tokenizer does not know are never emitted."""
    vocab = model.vocab_size
    bias = np.zeros(vocab, np.float32)
    if model.tokenizer is not None:
        bias[model.tokenizer.vocab_size :] = -np.inf
    named = {
        "logit_bias": tuple(config.logit_bias or ()),
        "allowed_token_ids": tuple(config.allowed_token_ids or ()),
        "banned_token_ids": tuple(config.banned_token_ids),
        "stop_token_ids": tuple(config.stop_token_ids or ()),
    }
    for name, ids in named.items():
        wrong = [token for token in ids if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"{name} has ids outside 0..{vocab - 1}: {wrong[:5]}.")
    if config.allowed_token_ids is not None:
        if not named["allowed_token_ids"]:
            raise ValueError("allowed_token_ids is empty: nothing could be emitted; use None.")
        refused = np.ones(vocab, bool)
        refused[list(named["allowed_token_ids"])] = False
        bias[refused] = -np.inf
    bias[list(named["banned_token_ids"])] = -np.inf
    for token, value in (config.logit_bias or {}).items():
        if math.isnan(value) or value == math.inf:
            raise ValueError(
                f"logit_bias of token {token} must be a finite number or -inf, got {value}; to "
                "emit nothing else, use allowed_token_ids."
            )
        bias[token] += value
    return bias if bias.any() else None


def automaton_of(model: Vocabulary, config: GenerationConfig) -> StopAutomaton | None:
    if not config.stop_strings:
        return None
    if model.tokenizer is None:
        raise ValueError(f"stop: {model.name} has no tokenizer; use stop_token_ids instead.")
    return _automaton_of(model.tokenizer, config.stop_strings, model.vocab_size)


@functools.lru_cache(maxsize=16)  # a large vocabulary takes a second, and calls repeat their stops
def _automaton_of(
    tokenizer: "Tokenizer", strings: tuple[str, ...], vocab_size: int
) -> StopAutomaton:
    spelled = tokenizer.token_bytes()
    spelled += [b""] * (vocab_size - len(spelled))
    return stop_automaton([string.encode() for string in strings], spelled)
