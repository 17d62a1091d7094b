"""The parser of every command: places and flags for one argument, short errors, what was meant."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jaxspec.core.checks import meant, shown

BY_FLAG = " by flag"
"""End of the name of a value that the flag of a place gives."""
_LENGTH = ("max-length", "n", "n-predict", "length", "num-tokens")
_ALSO: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_LENGTH, ("--max-tokens", "--sequence-length")),
    **dict.fromkeys(("o", "output"), ("--out", "--json")),
}
"""Flags of other programs, and flags that mean the same, of which a command has one at most."""
_ELSEWHERE: Mapping[str, str] = {
    "device": "JAX_PLATFORMS=cpu (cuda, tpu) before the command",
    **dict.fromkeys(("o", "output"), "> FILE"),
}
"""Flags of other programs that are no flags here, and what to type for each."""


class Place(NamedTuple):
    """An argument that is given by its place among the others, or by a flag.

    Attributes:
        name: of its value.
        flag: the long form of its flag.
        metavar: its name in the help.
        kind: makes the value of a text.
        required: it must be given.
    """

    name: str
    flag: str
    metavar: str
    kind: Callable[[str], Any]
    required: bool


def add_place(
    parser: argparse.ArgumentParser,
    name: str,
    *flags: str,
    metavar: str,
    help: str,
    kind: Callable[[str], Any] = str,
    required: bool = True,
) -> None:
    """Declares an argument that `settle` takes from its place or from its flag.

    Args:
        parser: the parser of a command.
        name: see `Place`.
        flags: spellings of the flag, the long one last.
        metavar: see `Place`.
        help: for the help of both.
        kind: see `Place`.
        required: see `Place`.
    """
    parser.add_argument(name, nargs="?", metavar=metavar, help=help)
    dest = name + BY_FLAG
    parser.add_argument(*flags, dest=dest, metavar=metavar, help="the same, by a flag")
    place = Place(name, flags[-1], metavar, kind, required)
    parser.set_defaults(places=(*(parser.get_default("places") or ()), place))


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Gives the words of a command line to the arguments that no flag gives, in their order.

    Args:
        parser: the parser of the command; its `error` says what is wrong.
        args: what it has read, which is completed.
        rest: what it has not: words that stand behind a flag, and flags that it does not have.
            Behind "--" there are words only.
    """
    end = rest.index("--") if "--" in rest else len(rest)
    if unknown := [word for word in rest[:end] if word.startswith("-") and word != "-"]:
        parser.error(
            "; ".join(f"unknown flag {word:.80}{_flag_meant(parser, word)}" for word in unknown[:2])
        )
    places: Sequence[Place] = getattr(args, "places", ())
    flags = {
        place: value
        for place in places
        if (value := getattr(args, place.name + BY_FLAG)) is not None
    }
    stood = (getattr(args, place.name) for place in places)
    words = [*(word for word in stood if word is not None), *rest[:end], *rest[end + 1 :]]
    free = [place for place in places if place not in flags]
    if len(words) > len(free):
        more = " ".join(words[len(free) :])
        twice = f", as {', '.join(place.flag for place in flags)} is given too" if flags else ""
        parser.error(f"too many words: {more!r:.40}{twice}. Text with spaces needs quotes.")
    found = {**flags, **dict(zip(free, words, strict=False))}
    for place in places:
        try:
            setattr(args, place.name, place.kind(found[place]) if place in found else None)
        except argparse.ArgumentTypeError as error:
            parser.error(f"{place.metavar}: {error}")
    if missing := [place.metavar for place in places if place.required and place not in found]:
        parser.error(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")


def _flag_meant(parser: argparse.ArgumentParser, word: str) -> str:
    """Returns what may have been meant by an unknown flag."""
    name = word.partition("=")[0].strip("-").replace("_", "-")
    flags = [flag for action in parser._actions for flag in action.option_strings]
    instead = parser.get_default("instead") or (lambda name: None)
    also = next((flag for flag in _ALSO.get(name, ()) if flag in flags), None)
    known = None if f"--{name}" in flags else also or instead(name) or _ELSEWHERE.get(name)
    if known:
        return f"; did you mean {known}?"
    names = [flag.removeprefix("--") for flag in flags]
    return meant(name, names, "--{}".format) if len(name) > 1 else ""


class Parser(argparse.ArgumentParser):
    """A parser whose errors say what to type, in a few lines.

    Attributes:
        example: a command line of this command that runs.
        also: words that are no choices of commands, and what to type for each.
    """

    example: str = ""
    also: Mapping[str, str] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, how the command is used and an example; exits with 2."""
        message = re.sub(r"^argument (?=-)", "", message)
        lines = [f"jaxspec: error: {message}", self.format_usage().rstrip()]
        self.exit(2, "\n".join([*lines, f"example: {self.example}", ""]))

    def use_short_usage(self) -> None:
        """Names in the usage what must be given, what has a place, and no further flag.

        The default `needed` names the values that the command itself asks for.
        """
        places: Sequence[Place] = self.get_default("places") or ()
        needed = {place.name for place in places if place.required}
        needed |= {*(self.get_default("needed") or ())}
        words = []
        for action in self._actions:
            is_needed = action.required or action.dest in needed
            name = str(action.metavar or action.dest)
            if not action.option_strings:
                words.append(name if is_needed else f"[{name}]")
            elif is_needed:
                words.append(f"{action.option_strings[-1]} {name}")
        begin = "usage: "
        self.usage = textwrap.fill(
            " ".join([begin + self.prog, *words, "[flags]"]),
            shutil.get_terminal_size().columns - 2,
            subsequent_indent=" " * len(begin),
            break_on_hyphens=False,
        ).removeprefix(begin)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Reads a value; errors quote the beginning of a long one."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            error.message = error.message.replace(repr(arg_string), shown(arg_string))
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses what is none of the choices, and names the closest one."""
        if action.choices is None or value in action.choices:
            return
        names, also = [str(choice) for choice in action.choices], self.also
        if action.option_strings:
            also = {}
        asked = meant(str(value), [*names, *also], lambda word: also.get(word, word))
        said = f"no {value!r:.40} here{asked or '; give one of ' + ', '.join(names)}"
        raise argparse.ArgumentError(action if action.option_strings else None, said)
