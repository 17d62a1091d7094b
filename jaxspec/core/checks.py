"""Checks of settings: a field's annotation says what it must be, and errors name the field.

A field of a `Checked` dataclass is annotated with its type and, where that says too little, with
rules: `Annotated[int, at_least(1)]`, or one of the short names below. So Python, the command line
and files of settings are refused alike, before anything is built. The arguments of a function are
annotated in the same way, under `checks_arguments`.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import os
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar, Union

import numpy as np


class Requirement(NamedTuple):
    """A condition on a value of the right type.

    Attributes:
        said: the condition, after "must be".
        holds: decides.
        is_interval: whatever lies between two values that meet it meets it too.
        of_size: it is about the number of entries, and is decided before they are looked at.
    """

    said: str
    holds: Callable[[Any], bool]
    is_interval: bool = True
    of_size: bool = False


def at_least(least: int | float) -> Requirement:
    """Returns the rule of numbers from `least` up."""
    return Requirement(f"at least {least}", lambda value: value >= least)


def above(bound: int | float) -> Requirement:
    """Returns the rule of numbers above `bound`."""
    return Requirement(f"above {bound}", lambda value: value > bound)


def at_most(most: int | float) -> Requirement:
    """Returns the rule of numbers up to `most`."""
    return Requirement(f"at most {most}", lambda value: value <= most)


def below(bound: int | float) -> Requirement:
    """Returns the rule of numbers below `bound`."""
    return Requirement(f"below {bound}", lambda value: value < bound)


def within(low: int | float, high: int | float) -> Requirement:
    """Returns the rule of numbers in [low, high]."""
    return Requirement(f"in [{low}, {high}]", lambda value: low <= value <= high)


def between(low: int | float, high: int | float) -> Requirement:
    """Returns the rule of numbers in (low, high)."""
    return Requirement(f"in ({low}, {high})", lambda value: low < value < high)


def from_up_to(low: int | float, high: int | float) -> Requirement:
    """Returns the rule of numbers in [low, high)."""
    return Requirement(f"in [{low}, {high})", lambda value: low <= value < high)


def above_up_to(low: int | float, high: int | float) -> Requirement:
    """Returns the rule of numbers in (low, high]."""
    return Requirement(f"in ({low}, {high}]", lambda value: low < value <= high)


def one_of(*choices: Any) -> Requirement:
    """Returns the rule of values that are listed."""
    return Requirement(
        f"one of {choices}",
        lambda value: isinstance(value, Hashable) and value in choices,
        is_interval=False,
    )


def at_most_entries(most: int) -> Requirement:
    """Returns the rule of sequences and mappings of up to `most` entries."""
    return Requirement(
        f"of at most {most} entries",
        lambda value: _length(value) <= most,
        is_interval=False,
        of_size=True,
    )


# Sizes and ids are 32-bit integers in compiled programs.
Count = Annotated[int, at_least(1), below(2**31)]
Natural = Annotated[int, at_least(0), below(2**31)]
Whole = Annotated[int, at_least(-(2**31)), below(2**31)]
MOST_NODES = 4096
"""Largest tree, the root not counted: its masks have an entry for each pair of nodes."""
Nodes = Annotated[int, at_least(1), at_most(MOST_NODES)]
MOST_ENTRIES = 1 << 24
"""Longest sequence or mapping of a setting that has no smaller limit of its own."""
LARGEST = 3e38
"""Numbers of 32 bits go little further."""
Positive = Annotated[float, above(0), below(LARGEST)]
MAY_BE_INFINITE = "may be infinite"
"""Among the rules of a float: infinities are numbers too."""
MAY_BE_PATH = "may be a path"
"""Among the rules of a text: paths are taken too, and become texts."""
FileName = Annotated[str, MAY_BE_PATH]
PositiveOrInfinite = Annotated[float, MAY_BE_INFINITE, above(0)]
NotNegative = Annotated[float, at_least(0), below(LARGEST)]
Share = Annotated[float, within(0, 1)]


class Checked:
    """A dataclass whose fields are checked when it is made, and stored as plain values.

    Attributes:
        prefix: before the names of its fields in errors, such as "diffusion.".

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Sizes(Checked):
        ...     block: Count = 8
        ...     rate: Share | None = None
        >>> Sizes(np.int64(4), 1)
        Sizes(block=4, rate=1.0)
        >>> Sizes(1.5)
        Traceback (most recent call last):
        ...
        ValueError: block must be a whole number, got 1.5.
        >>> Sizes(rate=2)
        Traceback (most recent call last):
        ...
        ValueError: rate must be in [0, 1], got 2.0.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self):
        for name, hint in _hints(type(self)).items():
            given = getattr(self, name)
            plain = checked(f"{self.prefix}{name}", given, hint)
            if plain is not given:
                object.__setattr__(self, name, plain)


def checked(name: str, value: Any, hint: Any) -> Any:
    """Returns a value as a plain one of the type and under the rules of an annotation.

    Whole numbers may be given as floats, such as 8.0, which is how some files hold them. Types that
    are neither built in nor classes are not checked.

    Args:
        name: of the setting.
        value: of the setting.
        hint: `int`, `Count | None`, `tuple[Share, ...]`, a dataclass, ...

    Raises:
        ValueError: naming the setting, what it must be, and its value.

    Example:
        >>> checked("repeats", 3.0, Count)
        3
        >>> checked("layers", [0, True], tuple[int, ...])
        Traceback (most recent call last):
        ...
        ValueError: layers[1] must be a whole number, got True.
    """
    if typing.get_origin(hint) is Annotated:
        bare, rules = _bare(hint), _rules(hint)
        for rule in rules:
            found: Any = _Kind.of(bare).read(value) if rule.of_size else _WRONG
            if found is not _WRONG and not rule.holds(found):
                raise ValueError(f"{name} must be {rule.said}, got {_length(found)}.")
        plain = checked(name, value, bare)
        for rule in rules:
            if plain is not None and not rule.holds(plain):
                raise ValueError(f"{name} must be {rule.said}, got {shown(plain)}.")
        return plain
    if typing.get_origin(hint) in (Union, types.UnionType):
        return _of_any(name, value, typing.get_args(hint))
    kind = _Kind.of(hint)
    found = kind.read(value)
    if found is _WRONG:
        raise ValueError(f"{name} must be {kind.said}, got {shown(value)}.")
    if kind.parts is None and kind.entry is None:
        return found
    count = _size(found)
    if count > MOST_ENTRIES:
        raise ValueError(f"{name} must be of at most {MOST_ENTRIES} entries, got {count}.")
    if kind.entry is not None:
        key, entry = kind.entry
        if count > _FEW:
            keys, values = _plain_numbers(found, key), _plain_numbers(found.values(), entry)
            if keys is not None and values is not None:
                return dict(zip(keys, values, strict=True))
        return {
            checked(f"{name}: each key", a, key): checked(f"{name}[{shown(a)}]", b, entry)
            for a, b in found.items()
        }
    assert kind.parts is not None
    entries = found.tolist() if isinstance(found, np.ndarray) else found
    plain = _plain_numbers(entries, kind.parts(0)) if len(entries) > _FEW else None
    if plain is not None:
        return tuple(plain)
    return tuple(checked(f"{name}[{i}]", part, kind.parts(i)) for i, part in enumerate(entries))


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def checks_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function check its arguments by their annotations, and take them as plain values.

    Annotations in quotes are not checked. Defaults are not either.

    Example:
        >>> @checks_arguments
        ... def repeat(word: str, times: Count = 2) -> str:
        ...     return word * times
        >>> repeat("ab", 3.0)
        'ababab'
        >>> repeat("ab", times=0)
        Traceback (most recent call last):
        ...
        ValueError: times must be at least 1, got 0.
    """
    names = tuple(inspect.signature(function).parameters)
    hints = {
        name: hint
        for name, hint in inspect.get_annotations(function).items()
        if name in names and not isinstance(hint, str)
    }

    untyped: Any = function

    def plain(name: str, value: Any) -> Any:
        return checked(name, value, hints[name]) if name in hints else value

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        placed = (*map(plain, names, args), *args[len(names) :])
        named = {name: plain(name, value) for name, value in kwargs.items()}
        return untyped(*placed, **named)

    return call


def meant(word: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """Returns a question that names the closest of the known words, or "".

    Example:
        >>> meant("temprature", ["temperature", "top_k"])
        '; did you mean temperature?'
        >>> meant("x", ["temperature"])
        ''
    """
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {show(close[0])}?" if close else ""


def shown(value: Any) -> str:
    """Returns a value as messages quote it, in 80 characters at most, however large it is.

    Example:
        >>> shown("abc"), len(shown("a" * 1000)), len(shown([0] * 1000))
        ("'abc'", 80, 80)
    """
    if type(value) in (str, bytes, list, tuple):
        value = value[:_MOST_SHOWN]  # the quotes or brackets around them are cut
    try:
        text = repr(_scalar(value))
    except (ValueError, RecursionError):  # more digits than Python writes, or too many levels
        return f"{type(value).__name__} too long to show"
    except Exception:  # of code that is not ours
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


_MOST_SHOWN = 80
_FEW = 64
_WHOLE = (int, np.integer)
_REAL = (*_WHOLE, float, np.floating)


def _plain_numbers(entries: Iterable[Any], hint: Any) -> list[Any] | None:
    """Returns many entries as plain numbers, or `None` unless all are under the rules of `hint`.

    The rules are applied to the extremes alone. `None` may also mean that this cannot decide.
    """
    kind, rules = _bare(hint), _rules(hint)
    types_taken = {int: _WHOLE, float: _REAL, MAY_BE_INFINITE: _REAL}.get(kind)
    given = set(map(type, entries))
    if types_taken is None or bool in given or not all(issubclass(t, types_taken) for t in given):
        return None
    try:
        plain = list(map(int if kind is int else float, entries))
    except OverflowError:  # a whole number that no float holds
        return None
    if kind is float and not all(map(math.isfinite, plain)):
        return None
    if kind == MAY_BE_INFINITE and any(map(math.isnan, plain)):
        return None
    ends = min(plain), max(plain)
    return plain if all(r.is_interval and all(map(r.holds, ends)) for r in rules) else None


def _of_any(name: str, value: Any, hints: tuple[Any, ...]) -> Any:
    """Returns a value of the first kind that it is of, and whose rules it keeps."""
    kinds = [hint for hint in hints if hint is not type(None)]
    if value is None and len(kinds) < len(hints):
        return None
    refusal = None
    for hint in kinds:
        if len(kinds) == 1 or _Kind.of(_bare(hint)).read(value) is not _WRONG:
            try:
                return checked(name, value, hint)
            except ValueError as error:
                refusal = refusal or error
    if refusal is not None:
        raise refusal
    said = " or ".join(_Kind.of(_bare(hint)).said for hint in kinds)
    raise ValueError(f"{name} must be {said}, got {shown(value)}.")


_WRONG = object()


class _Kind(NamedTuple):
    """A type, as settings are checked by it.

    Attributes:
        said: its name, after "must be".
        read: returns a value as a plain one, or `_WRONG`.
        parts: of a sequence: the annotation of each entry, by its place.
        entry: of a mapping: the annotations of keys and of values.
    """

    said: str
    read: Callable[[Any], Any]
    parts: Callable[[int], Any] | None = None
    entry: tuple[Any, Any] | None = None

    @classmethod
    @cache
    def of(cls, hint: Any) -> "_Kind":
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint in _KINDS:
            return _KINDS[hint]
        if origin is Literal:
            rule = one_of(*args)
            return cls(rule.said, lambda value: value if rule.holds(value) else _WRONG)
        if origin is Sequence or (origin is tuple and args[1:] == (Ellipsis,)):
            return cls("a sequence", _entries, lambda place: args[0])
        if origin is tuple:
            return cls(
                f"{len(args)} entries",
                lambda value: _entries(value, len(args)),
                lambda place: args[place],
            )
        if origin is Mapping:
            return cls("a mapping", _instance(Mapping), entry=(args[0], args[1]))
        unknown = getattr(hint, "_is_protocol", False) and not getattr(
            hint, "_is_runtime_protocol", False
        )
        if isinstance(hint, type) and origin is None and not unknown:
            return cls(f"of type {hint.__name__}", _instance(hint))
        return cls("anything", lambda value: value)


def _instance(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else _WRONG


def _length(value: Any) -> int:
    """Returns the number of entries, of longer ranges than `len` counts the most that it does."""
    try:
        return len(value)
    except OverflowError:
        return sys.maxsize


def _size(value: Any) -> int:
    """Returns the number of entries, of an array along all axes."""
    return value.size if isinstance(value, np.ndarray) else _length(value)


def _scalar(value: Any) -> Any:
    """Returns what an array without axes holds."""
    array = _array(value)
    return value if array is None or array.ndim else array.item()


def _array(value: Any) -> np.ndarray | None:
    """Returns what can be read as an array as one."""
    try:
        return np.asarray(value) if hasattr(value, "__array__") else None
    except Exception:  # of code that is not ours
        return None


def _real(value: Any) -> Any:
    """Returns a real number that is no truth value, or `_WRONG`."""
    value = _scalar(value)
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return value if is_real else _WRONG


def _whole(value: Any) -> Any:
    found = _real(value)
    if found is _WRONG or not (isinstance(found, int) or math.isfinite(found)):
        return _WRONG
    return int(found) if int(found) == found else _WRONG


def _number(value: Any) -> Any:
    found = _real(value)
    if found is _WRONG or abs(found) > sys.float_info.max or not math.isfinite(found):
        return _WRONG
    return float(found)


def _any_number(value: Any) -> Any:
    found = _real(value)
    if found is _WRONG or isinstance(found, int):
        return _number(value)
    return _WRONG if math.isnan(found) else float(found)


def _path(value: Any) -> Any:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return value if isinstance(value, str) else _WRONG


def _flag(value: Any) -> Any:
    value = _scalar(value)
    return value if isinstance(value, bool) else _WRONG


def _entries(value: Any, count: int | None = None) -> Any:
    """Returns a sequence, or an array with axes, before its entries are looked at, or `_WRONG`."""
    array = _array(value)
    if array is not None and array.ndim:
        value = array
    elif not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return _WRONG
    return value if count in (None, _length(value)) else _WRONG


_KINDS: dict[Any, _Kind] = {
    bool: _Kind("True or False", _flag),
    int: _Kind("a whole number", _whole),
    float: _Kind("a finite number", _number),
    str: _Kind("a text", _instance(str)),
    pathlib.Path: _Kind("a path", _instance(pathlib.Path)),
    Any: _Kind("anything", lambda value: value),
    MAY_BE_INFINITE: _Kind("a number", _any_number),
    MAY_BE_PATH: _Kind("a text or a path", _path),
}


def _bare(hint: Any) -> Any:
    """Returns a hint without its rules."""
    if typing.get_origin(hint) is not Annotated:
        return hint
    kind, *rules = typing.get_args(hint)
    return next((rule for rule in rules if rule in (MAY_BE_INFINITE, MAY_BE_PATH)), kind)


def _rules(hint: Any) -> list[Requirement]:
    if typing.get_origin(hint) is not Annotated:
        return []
    return [rule for rule in typing.get_args(hint)[1:] if isinstance(rule, Requirement)]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Returns the annotation of each field, with the choices that its metadata lists."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {}
    assert dataclasses.is_dataclass(kind), "only dataclasses are checked"
    for field in dataclasses.fields(kind):
        choices = field.metadata.get("choices")
        hint = hints[field.name]
        found[field.name] = hint if choices is None else Annotated[hint, one_of(*choices)]
    return found
