"""Settings of `GenerationConfig` that say what a text may be, as machines over tokens."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.core.grammar import NEVER, Grammar, grammar_over_tokens
from jaxspec.extras import needs_extra

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer

_NOWHERE = -1


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
    if setting == "choices":
        is_one = isinstance(value, Sequence) and all(isinstance(each, str) for each in value)
    each = [value] if is_one else value
    if not isinstance(each, Sequence) or not each:
        raise ValueError(f"{setting}: got {value!r:.80}; {_MEANINGS[setting]}.")
    return [Language(setting, read(one)) for one in each]


_MEANINGS = {
    "choices": "give a list of texts, or one list for each prompt",
    "regex": "give a regular expression, or one for each prompt",
    "json_schema": "give a JSON schema as a dictionary or a text, or one for each prompt",
}


def _choices(value: Any) -> tuple[str, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not value
        or not all(isinstance(text, str) and text for text in value)
    ):
        raise ValueError(f"choices: got {value!r:.80}; {_MEANINGS['choices']}, none empty.")
    return tuple(value)


def _regex(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str) or not value:
        raise ValueError(f"regex: got {value!r:.80}; {_MEANINGS['regex']}.")
    return (value,)


def _schema(value: Any) -> tuple[str, ...]:
    value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        if isinstance(json.loads(text), dict):
            return (text,)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"json_schema: got {value!r:.80}; {_MEANINGS['json_schema']}.")


@functools.lru_cache(
    maxsize=16
)  # a large vocabulary takes seconds, and calls repeat their grammars
def compiled(
    tokenizer: "Tokenizer", vocab_size: int, languages: tuple[Language, ...]
) -> tuple[Grammar, tuple[int, ...]]:
    """Returns one grammar that holds several languages, and the state that each begins in.

    Raises:
        ValueError: a language cannot be read, or has no text that the tokenizer can spell.
        MissingExtra: the compiler of regular expressions is not installed.
    """
    machines = [_machine(language) for language in languages]
    starts = np.cumsum([0, *(len(machine.ends) for machine in machines)])[:-1]
    tables = [
        np.where(machine.table < 0, _NOWHERE, machine.table + start)
        for machine, start in zip(machines, starts, strict=True)
    ]
    ends = np.concatenate([machine.ends for machine in machines])
    spelled = tokenizer.token_bytes()
    spelled = (spelled + [b""] * (vocab_size - len(spelled)))[:vocab_size]
    grammar = grammar_over_tokens(np.concatenate(tables), ends, spelled)
    lengths = np.asarray(grammar.least)[starts]
    for language, length in zip(languages, lengths.tolist(), strict=True):
        if length == NEVER:
            raise ValueError(
                f"{language.setting}: no text of {language.texts[0]!r:.60} can be spelled with "
                "this tokenizer; check it for characters that the tokenizer lacks."
            )
    return grammar, tuple(starts.tolist())


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
            else compiler.json_schema.build_regex_from_schema(text)
        )
        # A vocabulary of single bytes, so that the index is the machine over bytes itself.
        vocabulary = compiler.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
        index = compiler.Index(regex, vocabulary)
    except Exception as error:  # the library raises several kinds, some of them bare `Exception`s
        raise ValueError(f"{language.setting}: {error} (in {text!r:.80}).") from None
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


def machine_of_choices(texts: Sequence[str]) -> ByteMachine:
    """Returns the machine that reads one of several texts.

    Example:
        >>> machine = machine_of_choices(["a", "ab"])
        >>> machine.table[:, ord("a")].tolist(), machine.ends.tolist()
        ([1, -1, -1], [False, True, True])
    """
    encoded = [text.encode() for text in texts]
    prefixes = {text[:end] for text in encoded for end in range(len(text) + 1)}
    number = {prefix: place for place, prefix in enumerate(sorted(prefixes, key=len))}
    table = np.full((len(number), 256), _NOWHERE)
    for prefix, place in number.items():
        if prefix:
            table[number[prefix[:-1]], prefix[-1]] = place
    return ByteMachine(table, np.isin(list(number), encoded))
