"""A call of `generate` before it runs: prompts, settings, their checks, and the arrays of its rows.

`denoise`, `batch` and models on other runtimes read prompts and settings with the same functions.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from jaxspec.checkpoint.files import CheckpointError
from jaxspec.checkpoint.hub import check_is_model
from jaxspec.checkpoint.memory import SHORT_TEXT, check_texts_fit, check_trace_fits
from jaxspec.checkpoint.tokenizer import MOST_IDS, check_unicode, covers
from jaxspec.core.checks import (
    LARGEST,
    MAY_BE_INFINITE,
    Checked,
    Natural,
    Requirement,
    above_up_to,
    at_least,
    at_most,
    at_most_entries,
    between,
    checked,
    from_up_to,
    meant,
    shown,
)
from jaxspec.core.decode import Prompt
from jaxspec.core.grammar import Grammar
from jaxspec.core.loop import (
    DecodePlan,
    bytes_of_row,
    decode,
    decode_stream,
    nodes_picked,
    plan_decoding,
    round_up,
    shape_of_info,
)
from jaxspec.core.stopping import StopAutomaton, stop_automaton
from jaxspec.core.types import ChecksFit, DecodeState, Drafter, Info, Params, Penalties, Warp
from jaxspec.decoding.grammars import compiled, languages_of
from jaxspec.decoding.result import shown_of, text_of
from jaxspec.drafters import DrafterLike, LoadedDrafter, loaded_drafter
from jaxspec.drafters.block import BlockSettings
from jaxspec.drafters.corpus import SortedTexts
from jaxspec.drafters.loaded import OtherTargetError
from jaxspec.sharding import DATA, mesh_of, on_mesh_of, shard_like, shares_of_memory, spread_rows

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model, Tokenizer

MIN_BUCKET = 16
MOST_PROMPTS = 1_000_000
"""Prompts of one call, which are all held at once."""
MOST_SAMPLES = 4096
"""Continuations of one prompt, which are decoded at once."""
_BYTES_OF_RECORD = 2048  # of a step of one row on the host, without its laws
_CHARACTERS = 8
"""Characters for each token of the part of a text that is encoded first; most tokens have fewer."""
_FEW_ROWS, _ROW_MULTIPLE, _STOP_ID_MULTIPLE = (1, 2, 6), 8, 4

_WHOLE = int | np.integer
Config = TypeVar("Config", bound=Any)
Message = Mapping[str, Any]
PromptLike = str | Sequence[int] | np.ndarray | Sequence[Message]
PerRow = Callable[[str, type], Any]
"""A field of `GenerationConfig` as an array with one entry per prompt."""


class Vocabulary(Protocol):
    """Facts of a model that settings and prompts need: a `Model`, or one on another runtime."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> "Tokenizer | None": ...

    @property
    def max_positions(self) -> int: ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...


class PenaltyRule(NamedTuple):
    """A setting of `GenerationConfig` that becomes a field of `Penalties`.

    Attributes:
        field: its name in `Penalties`.
        neutral: the value that changes nothing.
    """

    field: str
    neutral: float


PENALTIES = {
    "repetition_penalty": PenaltyRule("repetition", 1.0),
    "presence_penalty": PenaltyRule("presence", 0.0),
    "frequency_penalty": PenaltyRule("frequency", 0.0),
    "no_repeat_ngram_size": PenaltyRule("ngram_size", 0),
    "min_new_tokens": PenaltyRule("min_new_tokens", 0),
}


# Numbers that compiled programs compute with: finite in float32 too.
Scale = Annotated[float, from_up_to(0, LARGEST)]
TopP = Annotated[float, above_up_to(0, 1), at_least(1.2e-38)]  # less is 0 in float32
MinP = Annotated[float, from_up_to(0, 1)]
Penalty = Annotated[float, between(-1e30, 1e30)]
Factor = Annotated[float, between(1e-30, 1e30)]
Bias = Annotated[
    float,
    MAY_BE_INFINITE,
    Requirement(
        "below 1e30 (to emit nothing else, use allowed_token_ids)", lambda value: value < 1e30
    ),
]


TokenIds = Annotated[Sequence[Natural], at_most_entries(MOST_IDS)]
StopString = Annotated[str, Requirement("a text that is not empty", bool)]


@dataclasses.dataclass(frozen=True)
class GenerationConfig(Checked):
    """Settings of decoding. A number may be one for all prompts, or a sequence of one per prompt.

    Attributes:
        max_new_tokens: tokens to emit at most; 0 gives empty results.
        temperature: 0 (the default) is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities add up to this; in (0, 1].
        min_p: keep tokens at least this likely relative to the likeliest; in [0, 1).
        logit_bias: added to the logits of these token ids; below 1e30, and -inf bans an id.
        allowed_token_ids: the only ids that may be emitted; `None`: all of them.
        banned_token_ids: ids never emitted.
        tokenizer_ids_only: emit no id past the tokenizer's. Vocabularies are often padded with
            ids that have no text; trained models give them next to no probability.
        stop_token_ids: end a row after any of these; `None` takes the model's own, `()` none.
        stop: strings that end a row; the text is cut before them.
        num_samples: continuations per prompt, each drawn separately; up to 4096.
        logprobs: record the target's log-probability of each token, before any warping.
        warped_logprobs: the same after bias, penalties, temperature and filters.
        repetition_penalty: divides positive logits of tokens that occur in the text, prompt
            included, and multiplies negative ones; above 0, 1 changes nothing. `None`, here and in
            the four settings below: what the model's `generation_config.json` asks for, if
            anything.
        presence_penalty: subtracted from the logits of tokens that were emitted before.
        frequency_penalty: subtracted once for each time that a token was emitted before.
        no_repeat_ngram_size: n-grams of this many tokens occur once in the text at most; 0 allows
            all.
        min_new_tokens: no stop id is emitted before so many tokens.
        choices: texts, one of which the output must be; or a list of them for each prompt. This
            and the two below ban, at every place, the tokens that no such text goes on with, and
            those that leave no room in `max_new_tokens` to end it. The output ends with a stop id,
            or where nothing may follow. Penalties and stop strings may cut it short.
        regex: a regular expression that the whole output matches, in the syntax of Rust's `regex`
            without look-around; or one for each prompt. Needs the extra `grammar`.
        json_schema: a JSON schema that the output is valid for, as a dictionary, JSON, or a model
            class of pydantic; or one for each prompt. `oneOf` counts as `anyOf`. Schemas that refer
            to themselves, and keywords that would not be obeyed, such as `minimum`, are refused.
            Needs the extra `grammar`.

    Raises:
        ValueError: an argument is out of range; the message names it.

    Example:
        >>> import jaxspec
        >>> config = jaxspec.GenerationConfig(max_new_tokens=4, temperature=0.8, top_p=0.9)
        >>> result = jaxspec.generate(jaxspec.load("demo"), "Name a colour.", config, seed=1)
        >>> len(result[0].tokens)
        4
        >>> answer = jaxspec.generate(jaxspec.load("demo"), "Is 4 even?", choices=["yes", "no"])
        >>> answer.texts[0] in ("yes", "no"), answer[0].finish_reason
        (True, 'grammar')
    """

    max_new_tokens: Natural | Sequence[Natural] = 128
    temperature: Scale | Sequence[Scale] = 0.0
    top_k: Natural | Sequence[Natural] = 0
    top_p: TopP | Sequence[TopP] = 1.0
    min_p: MinP | Sequence[MinP] = 0.0
    logit_bias: Annotated[Mapping[Natural, Bias], at_most_entries(MOST_IDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds = ()
    tokenizer_ids_only: bool = False
    stop_token_ids: TokenIds | None = None
    stop: StopString | Sequence[StopString] = ()
    num_samples: Annotated[int, at_least(1), at_most(MOST_SAMPLES)] = 1
    logprobs: bool = False
    warped_logprobs: bool = False
    repetition_penalty: Factor | Sequence[Factor] | None = None
    presence_penalty: Penalty | Sequence[Penalty] | None = None
    frequency_penalty: Penalty | Sequence[Penalty] | None = None
    no_repeat_ngram_size: Natural | Sequence[Natural] | None = None
    min_new_tokens: Natural | Sequence[Natural] | None = None
    choices: Iterable[str] | Iterable[Iterable[str]] | None = None
    regex: str | Iterable[str] | None = None
    json_schema: Any = None

    def __post_init__(self):
        super().__post_init__()
        for index, string in enumerate(self.stop_strings):
            check_unicode(string, f"stop[{index}]")
        languages = languages_of(self.choices, self.regex, self.json_schema)
        for name in ("choices", "regex", "json_schema"):
            given = getattr(self, name)
            if languages and (
                isinstance(given, Iterator) or (name == "choices" and given is not None)
            ):
                # It may be read only once.
                each = [texts if name == "choices" else texts[0] for _, texts in languages]
                object.__setattr__(self, name, each[0] if len(each) == 1 else tuple(each))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def config_of(config: Config | None, settings: Mapping[str, Any], kind: type[Config]) -> Config:
    """Returns the settings of a call: a config, with fields given as keywords in place of its own.

    Raises:
        TypeError: a keyword is no field of `kind`.
        ValueError: fields are given for a config of another kind.

    Example:
        >>> config_of(GenerationConfig(top_k=5), {"temperature": 0.5}, GenerationConfig).top_k
        5
    """
    names = [field.name for field in dataclasses.fields(kind)]
    for name in settings:
        if name not in names:
            raise TypeError(
                f"{name} is no argument and no setting{meant(name, names) or '.'} Settings are "
                f"{', '.join(names)}."
            )
    if config is None:
        return kind(**settings)
    if not settings:
        return config
    _check_kind(config, kind)
    return dataclasses.replace(config, **settings)


def config_and_drafter(
    config: GenerationConfig | DrafterLike | None,
    drafter: DrafterLike | GenerationConfig | None,
    settings: Mapping[str, Any],
) -> tuple[GenerationConfig, DrafterLike | None]:
    """Returns the settings and the drafter of a call, where each may stand in the other's place.

    Raises:
        TypeError: a keyword is no field.
    """
    given: Any = (config, drafter)
    if isinstance(drafter, GenerationConfig) or not isinstance(config, GenerationConfig | None):
        given = given[::-1]
    return config_of(given[0], settings, GenerationConfig), given[1]


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of `generate`, checked and turned into arrays.

    Attributes:
        params: weights of the target and of the drafter.
        prompts: one entry per prompt, for `plan.num_samples` rows each; then those that fill up
            the number of prompts to `row_bucket_of`, whose rows have ended from the start.
        automaton: finds the stop strings; `None` without any.
        grammar: texts that may be emitted; `None` for any.
        drafter: the method, without its weights.
        plan: static settings of the program.
        prompt_lengths: one per row that was asked for.
        stop_strings: end a row.
        tokenizer: tokenizer of the target; `None` if it has none.
    """

    params: Params
    prompts: Prompt
    automaton: StopAutomaton | None
    grammar: Grammar | None
    drafter: Drafter
    plan: DecodePlan
    prompt_lengths: tuple[int, ...]
    stop_strings: tuple[str, ...]
    tokenizer: "Tokenizer | None"

    @property
    def num_rows(self) -> int:
        """Rows of the program, those included that fill it up."""
        return len(self.prompts.length) * self.plan.num_samples

    def decode(self) -> DecodeState:
        """Runs all rows to their ends in one program; returns their final states."""
        with on_mesh_of(self.params):
            return decode(*self._arrays(), drafter=self.drafter, plan=self.plan)

    def decode_stream(self) -> Iterator[tuple[DecodeState, Info | None]]:
        """Yields the states before the first step, then the states and the `Info` of each step."""
        with on_mesh_of(self.params):
            steps = decode_stream(*self._arrays(), drafter=self.drafter, plan=self.plan)
        while True:
            # The caller's own work between steps does not run on the mesh.
            with on_mesh_of(self.params):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def check_trace_fits(self) -> None:
        """Refuses, before it is decoded, a request whose trace does not fit into memory.

        Raises:
            CheckpointError: with figures.
        """
        num_steps, num_nodes = int(self.prompts.room.max()), self.drafter.tree_shape[0]
        records = _BYTES_OF_RECORD * self.num_rows
        try:
            # Each node with a law of its own, which few have.
            laws = 4 * self.num_rows * num_nodes * self.params.target.vocab_size
            check_trace_fits(laws + records, num_steps)
        except CheckpointError:
            with on_mesh_of(self.params):
                info = shape_of_info(*self._arrays(), drafter=self.drafter, plan=self.plan)
            leaves = jax.tree.leaves(shown_of(info))
            each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            check_trace_fits(each + records, num_steps)

    def peak_bytes(self) -> int:
        """Returns the most bytes that the program of `decode` holds at once, by its compiler.

        They are the weights, the rows and scratch. Call it after `decode`, which has compiled the
        program; otherwise this compiles it.
        """
        with on_mesh_of(self.params):
            lowered = decode.lower(*self._arrays(), drafter=self.drafter, plan=self.plan)
            return peak_bytes(lowered.compile())

    def _arrays(self) -> tuple[Params, Prompt, StopAutomaton | None, Grammar | None]:
        """Arguments of the programs, the rows spread over the devices that the model lies on."""
        mesh = mesh_of(self.params)
        prompts = self.prompts if mesh is None else spread_rows(mesh, self.prompts)
        return self.params, prompts, self.automaton, self.grammar

    def prompt_tokens(self, row: int) -> np.ndarray:
        """Returns the ids of a row's prompt."""
        tokens = self.prompts.tokens[row // self.plan.num_samples]
        return np.asarray(tokens[: self.prompt_lengths[row]])

    def text(self, tokens: np.ndarray, finish_reason: str) -> str | None:
        """Returns the text of emitted tokens, see `Generation.text`."""
        return text_of(self.tokenizer, tokens, finish_reason, self.stop_strings)


def prepare(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: GenerationConfig,
    drafter: DrafterLike | None,
    seed: int,
) -> Request:
    """Checks the arguments of `generate` and builds the arrays of its rows.

    Raises:
        ValueError: as `generate` does.
    """
    loaded = check_request(model, config, drafter, seed)
    config = with_rules_of(model, config)
    encoded = encode_prompts(model, prompts)
    bucket = bucket_of(max(map(len, encoded)))
    arrays = prompt_arrays(encoded, bucket, seed, stop_ids_of(model, config))
    lengths = arrays["length"]

    def per_prompt(name: str, dtype: type) -> np.ndarray:
        return one_per_prompt(name, getattr(config, name), len(encoded), dtype)

    budget: Any = per_prompt("max_new_tokens", np.int32)
    room = np.minimum(budget, model.max_positions - lengths)
    _warn_past_positions(loaded, int((lengths + room).max()))
    grammar, starts = grammar_asked(model, config, len(encoded))
    requested = Prompt(
        **arrays,
        grammar=starts,
        room=room,
        warp=warps_of(model, config, per_prompt, len(encoded)),
    )
    plan = plan_decoding(
        bucket,
        int(requested.room.max()),
        loaded.drafter,
        num_samples=config.num_samples,
        logprobs=config.logprobs,
        warped_logprobs=config.warped_logprobs,
    )
    row_lengths = np.repeat(lengths, config.num_samples)
    mesh = mesh_of(model.params)
    parts = 1 if mesh is None else mesh.shape[DATA]
    count = row_bucket_of(len(encoded), parts // math.gcd(parts, config.num_samples))
    params = Params(model.network, loaded.params)
    capacity = plan.capacities[-1]
    # A network that was loaded leaves room for a short text: `check_network_fits`.
    if count * config.num_samples * (capacity + nodes_picked(loaded.drafter)) > SHORT_TEXT:
        each = bytes_of_row(params, requested, loaded.drafter, plan)
        shares = shares_of_memory(mesh, rows=True)
        try:
            check_texts_fit(each, capacity, count * config.num_samples, shares)
        except CheckpointError:
            count = len(encoded)
            check_texts_fit(each, capacity, len(row_lengths), shares)
    return Request(
        params=params,
        prompts=_filled_up(requested, count),
        automaton=automaton_of(model, config),
        grammar=grammar,
        drafter=loaded.drafter,
        plan=plan,
        prompt_lengths=tuple(row_lengths.tolist()),
        stop_strings=config.stop_strings,
        tokenizer=model.tokenizer,
    )


def check_request(
    model: "Model",
    config: GenerationConfig,
    drafter: DrafterLike | None,
    seed: int,
) -> LoadedDrafter:
    """Checks the arguments that all prompts of a call share; returns the drafter on our mesh.

    Raises:
        ValueError: as `generate` does.
    """
    loaded = loaded_drafter(drafter)
    check_call(config, GenerationConfig, seed)
    check_causal(model)
    check_vocabulary(model, loaded)
    check_depth(model, loaded)
    check_taps(model, loaded)
    if isinstance(loaded.drafter, ChecksFit):
        loaded.drafter.check_fit(Params(model.network, loaded.params))
    check_target(model, loaded)
    check_rules(model)
    return loaded._replace(params=shard_like(model.params, loaded.params))


def _warn_past_positions(loaded: LoadedDrafter, longest_text: int) -> None:
    """Warns of texts that may become longer than those that a drafter of blocks was made for."""
    if not isinstance(loaded.drafter, BlockSettings):
        return
    longest = loaded.params.config.max_positions
    if longest_text > longest:
        # The same text each time: Python shows it once.
        warnings.warn(
            f"drafter: it was made for texts of {longest} tokens, and a text of this call may "
            f"become longer; past that it drafts from the last {longest} tokens and may guess "
            "worse. The output stays the target's.",
            stacklevel=4,
        )


def check_call(config: Any, kind: type, seed: Any) -> None:
    """Refuses settings of another kind, or a seed that is out of range.

    Raises:
        ValueError: naming the argument.
    """
    _check_kind(config, kind)
    checked("seed", seed, Natural)


def _check_kind(config: Any, kind: type) -> None:
    if not isinstance(config, kind):
        raise ValueError(f"config must be a {kind.__name__}, got {type(config).__name__}.")


def prompt_arrays(
    encoded: Sequence[Sequence[int]], bucket: int, seed: int, stop_ids: Iterable[int]
) -> dict[str, Any]:
    """Returns the arrays of prompts that every way of decoding reads, by their names.

    Args:
        encoded: ids of each prompt, at least one of one id.
        bucket: size that they are padded to.
        seed: seed of the call. A row's randomness depends on it and on the row's place.
        stop_ids: end every row; -1 fills up their number, so that programs are few.

    Example:
        >>> arrays = prompt_arrays([[5, 6], [7]], 3, seed=9, stop_ids=())
        >>> arrays["tokens"].tolist(), arrays["length"].tolist(), arrays["seed"].tolist()
        ([[5, 6, 0], [7, 0, 0]], [2, 1], [[9, 0], [9, 1]])
    """
    tokens = np.zeros((len(encoded), bucket), np.int32)
    for prompt, ids in enumerate(encoded):
        tokens[prompt, : len(ids)] = ids
    index = np.arange(len(encoded), dtype=np.int32)
    ends = [*stop_ids]
    ends += [-1] * (round_up(max(len(ends), 1), _STOP_ID_MULTIPLE) - len(ends))
    return {
        "tokens": tokens,
        "length": np.asarray([len(ids) for ids in encoded], np.int32),
        "seed": np.stack([np.full_like(index, seed), index], axis=1),
        "stop_ids": np.tile(np.asarray(ends, np.int32), (len(encoded), 1)),
    }


def peak_bytes(compiled: Any) -> int:
    """Returns the most bytes that a compiled program holds at once, by its compiler."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def check_causal(model: "Model") -> None:
    """Refuses a diffusion language model, and what is no model.

    Raises:
        ValueError: saying what to call instead.
    """
    check_is_model(model)
    if model.is_diffusion:
        raise ValueError(
            f"model: {model.name} is a diffusion language model and does not continue text token "
            "by token; use `denoise`."
        )


def check_depth(model: "Model", loaded: LoadedDrafter) -> None:
    """Refuses a drafter whose drafts are longer than any text of the target.

    Raises:
        ValueError: with both lengths.
    """
    depth = loaded.drafter.tree_shape[1]
    if depth > model.max_positions:
        raise ValueError(
            f"drafter: {type(loaded.drafter).__name__} drafts up to {depth} tokens at once, and "
            f"the context of {model.name} holds {model.max_positions}; give it fewer to draft, by "
            "num_speculative_tokens, block or the tree."
        )


def check_taps(model: "Model", loaded: LoadedDrafter) -> None:
    """Refuses a drafter that reads the inputs of layers, for a network of your own.

    Raises:
        OtherTargetError: naming the drafter and the layers.
    """
    if model.is_own and loaded.drafter.taps:
        raise OtherTargetError(
            f"drafter: {type(loaded.drafter).__name__} reads the inputs of layers "
            f"{list(loaded.drafter.taps)}, and {model.name} is a network of your own, which gives "
            "none; use a drafter without taps, such as PromptLookup() or DraftModel.of(model)."
        )


def check_target(model: "Model", loaded: LoadedDrafter) -> None:
    """Refuses a drafter that was trained for a target with other weights, if that can be seen.

    Raises:
        OtherTargetError: naming the setting that allows it.
    """
    if loaded.made_for is not None and model.digest not in (None, loaded.made_for):
        raise OtherTargetError(
            f"drafter: it was trained for a target with other weights than {model.name}, which "
            "would accept few of its tokens. To draft nevertheless, as for a fine-tuned target, "
            f"give {type(loaded.drafter).__name__}.of(..., any_target=True), or add on the command "
            "line any_target=1 to --drafter; only speed depends on it."
        )


def check_vocabulary(model: "Model", loaded: LoadedDrafter) -> None:
    """Refuses a drafter whose tokens mean something else to the target.

    Raises:
        OtherTargetError: saying what differs.
    """
    theirs, ours = loaded.tokenizer, model.tokenizer
    if theirs is not None and ours is not None:
        # Equal tokenizers suffice: families pad their vocabularies to different sizes. That of a
        # diffusion model also has the mask, which is never drafted.
        if not covers(theirs, ours):
            # A `Union` has one tokenizer: that of its texts, if it has any, is the head's too.
            texts = getattr(loaded.params, "lookup", loaded.params)
            raise OtherTargetError(
                "drafter: its tokenizer differs from the target's, so its tokens would mean "
                "something else; "
                + (
                    "encode the texts to look up with the target's: SuffixLookup.of(texts, model)."
                    if isinstance(texts, SortedTexts)
                    else "use a draft model of the same family, or draft with the tokens that both "
                    "have: DraftModel.of(draft, target=model)."
                )
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
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
}


def check_rules(model: Vocabulary) -> None:
    """Refuses rules of `generation_config.json` that nothing here applies.

    Raises:
        ValueError: naming the rule.
    """
    for rule, neutral in _UNSUPPORTED_RULES.items():
        if (asked := model.generation_defaults.get(rule)) not in neutral:
            raise ValueError(
                f"{model.name}: generation_config.json asks for {rule} {asked}, which is not "
                "supported and would be ignored. Take the rule out of `model.generation_defaults`."
            )


def with_rules_of(model: Vocabulary, config: GenerationConfig) -> GenerationConfig:
    """Returns settings whose open penalties are those of the model's `generation_config.json`.

    Raises:
        ValueError: the file asks for a value that is out of range.
    """
    defaults = model.generation_defaults
    asked = {name: defaults.get(name) for name in PENALTIES if getattr(config, name) is None}
    try:
        return dataclasses.replace(config, **asked)
    except ValueError as error:
        raise ValueError(f"{model.name}: generation_config.json: {error}") from None


def prompt_list(prompts) -> list[PromptLike]:
    """Returns a list of prompts; one prompt (text, ids, or messages) becomes a list of one.

    Anything with an order will do: a list, an array, a generator, a column of pandas or `datasets`.

    Raises:
        ValueError: there are none or too many, or it is something else.

    Example:
        >>> prompt_list("Hello"), prompt_list([1, 2]), prompt_list([[1], [2]])
        (['Hello'], [[1, 2]], [[1], [2]])
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, jax.Array | np.ndarray):
        prompts = np.asarray(prompts)[()]  # one without axes becomes a number
    if hasattr(prompts, "columns") or hasattr(prompts, "column_names"):
        raise ValueError(
            f"prompts: got a whole table ({type(prompts).__name__}); give the column that holds "
            "the prompts, such as table['prompt']."
        )
    if isinstance(prompts, Iterable) and not isinstance(prompts, bytes | Mapping | Set):
        if not isinstance(prompts, np.ndarray | Sequence):
            prompts = list(islice(prompts, MOST_PROMPTS + 1))
            _check_number(prompts)
    else:
        raise ValueError(f"prompts must be a prompt or a list of them, got {shown(prompts)}.")
    if len(prompts) == 0:
        raise ValueError("prompts: got none; give at least one, of one token or more.")
    if isinstance(prompts[0], Mapping | _WHOLE):
        return [list(prompts) if isinstance(prompts, tuple) else prompts]
    _check_number(prompts)
    return list(prompts)


def _check_number(prompts: Sized) -> None:
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(
            f"prompts: got more than {MOST_PROMPTS}; give fewer at once, or put them into a file "
            "for `jaxspec batch`."
        )


def encode_prompt(
    model: Vocabulary, prompt: Any, name: str = "prompt", spare: int | None = None
) -> list[int]:
    """Returns the token ids of text, chat messages or ids; messages call them `name`.

    Args:
        model: whose ids.
        prompt: the text, the messages or the ids.
        name: of the prompt.
        spare: positions of the model's context that must be left: the ids are checked as by
            `check_ids`, and what is far too long is refused before all of it is read. `None`: they
            are not checked.

    Raises:
        ValueError: it is something else, or the model has no tokenizer or template for it.
    """
    if hasattr(prompt, "__array__"):
        array = np.asarray(prompt)
        if spare is not None and array.ndim:
            _check_length(model, len(array), name, spare)
        prompt = array.tolist()
    is_chat = isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
    if is_chat or isinstance(prompt, str):
        ids = _encoded(model, prompt, name, spare)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if spare is not None:
            _check_length(model, len(prompt), name, spare)
        plain = {*map(type, prompt)} == {int}
        ids = list(prompt if plain else checked(name, prompt, Sequence[int]))
    else:
        raise ValueError(
            f"{name} must be text, chat messages or a list of whole token ids, got {shown(prompt)}."
        )
    if spare is not None:
        check_ids(model, ids, name, spare)
    return ids


def _encoded(model: Vocabulary, prompt: Any, name: str, spare: int | None) -> list[int]:
    """Returns the ids of a text or of chat messages; see `encode_prompt`."""
    is_text = isinstance(prompt, str)
    tokenizer = _tokenizer_of(model, name, "text" if is_text else "chat messages")
    try:
        text = prompt if is_text else tokenizer.render_chat(prompt)
        # Tokens of a text of any length take time and memory; some of them show that it is too
        # long. Where a text is cut its last tokens may differ, hence twice the context.
        most = None if spare is None else 2 * model.max_positions
        size = _CHARACTERS * (most or 0)
        while most is not None and size < len(text):
            count = len(tokenizer.encode(text[:size], special_tokens=False))
            if count > most:
                raise ValueError(
                    f"its {len(text)} characters are too many: the first {size} of them are "
                    f"{count} tokens, and the context of {model.name} holds "
                    f"{model.max_positions}. Shorten it."
                )
            size *= 8
        # A tokenizer would turn an empty text into a prompt of bos alone; a chat has its own.
        return tokenizer.encode(text, special_tokens=is_text) if text else []
    except ValueError as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else ValueError
        raise kind(f"{name}: {error}") from None


def encode_prompts(model: "Model", prompts: Any, spare: int = 1) -> list[list[int]]:
    """Returns the token ids of one prompt or several, checked as `check_ids` does.

    Raises:
        ValueError: one of them cannot be decoded from.
    """
    return [
        encode_prompt(model, prompt, f"prompts[{index}]", spare)
        for index, prompt in enumerate(prompt_list(prompts))
    ]


def stop_ids_of(model: "Model", config: Any) -> Sequence[int]:
    """Returns the ids that end a row: those of the settings, or else of the model."""
    return model.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids


def _tokenizer_of(model: Vocabulary, name: str, given: str) -> "Tokenizer":
    if model.tokenizer is None:
        raise ValueError(
            f"{name}: {model.name} has no tokenizer, so it takes token ids; got {given}."
        )
    return model.tokenizer


def check_ids(model: Vocabulary, ids: Sequence[int], name: str, spare: int = 1) -> None:
    """Refuses ids that do not fit; `spare` positions of the context must be left.

    Raises:
        ValueError: there are none or too many, or one is outside of the vocabulary.
    """
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token.")
    _check_length(model, len(ids), name, spare)
    check_in_vocabulary(model, ids, name)


def check_in_vocabulary(model: Vocabulary, ids: Sequence[int], name: str) -> None:
    """Refuses ids that the model does not have.

    Raises:
        ValueError: naming some of them.
    """
    wrong = [token for token in ids if not 0 <= token < model.vocab_size]
    if wrong:
        raise ValueError(f"{name} has ids outside 0..{model.vocab_size - 1}: {wrong[:5]}.")


def _check_length(model: Vocabulary, count: int, name: str, spare: int) -> None:
    context = model.max_positions
    if count + spare > context:
        places = "one place" if spare == 1 else f"{spare} places"
        left = f", and {places} must be left to decode into" if spare else ""
        raise ValueError(
            f"{name} has {count} tokens; the context of {model.name} holds {context}{left}. "
            f"Shorten it{', or decode less' * (spare > 1)}."
        )


def one_per_prompt(name: str, values: Any, num_prompts: int, dtype: type) -> np.ndarray:
    """Returns a setting as an array with one entry per prompt.

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


def bucket_of(num_tokens: int) -> int:
    """Returns the size that a text is padded to: a power of two, so that programs are few.

    Example:
        >>> bucket_of(3), bucket_of(17)
        (16, 32)
    """
    return max(MIN_BUCKET, 1 << (num_tokens - 1).bit_length())


def row_bucket_of(num_prompts: int, parts: int = 1) -> int:
    """Returns the number that prompts are filled up to, so that programs are few.

    Args:
        num_prompts: at least 1.
        parts: those into which a mesh divides the prompts; each gets the same number of them.

    Example:
        >>> [row_bucket_of(count) for count in (1, 2, 3, 6, 7, 17)]
        [1, 2, 6, 6, 8, 24]
        >>> row_bucket_of(5, parts=4)
        8
    """
    each = -(-num_prompts // parts)
    few = (size for size in _FEW_ROWS if size >= each)
    return parts * next(few, round_up(each, _ROW_MULTIPLE))


def _filled_up(prompts: Prompt, count: int) -> Prompt:
    """Returns `count` prompts: after the given ones copies of the first, without room."""
    more = count - len(prompts.room)

    def fill(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([leaf, np.repeat(leaf[:1], more, axis=0)])

    room: Any = np.pad(np.asarray(prompts.room), (0, more))
    return jax.tree.map(fill, prompts)._replace(room=room)


def warps_of(
    model: Vocabulary, config: GenerationConfig, per_prompt: PerRow, num_prompts: int
) -> Warp:
    """Returns the sampling parameters of each prompt.

    Filters and penalties that no prompt uses are left out of the program.

    Raises:
        ValueError: `top_k` is above the vocabulary, a bias names an id outside of it, or ids of a
            tokenizer are asked for where there is none.
    """
    temperature, top_k = per_prompt("temperature", np.float32), per_prompt("top_k", np.int32)
    top_p, min_p = per_prompt("top_p", np.float32), per_prompt("min_p", np.float32)
    if top_k.max() > model.vocab_size:
        raise ValueError(
            f"top_k must be at most the vocabulary, {model.vocab_size}, got {top_k.max()}."
        )
    bias: Any = _bias(model, config)
    bias = None if bias is None else np.tile(bias, (num_prompts, 1))
    penalties = {}
    for name, rule in PENALTIES.items():
        if getattr(config, name) is None:
            continue
        values = per_prompt(name, np.float32 if isinstance(rule.neutral, float) else np.int32)
        if (values != rule.neutral).any():
            penalties[rule.field] = values
    penalties = Penalties(**penalties) if penalties else None
    if not temperature.any():
        return Warp(bias=bias, penalties=penalties)
    return Warp(
        temperature=temperature,
        top_k=top_k if top_k.any() else None,
        top_p=top_p if (top_p < 1).any() else None,
        min_p=min_p if min_p.any() else None,
        bias=bias,
        penalties=penalties,
    )


def _bias(model: Vocabulary, config: GenerationConfig) -> np.ndarray | None:
    """Returns what to add to the logits; `None` for nothing."""
    vocab = model.vocab_size
    bias = np.zeros(vocab, np.float32)
    if config.tokenizer_ids_only:
        if model.tokenizer is None:
            raise ValueError(f"tokenizer_ids_only: {model.name} has no tokenizer; leave it out.")
        bias[model.tokenizer.vocab_size :] = -np.inf
    named = {
        "logit_bias": tuple(config.logit_bias or ()),
        "allowed_token_ids": tuple(config.allowed_token_ids or ()),
        "banned_token_ids": tuple(config.banned_token_ids),
        "stop_token_ids": tuple(config.stop_token_ids or ()),
    }
    for name, ids in named.items():
        check_in_vocabulary(model, ids, name)
    if config.allowed_token_ids is not None:
        if not named["allowed_token_ids"]:
            raise ValueError("allowed_token_ids is empty: nothing could be emitted; use None.")
        refused = np.ones(vocab, bool)
        refused[list(named["allowed_token_ids"])] = False
        bias[refused] = -np.inf
    bias[list(named["banned_token_ids"])] = -np.inf
    with np.errstate(over="ignore"):  # Too negative for float32 is -inf.
        for token, value in (config.logit_bias or {}).items():
            bias[token] += value
    return bias if bias.any() else None


def automaton_of(model: Vocabulary, config: GenerationConfig) -> StopAutomaton | None:
    """Returns the automaton that finds the stop strings in tokens; `None` if there are none.

    Raises:
        ValueError: the model has no tokenizer to spell them with.
    """
    if not config.stop_strings:
        return None
    if model.tokenizer is None:
        raise ValueError(f"stop: {model.name} has no tokenizer; use stop_token_ids instead.")
    return _automaton_of(model.tokenizer, config.stop_strings, model.vocab_size)


def grammar_asked(
    model: Vocabulary, config: GenerationConfig, num_prompts: int
) -> tuple[Grammar | None, Any]:
    """Returns the texts that may be emitted, and the state that each prompt's begins in.

    Raises:
        ValueError: the model has no tokenizer, a language cannot be read or spelled, or there are
            not as many as prompts.
        MissingExtra: the compiler of regular expressions is not installed.
    """
    languages = languages_of(config.choices, config.regex, config.json_schema)
    if languages is None:
        return None, None
    setting = languages[0].setting
    if model.tokenizer is None:
        raise ValueError(
            f"{setting}: {model.name} has no tokenizer to spell texts with; use allowed_token_ids."
        )
    different = tuple(dict.fromkeys(languages))
    bias = _bias(model, config)
    banned = () if bias is None else np.flatnonzero(np.isneginf(bias)).tolist()
    banned = frozenset(banned)
    grammar, states = compiled(model.tokenizer, model.vocab_size, different, banned)
    starts = [states[different.index(language)] for language in languages]
    if len(starts) == 1:
        starts *= num_prompts
    return grammar, one_per_prompt(setting, starts, num_prompts, np.int32)


@functools.lru_cache(maxsize=16)  # a large vocabulary takes a second, and calls repeat their stops
def _automaton_of(
    tokenizer: "Tokenizer", strings: tuple[str, ...], vocab_size: int
) -> StopAutomaton:
    spelled = tokenizer.token_bytes()
    spelled += [b""] * (vocab_size - len(spelled))
    return stop_automaton([string.encode() for string in strings], spelled)
