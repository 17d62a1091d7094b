"""Command-line flags made from the fields of a settings dataclass.

A field gives one flag, `--learning-rate` for `learning_rate`. Its type and default are the field's,
its help is the field's entry in the `Attributes:` block of the docstring. The metadata of a field
may give another spelling ("flag"; `None`: no flag), the values to choose from ("choices") and the
name of the value in the help ("metavar"). A flag that is left out sets nothing.
"""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

_DEST = "settings"


def add_flags(
    group: Any,
    settings: type,
    fields: Collection[str] | None = None,
    *,
    section: str = "",
    spelled: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Declares the flags of a settings dataclass.

    A field of a type that no flag can hold has a flag only if its metadata names one; its value is
    then a text.

    Args:
        group: parser or group of a parser.
        settings: the dataclass.
        fields: names of the fields; `None`: all.
        section: name under which `given` returns the values; "": at the top.
        spelled: spellings of flags by field, for dataclasses without metadata.
        defaults: defaults that the help shows, by field, where the command has its own.

    >>> @dataclasses.dataclass
    ... class Fit:
    ...     '''Settings of a fit.
    ...
    ...     Attributes:
    ...         num_steps: number of updates.
    ...     '''
    ...
    ...     num_steps: int = 100
    >>> parser = argparse.ArgumentParser()
    >>> add_flags(parser, Fit)
    >>> given(parser.parse_args(["--num-steps", "3"]))
    {'num_steps': 3}
    """
    hints, texts = typing.get_type_hints(settings), help_texts(settings)
    for field in dataclasses.fields(settings):
        flag = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
        flag = (spelled or {}).get(field.name, flag)
        options = _options(hints[field.name], named="flag" in field.metadata)
        if flag is None or options is None or (fields is not None and field.name not in fields):
            continue
        default = (defaults or {}).get(field.name, field.default)
        text = texts.get(field.name, "")
        if isinstance(default, int | float | str):
            shown = ("no", "yes")[default] if isinstance(default, bool) else default
            text += f" (default: {shown})"
        options |= {name: value for name, value in field.metadata.items() if name != "flag"}
        if "choices" in options:
            options.pop("metavar", None)
        dest = ".".join(filter(None, (_DEST, section, field.name)))
        group.add_argument(flag, dest=dest, default=None, help=text.replace("%", "%%"), **options)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the flags that are given, by field; those of a section in a mapping."""
    values: dict[str, Any] = {}
    for dest, value in vars(args).items():
        if value is not None and dest.startswith(f"{_DEST}."):
            _, *section, name = dest.split(".")
            place = values.setdefault(section[0], {}) if section else values
            place[name] = value
    return values


def flag_of(settings: type, field: str) -> str:
    """Returns the flag of a field with the name of its value, such as `--target FOLDER`."""
    (entry,) = (entry for entry in dataclasses.fields(settings) if entry.name == field)
    flag = entry.metadata.get("flag", "--" + field.replace("_", "-"))
    return f"{flag} {entry.metadata.get('metavar', 'VALUE')}"


def help_texts(settings: type) -> dict[str, str]:
    """Returns the entries of the `Attributes:` blocks of a class and its bases, by field."""
    texts: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        _, _, block = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")
        block = re.split(r"\n(?! )", block)[0] if block.startswith(" ") else ""
        for entry in re.split(r"^ {4}(?=\w)", block, flags=re.MULTILINE)[1:]:
            name, _, text = entry.partition(":")
            texts[name] = (
                " ".join(text.split()).replace("`None`", "left out").replace("`", "").rstrip(".")
            )
    return texts


def whole_numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list such as `0,1,2`."""
    return tuple(int(part) for part in text.split(","))


def _options(hint: Any, named: bool) -> dict[str, Any] | None:
    """Returns the options of a flag for a type; `None`: no flag can hold it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint, *others = (kind for kind in typing.get_args(hint) if kind is not type(None))
        hint = None if others else hint
    known: dict[Any, dict[str, Any]] = {
        bool: {"action": argparse.BooleanOptionalAction},
        int: {"type": int, "metavar": "N"},
        float: {"type": float, "metavar": "X"},
        str: {"metavar": "TEXT"},
        tuple[int, ...]: {"type": whole_numbers, "metavar": "N,..."},
    }
    return dict(known[hint]) if hint in known else ({"metavar": "TEXT"} if named else None)
