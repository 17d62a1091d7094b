"""Settings of `GenerationConfig` that say what a text may be, as machines over tokens."""

import functools
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.checkpoint.files import parse_json
from jaxspec.core.grammar import NEVER, Grammar, grammar_over_tokens, with_room
from jaxspec.decoding.schemas import reference_depth
from jaxspec.extras import needs_extra

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer

_NOWHERE, _LEAST_DEPTH = -1, 3
_MOST_STATES = 20_000
"""States of all languages of a call; with a large vocabulary they take some hundred megabytes."""


class Language(NamedTuple):
    """The texts that a row may emit.

    Attributes:
        setting: the setting that names them: "choices", "regex" or "json_schema".
        texts: the choices, one regular expression, or one schema as JSON.
    """

    setting: str
    texts: tuple[str, ...]


class ByteMachine(NamedTuple):
    """A machine that reads bytes, from state 0 on.

    Attributes:
        table: `[states, 256]`, the state after each byte; -1 where no text goes on so.
        ends: True in states where a text is one of the language.
    """

    table: np.ndarray
    ends: np.ndarray


def languages_of(choices: Any, regex: Any, json_schema: Any) -> list[Language] | None:
    """Returns the language of all prompts, or that of each; `None` for any text.

    Raises:
        ValueError: two settings are given, or one is of another type.

    Example:
        >>> languages_of(["yes", "no"], None, None)
        [Language(setting='choices', texts=('yes', 'no'))]
        >>> len(languages_of(None, ["[0-9]+", "[a-z]+"], None))
        2
    """
    asked = {"choices": choices, "regex": regex, "json_schema": json_schema}
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        return None
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} exclude each other; give one of them.")
    ((setting, value),) = asked.items()
    read = {"choices": _choices, "regex": _regex, "json_schema": _schema}[setting]
    is_one = isinstance(value, str | Mapping) or hasattr(value, "model_json_schema")
    if not is_one and isinstance(value, Iterable):
        value = list(value)
        is_one = setting == "choices" and all(isinstance(each, str) for each in value)
    each = [value] if is_one else value
    if not isinstance(each, list) or not each:
        raise ValueError(f"{setting}: got {value!r:.80}; {_MEANINGS[setting]}.")
    return [Language(setting, read(one)) for one in each]


_ANCHORS = " Leave out ^ and $: the whole output has to match."
# What to do, by a part of what the compiler of regular expressions and schemas says.
_HINTS = {
    "anchored": _ANCHORS,
    "vocabulary": _ANCHORS,
    "NFA": " Check its brackets, ranges and escapes; the syntax is that of Rust's `regex`, without "
    "look-around.",
}
_MEANINGS = {
    "choices": "give a list of texts, or one list for each prompt",
    "regex": "give a regular expression, or one for each prompt",
    "json_schema": "give a JSON schema as a dictionary or a text, or one for each prompt",
}


def _choices(value: Any) -> tuple[str, ...]:
    value = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"choices: got {value!r:.80}; {_MEANINGS['choices']}, none empty.")
    return tuple(value)


def _regex(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str) or not value:
        raise ValueError(f"regex: got {value!r:.80}; {_MEANINGS['regex']}.")
    return (value,)


def _schema(value: Any) -> tuple[str, ...]:
    value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
    got = f"json_schema: got {reprlib.repr(value)}"  # which does not follow it to any depth
    wrong = ValueError(f"{got}; {_MEANINGS['json_schema']}.")
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        schema = parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{got} ({error}); {_MEANINGS['json_schema']}.") from None
    if not isinstance(schema, dict):
        raise wrong
    try:
        reference_depth(schema)  # refuses what would not be obeyed
    except TypeError:  # a keyword is of another type
        raise wrong from None
    return (text,)


# A large vocabulary takes seconds, and calls repeat their grammars.
@functools.lru_cache(maxsize=4)
def compiled(
    tokenizer: "Tokenizer",
    vocab_size: int,
    languages: tuple[Language, ...],
    banned: frozenset[int] = frozenset(),
) -> tuple[Grammar, tuple[int, ...]]:
    """Returns one grammar that holds several languages, and the state that each begins in.

    Args:
        tokenizer: spells the texts.
        vocab_size: ids of the model.
        languages: texts that rows may emit.
        banned: ids that are never emitted.

    Raises:
        ValueError: a language cannot be read, has no text that can be spelled, or is too large.
        MissingExtra: the compiler of regular expressions is not installed.
    """
    machines = [_machine(language) for language in languages]
    if tokenizer.drops_first_space:
        machines = [_after_a_space(machine) for machine in machines]
    starts = np.cumsum([0, *(len(machine.ends) for machine in machines)])[:-1]
    tables = [
        np.where(machine.table < 0, _NOWHERE, machine.table + start)
        for machine, start in zip(machines, starts, strict=True)
    ]
    ends = np.concatenate([machine.ends for machine in machines])
    if len(ends) > _MOST_STATES:
        raise ValueError(
            f"{languages[0].setting}: a machine for it has {len(ends)} states, and at most "
            f"{_MOST_STATES} are possible; give fewer or shorter texts, or smaller bounds."
        )
    spelled = tokenizer.token_bytes()
    spelled = (spelled + [b""] * (vocab_size - len(spelled)))[:vocab_size]
    spelled = [b"" if token in banned else text for token, text in enumerate(spelled)]
    grammar = grammar_over_tokens(np.concatenate(tables), ends, spelled)
    lengths = np.asarray(grammar.least)[starts]
    for language, length in zip(languages, lengths.tolist(), strict=True):
        if length == NEVER:
            raise ValueError(
                f"{language.setting}: no text of {language.texts[0]!r:.60} can be spelled with the "
                "tokens of this tokenizer that may be emitted; check it for characters that the "
                "tokenizer lacks, and the settings for banned ids."
            )
    return with_room(grammar), tuple(starts.tolist())


def _after_a_space(machine: ByteMachine) -> ByteMachine:
    """Returns the machine for decoders that drop one space at the beginning of a text."""
    table = np.where(machine.table < 0, _NOWHERE, machine.table + 1)
    begin = table[:1].copy()
    begin[0, ord(" ")] = 1
    return ByteMachine(
        np.concatenate([begin, table]), np.concatenate([machine.ends[:1], machine.ends])
    )


def _machine(language: Language) -> ByteMachine:
    if language.setting == "choices":
        return machine_of_choices(language.texts)
    (text,) = language.texts
    with needs_extra(language.setting, "grammar"):
        import outlines_core
    compiler: Any = outlines_core
    try:
        regex = (
            text
            if language.setting == "regex"
            else compiler.json_schema.build_regex_from_schema(text, None, _depth_of(text))
        )
        # A vocabulary of single bytes, so that the index is the machine over bytes itself.
        vocabulary = compiler.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
        index = compiler.Index(regex, vocabulary)
    except Exception as error:  # the library raises several kinds, some of them bare `Exception`s
        hint = next((hint for sign, hint in _HINTS.items() if sign in f"{error}"), "")
        reason = f"{error}".splitlines()[0].rstrip(". ")
        raise ValueError(f"{language.setting}: {reason} (in {text!r:.80}).{hint}") from None
    moves = index.get_transitions()
    order = [index.get_initial_state()]
    order += sorted({*moves, *index.get_final_states()} - {*order})
    number = {state: place for place, state in enumerate(order)}
    table = np.full((len(order), 256), _NOWHERE)
    for state, after in moves.items():
        for byte, reached in after.items():
            if byte < 256:
                table[number[state], byte] = number[reached]
    return ByteMachine(table, np.isin(order, list(index.get_final_states())))


def _depth_of(schema: str) -> int:
    """Returns the depth to which a schema is read; free parts of it are nested so deep too."""
    return max(_LEAST_DEPTH, reference_depth(json.loads(schema)))


def machine_of_choices(texts: Sequence[str]) -> ByteMachine:
    """Returns the machine that reads one of several texts.

    Example:
        >>> machine = machine_of_choices(["a", "ab"])
        >>> machine.table[:, ord("a")].tolist(), machine.ends.tolist()
        ([1, -1, -1], [False, True, True])
    """
    encoded = {text.encode() for text in texts}
    prefixes = {text[:end] for text in encoded for end in range(len(text) + 1)}
    follow: dict[bytes, list[bytes]] = {prefix: [] for prefix in prefixes}
    for prefix in sorted(prefixes - {b""}):
        follow[prefix[:-1]].append(prefix)
    # Beginnings that go on alike are one state, so that common ends are held once.
    states: dict[Any, int] = {}
    state_of: dict[bytes, int] = {}
    for prefix in sorted(prefixes, key=len, reverse=True):
        moves = tuple((longer[-1], state_of[longer]) for longer in follow[prefix])
        state_of[prefix] = states.setdefault((prefix in encoded, moves), len(states))
    last = len(states) - 1  # the state of no text, which is to be the first
    table, ends = np.full((len(states), 256), _NOWHERE), np.zeros(len(states), bool)
    for (end, moves), state in states.items():
        ends[last - state] = end
        for byte, reached in moves:
            table[last - state, byte] = last - reached
    return ByteMachine(table, ends)
