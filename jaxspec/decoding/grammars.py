"""Settings of `GenerationConfig` that say what a text may be, as machines over tokens."""

import base64
import functools
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.bounded import Bounded, Ended
from jaxspec.checkpoint.files import parse_json
from jaxspec.checkpoint.tokenizer import check_unicode
from jaxspec.core.checks import shown
from jaxspec.core.grammar import (
    NEVER,
    Grammar,
    TooManyEntries,
    grammar_over_tokens,
    trie_of,
    with_room,
)
from jaxspec.decoding import patterns
from jaxspec.decoding.patterns import MOST_STATES, size_of_pattern
from jaxspec.decoding.schemas import size_of_schema, with_whole_lengths
from jaxspec.extras import needs_extra

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer

_NOWHERE, _LEAST_DEPTH = -1, 3
_MOST_TEXTS, _MOST_BYTES, _MOST_NODES = 1 << 18, 1 << 22, 1 << 18  # of choices, and of their trie
_MOST_PARTS, _LONGEST_REGEX = 10_000, 1 << 16
# Larger ones are compiled in a process of their own, as they may take very long.
_FEW_PARTS, _FEW_CHOICES = 500, 14
_PROCESS = Bounded(patterns.__file__, seconds=5, memory=1 << 30)  # machines that fit take 2


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
        value = _listed(setting, value)
        is_one = setting == "choices" and all(isinstance(each, str) for each in value)
    each = [value] if is_one else value
    if not isinstance(each, list) or not each:
        raise ValueError(f"{setting}: got {shown(value)}; {_MEANINGS[setting]}.")
    if setting == "choices" and any(isinstance(one, str) or not _is_many(one) for one in each):
        raise ValueError(f"choices: got {shown(value)}; {_MEANINGS[setting]}, none empty.")
    languages = [Language(setting, read(one)) for one in each]
    if setting == "choices":
        length = sum(sum(map(len, language.texts)) for language in {*languages})
        if length > _MOST_BYTES:
            raise ValueError(
                f"choices: texts of {length} characters in all, and at most {_MOST_BYTES} are "
                "possible; give fewer or shorter ones."
            )
    return languages


def _is_many(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _listed(setting: str, values: Iterable[Any]) -> list[Any]:
    """Returns values as a list; they may have no end."""
    found = list(islice(values, _MOST_TEXTS + 1))
    if len(found) > _MOST_TEXTS:
        raise ValueError(f"{setting}: got more than {_MOST_TEXTS} of them; give fewer.")
    return found


_NO_TEXT = "a part of it matches no text"
_ANCHORS = " Leave out ^ and $: the whole output has to match."
# What to do, by a part of what the compiler of regular expressions and schemas says.
_HINTS = {
    "anchored": _ANCHORS,
    _NO_TEXT: " It may be an empty class, or ^ or $ in the midst; the whole output has to match.",
    "NFA": " Check its brackets, ranges and escapes; the syntax is that of Rust's `regex`, without "
    "look-around.",
}
_MEANINGS = {
    "choices": "give a list of texts, or one list for each prompt",
    "regex": "give a regular expression, or one for each prompt",
    "json_schema": "give a JSON schema as a dictionary or a text, or one for each prompt",
}


def _choices(value: Any) -> tuple[str, ...]:
    value = _listed("choices", value)
    if not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"choices: got {shown(value)}; {_MEANINGS['choices']}, none empty.")
    for text in value:
        check_unicode(text, "choices: a text")
    return tuple(value)


def _regex(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str) or not value:
        raise ValueError(f"regex: got {shown(value)}; {_MEANINGS['regex']}.")
    check_unicode(value, "regex")
    if len(value) > _LONGEST_REGEX:
        raise ValueError(
            f"regex: it has {len(value)} characters, and at most {_LONGEST_REGEX} are possible "
            f"(in {shown(value)})."
        )
    if (parts := size_of_pattern(value).parts) > _MOST_PARTS:
        raise ValueError(
            f"regex: it has {parts} parts, if its repetitions are written out, and at most "
            f"{_MOST_PARTS} are possible; repeat less (in {shown(value)})."
        )
    return (value,)


def _schema(value: Any) -> tuple[str, ...]:
    value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
    got = f"json_schema: got {reprlib.repr(value)}"  # which does not follow it to any depth
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        parse_json(text)  # refuses what is not
        schema = json.loads(text, object_hook=with_whole_lengths)
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{got} ({error}); {_MEANINGS['json_schema']}.") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{got}; {_MEANINGS['json_schema']}.")
    check_unicode(text, "json_schema")
    size_of_schema(schema)  # refuses what would not be obeyed
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
    machines, num_states = [], 0
    for language in languages:
        machines.append(_machine(language))
        num_states += len(machines[-1].ends)
        if num_states > MOST_STATES:
            raise _too_many_states(language.setting, num_states)
    if tokenizer.drops_first_space:
        machines = [_after_a_space(machine) for machine in machines]
    starts = np.cumsum([0, *(len(machine.ends) for machine in machines)])[:-1]
    tables = [
        np.where(machine.table < 0, _NOWHERE, machine.table + start)
        for machine, start in zip(machines, starts, strict=True)
    ]
    ends = np.concatenate([machine.ends for machine in machines])
    spelled = tokenizer.token_bytes()
    spelled = (spelled + [b""] * (vocab_size - len(spelled)))[:vocab_size]
    spelled = [b"" if token in banned else text for token, text in enumerate(spelled)]
    try:
        grammar = grammar_over_tokens(np.concatenate(tables), ends, spelled)
    except TooManyEntries as error:
        raise ValueError(
            f"{languages[0].setting}: it makes {error}; give fewer or shorter texts, or smaller "
            "bounds."
        ) from None
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


def _too_many_states(setting: str, num_states: int) -> ValueError:
    return ValueError(
        f"{setting}: a machine for it has {num_states} states or more, and at most {MOST_STATES} "
        "are possible; give fewer or shorter texts, or smaller bounds."
    )


def _machine(language: Language) -> ByteMachine:
    if language.setting == "choices":
        return machine_of_choices(language.texts)
    (text,) = language.texts
    with needs_extra(language.setting, "grammar"):
        import outlines_core  # noqa: F401
    depth, own = None, {}
    if language.setting == "regex":
        parts, choices = size_of_pattern(text)
        is_large = parts > _FEW_PARTS or choices > _FEW_CHOICES
    else:
        size = size_of_schema(json.loads(text))
        own = size.patterns
        is_large = size.parts > _FEW_PARTS or bool(own)
        # Past its depth, the compiler leaves parts of a schema out.
        depth = max(_LEAST_DEPTH, size.depth)
    question = {"text": text, "depth": depth, "patterns": own}
    try:
        answer = _PROCESS.ask(question) if is_large else patterns.answer(question)
    except Ended:
        raise ValueError(
            f"{language.setting}: compiling it takes more than {_PROCESS.bounds}; repeat less, or "
            f"leave fewer ways to read a text (in {shown(text)})."
        ) from None
    if "error" in answer:
        reason = answer["error"].partition("\n")[0].rstrip(". ")
        if "vocabulary" in reason:  # which holds every byte
            reason = _NO_TEXT
        hint = next((hint for sign, hint in _HINTS.items() if sign in reason), "")
        raise ValueError(f"{language.setting}: {reason} (in {shown(text)}).{hint}")
    table = np.frombuffer(base64.b64decode(answer["table"]), np.int32).reshape(-1, 256)
    return ByteMachine(table, np.isin(np.arange(len(table)), answer["ends"]))


def machine_of_choices(texts: Sequence[str]) -> ByteMachine:
    """Returns the machine that reads one of several texts.

    Raises:
        ValueError: they are too many or too long.

    Example:
        >>> machine = machine_of_choices(["a", "ab"])
        >>> machine.table[:, ord("a")].tolist(), machine.ends.tolist()
        ([1, -1, -1], [False, True, True])
    """
    trie = trie_of((text.encode() for text in texts), most=_MOST_NODES)
    if trie is None:
        raise _too_many_states("choices", MOST_STATES + 1)
    follow, complete = trie
    # Beginnings that go on alike are one state, so that common ends are held once.
    states: dict[Any, int] = {}
    state_of = [0] * len(follow)
    for node in reversed(range(len(follow))):
        moves = tuple(sorted((byte, state_of[after]) for byte, after in follow[node].items()))
        state_of[node] = states.setdefault((node in complete, moves), len(states))
        if len(states) > MOST_STATES:
            raise _too_many_states("choices", len(states))
    last = len(states) - 1  # the state of no text, which is to be the first
    table, ends = np.full((len(states), 256), _NOWHERE, np.int32), np.zeros(len(states), bool)
    for (end, moves), state in states.items():
        ends[last - state] = end
        for byte, reached in moves:
            table[last - state, byte] = last - reached
    return ByteMachine(table, ends)
