"""Regular expressions: how large they are, and their machines over bytes.

This file is also a program for `jaxspec.bounded`, so it imports nothing of the package.
"""

import array
import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_STATES = 20_000
"""States of a machine over bytes."""
_MOST_COUNTED = 10**12
# Choices of classes, by the letter after the backslash; Unicode's letters have hundreds of states.
_CHOICES = {**dict.fromkeys("wWpP", 3), **dict.fromkeys("dDsSbB", 1)}


class PatternSize(NamedTuple):
    """Parts of a pattern that make its machine large.

    Attributes:
        parts: characters and classes, if counted repetitions such as `{2,5}` were written out.
        choices: those of them at which a text may go on in more than one way. The machine may have
            as many states as 2 to this power.
    """

    parts: int
    choices: int


def size_of_pattern(pattern: str) -> PatternSize:
    """Estimates the size of a pattern, whose syntax may be wrong.

    Example:
        >>> size_of_pattern("[0-9]{1,3}(,[0-9]{3}){2}")
        PatternSize(parts=11, choices=10)
        >>> size_of_pattern("literally")
        PatternSize(parts=9, choices=0)
    """
    groups, place = [_Sizes()], 0
    while place < len(pattern):
        char, group = pattern[place], groups[-1]
        place += 1
        if char == "(":
            groups.append(_Sizes())
            place += pattern.startswith("?", place)  # flags or a name
        elif char == ")":
            if len(groups) > 1:
                groups.pop()
                groups[-1].add(*group.whole)
        elif char in "*+?":
            group.choose()
        elif char == "|":
            group.add(0, 1)
        elif char == "{":
            counts = pattern[place : place + 40].partition("}")[0]
            numbers = [int(count[:12]) for count in counts.split(",") if count.strip().isdecimal()]
            group.repeat(max(numbers, default=1))
            if "," in counts:
                group.choose()
            place += len(counts) + 1
        elif char == "[":
            place = _end_of_class(pattern, place)
            group.add(1, 1)
        elif char == "\\":
            kind = pattern[place : place + 1]
            place += 1
            if kind in ("p", "P", "x", "u", "U") and pattern.startswith("{", place):
                place += len(pattern[place:].partition("}")[0]) + 1
            group.add(1, _CHOICES.get(kind, 0))
        else:
            group.add(1, 1 if char == "." else 0)
    sizes = [group.whole for group in groups]
    return PatternSize(sum(parts for parts, _ in sizes), sum(choices for _, choices in sizes))


class _Sizes:
    """Parts and choices of a group, and of the last of its parts, which may be repeated."""

    def __init__(self):
        self.whole = self.last = (0, 0)

    def add(self, parts: int, choices: int) -> None:
        self.last = (parts, choices)
        whole = (self.whole[0] + parts, self.whole[1] + choices)
        self.whole = (min(whole[0], _MOST_COUNTED), min(whole[1], _MOST_COUNTED))

    def repeat(self, count: int) -> None:
        parts, choices = self.last
        more = max(count, 1) - 1
        self.add(more * parts, more * choices)
        self.last = (parts + more * parts, choices + more * choices)

    def choose(self) -> None:
        parts, choices = self.last
        self.add(0, 1)
        self.last = (parts, choices + 1)


def _end_of_class(pattern: str, place: int) -> int:
    """Returns the place after the class that was opened before `place`; classes hold classes."""
    place += pattern.startswith("^", place)
    place += pattern.startswith("]", place)
    depth = 1
    while place < len(pattern) and depth:
        depth += {"[": 1, "]": -1}.get(pattern[place], 0)
        place += 2 if pattern[place] == "\\" else 1
    return place


def machine_of_pattern(pattern: str) -> tuple[bytes, list[int]]:
    """Returns the states after each byte, 256 of 32 bits for each state, and the states of ends.

    State 0 is the first; -1 is none.

    Raises:
        ValueError: there are more than `MOST_STATES`.
        Exception: as the compiler raises.
    """
    import outlines_core

    compiler: Any = outlines_core
    # A vocabulary of single bytes, so that the index is the machine over bytes itself.
    vocabulary = compiler.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    index = compiler.Index(pattern, vocabulary)
    moves, ends = index.get_transitions(), index.get_final_states()
    order = [index.get_initial_state()]
    order += sorted({*moves, *ends} - {*order})
    if len(order) > MOST_STATES:
        raise ValueError(
            f"a machine for it has {len(order)} states, and at most {MOST_STATES} are possible"
        )
    number = {state: place for place, state in enumerate(order)}
    table = array.array("i", [-1]) * (256 * len(order))
    for state, after in moves.items():
        for byte, reached in after.items():
            if byte < 256:
                table[256 * number[state] + byte] = number[reached]
    return table.tobytes(), sorted(number[state] for state in ends)


def pattern_of_schema(schema: str, depth: int) -> str:
    """Returns the regular expression of a JSON schema, whose references are followed so deep.

    Raises:
        Exception: as the compiler raises.
    """
    import outlines_core

    compiler: Any = outlines_core
    return compiler.json_schema.build_regex_from_schema(schema, None, depth)


def _check_syntax(place: str, pattern: str) -> None:
    """Refuses a pattern of a schema that alone is none; the compiler puts it between others."""
    try:
        machine_of_pattern(pattern)
    except Exception as error:
        if "NFA" in f"{error}":
            raise ValueError(f"{place}: {error}") from None


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the machine of a pattern, or of a schema, or the reason why there is none."""
    try:
        pattern = question["text"]
        if question["depth"] is not None:
            for place, own in question["patterns"].items():
                _check_syntax(place, own)
            pattern = pattern_of_schema(pattern, question["depth"])
        table, ends = machine_of_pattern(pattern)
    except Exception as error:
        return {"error": f"{error}"}
    return {"table": base64.b64encode(table).decode(), "ends": ends}
