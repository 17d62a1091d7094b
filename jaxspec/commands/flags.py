"""Command-line flags made from the fields of a settings dataclass.

A field gives one flag, `--learning-rate` for `learning_rate`. Its type and default are the field's,
its help is the field's entry in the `Attributes:` block of the docstring. The metadata of a field
may give another spelling ("flag"; `None`: no flag) and any argument of `add_argument`, such as
"choices" or "metavar"; "default" is only shown. A flag that is left out sets nothing.
"""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

_ALIASES = {"--max-new-tokens": ("--max-tokens",)}
"""Shorter spellings of flags, for all commands."""


def add_flags(
    group: Any,
    settings: type,
    fields: Collection[str] | None = None,
    *,
    section: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Declares the flags of a settings dataclass.

    A field of a type that no flag can hold has a flag only if it has metadata; without a "type"
    there, its value is a text.

    Args:
        group: parser or group of a parser.
        settings: the dataclass.
        fields: names of the fields; `None`: all.
        section: the same as for `given`, which tells fields of one name apart; "": none.
        options: metadata by field, over that of the dataclass.

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
    >>> given(parser.parse_args(["--num-steps", "3"]), Fit)
    {'num_steps': 3}
    """
    hints, texts = typing.get_type_hints(settings), help_texts(settings)
    for field in dataclasses.fields(settings):
        stated = {**field.metadata, **(options or {}).get(field.name, {})}
        kind = _options(hints[field.name], bool(stated))
        flag = stated.pop("flag", "--" + field.name.replace("_", "-"))
        if flag is None or kind is None or (fields is not None and field.name not in fields):
            continue
        default = _shown(stated.pop("default", field.default))
        text = stated.pop("help", texts.get(field.name, "") + default)
        kind |= stated
        if "choices" in kind:
            kind.pop("metavar", None)
        dest = _dest(section, field)
        flags = (flag, *_ALIASES.get(flag, ()))
        group.add_argument(*flags, dest=dest, default=None, help=text.replace("%", "%%"), **kind)


def given(args: argparse.Namespace, settings: type, section: str = "") -> dict[str, Any]:
    """Returns the values of the flags of a dataclass that are given, by field."""
    values = {
        field.name: getattr(args, _dest(section, field), None)
        for field in dataclasses.fields(settings)
    }
    return {name: value for name, value in values.items() if value is not None}


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


def _dest(section: str, field: dataclasses.Field) -> str:
    return f"{section}.{field.name}" if section else field.name


def _shown(default: Any) -> str:
    """Returns the end of a help text that names the default; "" where none can be named."""
    if isinstance(default, tuple) and all(isinstance(part, int) for part in default):
        default = ",".join(map(str, default)) or None
    if isinstance(default, bool):
        default = ("no", "yes")[default]
    if isinstance(default, float):
        default = f"{default:g}"
    return f" (default: {default})" if isinstance(default, int | str) else ""


def _options(hint: Any, named: bool) -> dict[str, Any] | None:
    """Returns the options of a flag for a type; `None`: no flag can hold it."""
    known: dict[Any, dict[str, Any]] = {
        bool: {"action": argparse.BooleanOptionalAction},
        int: {"type": int, "metavar": "N"},
        float: {"type": float, "metavar": "X"},
        str: {"metavar": "TEXT"},
        tuple[int, ...]: {"type": whole_numbers, "metavar": "N,..."},
    }
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    held = [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind in known]
    return dict(known[held[0]]) if held else ({"metavar": "TEXT"} if named else None)
