"""Rules of settings: every wrong type, range and size is refused by the field's name."""

import dataclasses
import inspect
import math
import pkgutil
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

import jaxspec
from jaxspec.core.checks import (
    Checked,
    Count,
    FileName,
    Natural,
    Positive,
    PositiveOrInfinite,
    Share,
    above,
    at_least,
    at_most_entries,
    below,
    checked,
    checks_arguments,
    one_of,
    shown,
)
from tests.shapes import made_unchecked


@typing.runtime_checkable
class Splitting(typing.Protocol):
    def divide(self) -> None: ...


NOT_NUMBERS = (True, "1", b"1", None, [1], (1,), {}, print, 1 + 2j)
NOT_WHOLE = (*NOT_NUMBERS, 1.5, math.nan, math.inf, -math.inf, np.float32(0.5))


class Hostile:
    """Its own code fails wherever it is asked."""

    def __array__(self, *args, **kwargs):
        raise KeyError("array")

    def __repr__(self):
        raise AttributeError("repr")


LONG = "x must be of at most 16777216 entries, got 1000000000."


def test_a_quoted_value_is_short():
    for value in ("a" * 10**8, [0] * 10**7, b"\n" * 10**8, 10**5000, {1: "b" * 99}):
        assert len(shown(value)) <= 80


@pytest.mark.parametrize("value", [3, 3.0, np.int8(3), np.float64(3), np.array(3)])
def test_whole_numbers_of_any_type_become_ints(value):
    plain = checked("block", value, int)
    assert plain == 3
    assert type(plain) is int


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(ValueError, match=r"^block must be a whole number, got "):
        checked("block", value, Count)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, math.nan, math.inf, -math.inf], ids=repr)
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match=r"^rate must be a finite number, got "):
        checked("rate", value, float)


def deep_list(levels):
    deep = []
    for _ in range(levels):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (Count, 0, "x must be at least 1, got 0."),
        (
            Sequence[Count],
            [10**5000],
            "x[0] must be below 2147483648, got int too long to show.",
        ),
        (Count, 2**31, f"x must be below {2**31}, got {2**31}."),
        (Natural, -1, "x must be at least 0, got -1."),
        (Natural | None, -1, "x must be at least 0, got -1."),
        (Positive, 0, "x must be above 0, got 0.0."),
        (Share, 1.5, "x must be in [0, 1], got 1.5."),
        (Annotated[float, above(0), below(1)], 1, "x must be below 1, got 1.0."),
        (Annotated[str, one_of("a", "b")], "c", "x must be one of ('a', 'b'), got 'c'."),
        (Literal["a", "b"], "c", "x must be one of ('a', 'b'), got 'c'."),
        (Literal["a", "b"] | None, 1, "x must be one of ('a', 'b'), got 1."),
        (bool, 1, "x must be True or False, got 1."),
        (str, 1, "x must be a text, got 1."),
        (
            int,
            deep_list(5_000),
            "x must be a whole number, got list too long to show.",
        ),
        (str, Path("a"), f"x must be a text, got {Path('a')!r}."),
        (FileName | None, 1, "x must be a text or a path, got 1."),
        (Path, "a", "x must be a path, got 'a'."),
        (tuple[int, ...], "12", "x must be a sequence, got '12'."),
        (tuple[int, ...], [1, 2.5], "x[1] must be a whole number, got 2.5."),
        (tuple[int, int], [1], "x must be 2 entries, got [1]."),
        (tuple[tuple[Natural, ...], ...], [[0], [0, -1]], "x[1][1] must be at least 0, got -1."),
        (Count | Sequence[Count], [1, 0], "x[1] must be at least 1, got 0."),
        (Count | Sequence[Count], "a", "x must be a whole number or a sequence, got 'a'."),
        (Mapping[int, float], [1], "x must be a mapping, got [1]."),
        (Checked, 3, "x must be of type Checked, got 3."),
        (
            Annotated[Sequence[int], at_most_entries(2)],
            ["a"] * 3,
            "x must be of at most 2 entries, got 3.",
        ),
        (Annotated[Sequence[int], at_most_entries(2)], "abc", "x must be a sequence, got 'abc'."),
        (tuple[tuple[int, ...], ...], [0] * 65, "x[0] must be a sequence, got 0."),
        (tuple[Count, ...], [1] * 64 + [0], "x[64] must be at least 1, got 0."),
        (tuple[int, ...], [1] * 64 + [True], "x[64] must be a whole number, got True."),
        (tuple[Share, ...], [0.5] * 64 + [math.nan], "x[64] must be a finite number, got nan."),
        (PositiveOrInfinite, -math.inf, "x must be above 0, got -inf."),
        (PositiveOrInfinite, math.nan, "x must be a number, got nan."),
        (Splitting, "every", "x must be of type Splitting, got 'every'."),
        (tuple[int, ...], range(10**9), LONG),
        (Count | Sequence[Count], range(10**9), LONG),
        (tuple[tuple[int, ...], ...], [range(10**9)], LONG.replace("x", "x[0]", 1)),
        (tuple[Any, ...], np.broadcast_to(np.int8(0), (2, 5 * 10**8)), LONG),
        (tuple[int, ...], range(10**30), LONG.replace("1000000000", str(sys.maxsize))),
        (
            Annotated[Sequence[int], at_most_entries(2)],
            np.broadcast_to(np.int8(0), 10**9),
            "x must be of at most 2 entries, got 1000000000.",
        ),
        (
            Annotated[Mapping[int, float], at_most_entries(2)],
            dict.fromkeys(range(3), "a"),
            "x must be of at most 2 entries, got 3.",
        ),
        (
            Mapping[Natural, float],
            {**dict.fromkeys(range(65), 1), 65: "a"},
            "x[65] must be a finite number, got 'a'.",
        ),
        (tuple[int, ...], Hostile(), "x must be a sequence, got Hostile that cannot be shown."),
        (Share, Hostile(), "x must be a finite number, got Hostile that cannot be shown."),
        (int, "y" * 200, f"x must be a whole number, got '{'y' * 76}...."),
    ],
)
def test_what_breaks_a_rule_is_said(hint, value, said):
    with pytest.raises(ValueError) as caught:
        checked("x", value, hint)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("hint", "value", "plain"),
    [
        (Count | None, None, None),
        (float, 1, 1.0),
        (float, np.float32(0.5), 0.5),
        (bool, np.True_, True),
        (tuple[int, ...], np.array([1, 2]), (1, 2)),
        (Sequence[Share], [0, 1], (0.0, 1.0)),
        (Count | Sequence[Count], 3, 3),
        (Share | Sequence[Share], np.array([0.5]), (0.5,)),
        (str | Sequence[str], "ab", "ab"),
        (str | Sequence[str], ["a", "b"], ("a", "b")),
        (tuple[int | None, ...], [1] * 65 + [None], (*[1] * 65, None)),
        (Sequence[int], list(np.arange(65)), tuple(range(65))),
        (tuple[Share, ...], [0.5] * 65, (0.5,) * 65),
        (tuple[Share, ...], [*[1] * 65, np.float32(0.5)], (*[1.0] * 65, 0.5)),
        (Mapping[int, Share], {np.int8(i): 1 for i in range(65)}, dict.fromkeys(range(65), 1.0)),
        (PositiveOrInfinite, np.float32(np.inf), math.inf),
        (PositiveOrInfinite, 3, 3.0),
        (FileName, Path("a"), "a"),
        (FileName | None, "a", "a"),
        (Any, [1], [1]),
    ],
)
def test_what_keeps_the_rules_becomes_plain(hint, value, plain):
    found = checked("x", value, hint)
    assert found == plain
    assert type(found) is type(plain)


def test_fields_are_named_with_their_prefix_and_metadata_lists_choices():
    @dataclasses.dataclass(frozen=True)
    class Inner(Checked):
        prefix: ClassVar[str] = "inner."
        size: Annotated[int, at_least(2)] = 2
        kind: str = dataclasses.field(default="a", metadata={"choices": ("a", "b")})

    assert Inner(np.int32(4)) == Inner(4)
    with pytest.raises(ValueError, match=r"^inner\.size must be at least 2, got 1\.$"):
        Inner(1)
    with pytest.raises(ValueError, match=r"^inner\.kind must be one of \('a', 'b'\), got 'c'\.$"):
        Inner(kind="c")


@checks_arguments
def repeated(word: str, /, times: Count = 2, *, between: str | None = None, note: "Any" = 0):
    """Repeats a word."""
    return (between or "").join([word] * times), note


def test_arguments_are_checked_by_their_annotations_and_become_plain():
    assert repeated("ab") == ("abab", 0)
    assert repeated("ab", np.int8(1), note=print) == ("ab", print)
    assert repeated("ab", times=2.0, between="-") == ("ab-ab", 0)
    assert repeated.__doc__ == "Repeats a word."
    assert list(inspect.signature(repeated).parameters) == ["word", "times", "between", "note"]


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((3,), {}, "word must be a text, got 3."),
        (("ab", 1.5), {}, "times must be a whole number, got 1.5."),
        (("ab",), {"times": 0}, "times must be at least 1, got 0."),
        (("ab",), {"between": 1}, "between must be a text, got 1."),
    ],
)
def test_a_wrong_argument_is_named(args, kwargs, said):
    with pytest.raises(ValueError) as caught:
        repeated(*args, **kwargs)
    assert str(caught.value) == said


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("a", 1, "b"), {}), (("a",), {"c": 1})])
def test_what_is_no_argument_is_refused_by_python(args, kwargs):
    with pytest.raises(TypeError, match=r"repeated\(\)"):
        repeated(*args, **kwargs)


def checked_classes():
    """Every dataclass of the package that checks its fields."""
    for module in pkgutil.walk_packages(jaxspec.__path__, "jaxspec."):
        if module.name.rpartition(".")[2].startswith("__"):
            continue
        try:
            loaded = __import__(module.name, fromlist=["_"])
        except ImportError:
            continue  # an extra that is not here
        for _, kind in inspect.getmembers(loaded, inspect.isclass):
            own = kind.__module__ == module.name and issubclass(kind, Checked)
            if own and dataclasses.is_dataclass(kind):
                yield kind


WRONG = (True, 1.5, -1, -0.5, math.nan, math.inf, "text", [1, "a"], 2**40, print)


def believed(kind, field, hint):
    """Yields the wrong values that a field of a class takes though they are not of its type."""
    for wrong in WRONG:
        try:
            value = getattr(kind(**{field: wrong}), field)
        except ValueError as error:
            if not str(error):
                yield wrong, error
            continue
        if hint is not Any and checked("x", value, hint) != value:
            yield wrong, value


def test_no_class_believes_what_its_fields_are_not():
    """Each field by itself, of all classes whose fields have defaults."""
    tried, kinds = 0, list(checked_classes())
    made_unchecked(kinds)
    for kind in kinds:
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = dataclasses.fields(kind)
        needed = [each for each in fields if each.default is each.default_factory]
        for field in () if needed else fields:
            assert list(believed(kind, field.name, hints[field.name])) == [], (kind, field.name)
            tried += 1
    assert tried > 30
