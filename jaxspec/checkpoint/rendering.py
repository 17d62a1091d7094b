"""The program that renders chat templates, in a process of its own: see `templates`.

It imports nothing of the package.
"""

import datetime
import functools
import json
import sys
from collections.abc import Mapping, Sized
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.sandbox
import jinja2.utils

_LONGEST = 1 << 26  # characters of a result
_SAID = 300  # characters of a template's own message


@functools.lru_cache(maxsize=32)
def _compiled(source: str):
    class _Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant said, for training; it prints its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PublicNamespace(jinja2.utils.Namespace):
        """Refuses the attributes that Python gives a meaning, which Jinja's own stores.

        Filters call `__html__` of what they are given, past the sandbox's check of calls.
        """

        def __init__(self, **values):
            super().__init__()
            for name, value in values.items():
                self[name] = value

        def __setitem__(self, name, value):
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is refused.")
            super().__setitem__(name, value)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Refuses products and powers that are too large before they are computed."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context, operator, left, right):
            swapped = operator == "*" and isinstance(left, int)
            value, times = (right, left) if swapped else (left, right)
            if operator == "*":
                size = len(value) if isinstance(value, Sized) else 0
            else:
                size = value.bit_length() if isinstance(value, int) else 0
            if isinstance(times, int) and size * times > _LONGEST:
                raise OverflowError
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes HTML, which no model was trained on.
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace
    )
    return environment.from_string(source)


def _line_of(error: BaseException) -> int | None:
    """Returns the line of the template in which an error was raised."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


class _TooLong(Exception):
    """A template makes too much."""

    def __init__(self, line: int):
        super().__init__(f"it makes more than {_LONGEST} characters")
        self.lineno = line


def _rendered(template: Any, variables: Mapping[str, Any]) -> str:
    pieces, size = [], 0
    stream = template.generate(variables)
    for piece in stream:
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST:
            place = stream.gi_yieldfrom.gi_frame.f_lineno
            raise _TooLong(template.get_corresponding_lineno(place))
    return "".join(pieces)


@functools.lru_cache(maxsize=1)
def _noted(source: str) -> Any:
    """Returns the template of a source; its lines are noted for `templates`, should it end here."""
    _note([])
    template = _compiled(source)
    _note(template.debug_info)
    return template


def _note(lines: list[tuple[int, int]]) -> None:
    sys.stderr.seek(0)
    sys.stderr.truncate()
    sys.stderr.write(json.dumps(lines) + "\n")
    sys.stderr.flush()


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the text that `source` makes of `variables`, or why there is none."""
    try:
        return {"text": _rendered(_noted(question["source"]), question["variables"])}
    except (MemoryError, RecursionError, OverflowError) as error:
        said = f"it goes too far ({type(error).__name__})"
        return {"error": said, "refused": True, "line": _line_of(error)}
    except _TooLong as error:
        return {"error": str(error), "refused": True, "line": error.lineno}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:_SAID], "refused": True, "line": _line_of(error)}
    except Exception as error:
        return {"error": repr(error)[:_SAID], "refused": False, "line": _line_of(error)}
