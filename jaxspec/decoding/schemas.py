"""JSON schemas: refuses those that a machine over tokens would not hold texts to.

The compiler of schemas reads one keyword of a part, such as `properties` or `anyOf`, with a few
others next to it. The rest it leaves out in silence, and so it does with references past a depth.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from jaxspec.core.checks import Natural, Requirement, checked
from jaxspec.decoding.patterns import size_of_pattern

Schema = Mapping[str, Any]

# Keywords in the order in which the compiler looks for them, and those that it reads next to one.
_READ: dict[str, tuple[str, ...]] = {
    "properties": ("required", "additionalProperties"),
    "allOf": (),
    "anyOf": (),
    "oneOf": (),
    "prefixItems": ("items", "minItems", "maxItems"),
    "enum": (),
    "const": (),
    "$ref": (),
    "type": (
        *("items", "minItems", "maxItems", "additionalProperties"),
        *("minLength", "maxLength", "pattern", "format"),
    ),
}
# Values of those that the compiler would read as something else, or as nothing.
_Listed = Annotated[Sequence[Any], Requirement("a list with an entry at least", bool)]
_Type = Literal["string", "number", "integer", "boolean", "array", "object", "null"]
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems")
_VALUES: dict[str, Any] = {
    **dict.fromkeys(_LENGTHS, Natural),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
    **dict.fromkeys(("items", "additionalProperties"), bool | dict),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), _Listed),
    "properties": dict,
    "required": Sequence[str],
    "type": _Type | Annotated[Sequence[_Type], Requirement("a list with an entry at least", bool)],
}
# All others that a text can break (JSON Schema 2020-12, and two of draft 7).
_UNREAD = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("uniqueItems", "contains", "minContains", "maxContains"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "not", "if", "$dynamicRef"),
)
# The compiler has no others, or lets characters into them that JSON does not allow.
_FORMATS = ("date", "date-time", "uuid")
_FREE_PARTS = 1500  # of arrays and objects of whatever kind
_MOST_PARTS = 100_000
_BREAKABLE = {*_READ, *_UNREAD, *(name for names in _READ.values() for name in names)} - {"type"}


class SchemaSize(NamedTuple):
    """Parts of a schema that make its machine large.

    Attributes:
        depth: the most references that lead from one to the next; 0 without any.
        parts: characters and classes of its regular expression, if references, repetitions and
            optional properties are written out.
        patterns: its own regular expressions, by their places.
    """

    depth: int
    parts: int
    patterns: Mapping[str, str]


def size_of_schema(schema: Schema) -> SchemaSize:
    """Estimates the size of a JSON schema.

    Args:
        schema: a JSON schema.

    Raises:
        ValueError: it refers to itself or to what is not there, it has keywords that would not be
            obeyed, or it is too large; the message names the place.

    Example:
        >>> name = {"$defs": {"name": {"type": "string"}}, "$ref": "#/$defs/name"}
        >>> size_of_schema(name).depth, size_of_schema({"type": "integer"}).depth
        (1, 0)
        >>> size_of_schema({"type": "integer", "minimum": 0})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: json_schema: minimum at # cannot be held to; leave it out, or list ...
    """
    known: dict[str, SchemaSize | None] = {}
    patterns: dict[str, str] = {}

    def referred(reference: str) -> SchemaSize:
        if reference not in known:
            known[reference] = None
            size = measured(_referred(schema, reference), reference)
            known[reference] = size._replace(depth=1 + size.depth)
        size = known[reference]
        if size is None:
            raise ValueError(
                f"json_schema: {reference} refers to itself, and texts without a bound on their "
                "depth have no machine; write out as many levels as there may be."
            )
        return size

    def measured(part: Any, place: str) -> SchemaSize:
        if not isinstance(part, Mapping):
            return SchemaSize(0, 0, patterns)
        _check_values(part, place)
        _check_keywords(part, place)
        if "pattern" in part:
            patterns[f"pattern at {place}"] = part["pattern"]
        within = [measured(each, f"{place}/{name}") for name, each in _parts(part)]
        if "$ref" in part:
            within.append(referred(part["$ref"]))
        parts = _copies(part) * (_own_parts(part) + sum(size.parts for size in within))
        if parts > _MOST_PARTS:
            raise ValueError(
                f"json_schema: {place} has {parts} parts, if repetitions, references and optional "
                f"properties are written out, and at most {_MOST_PARTS} are possible; make "
                "maxLength and maxItems smaller, or more properties required."
            )
        depth = max((size.depth for size in within), default=0)
        return SchemaSize(depth, parts, patterns)

    try:
        return measured(schema, "#")
    except RecursionError:
        raise ValueError(
            "json_schema: hundreds of references lead from one to the next; write out some of them."
        ) from None


def _copies(schema: Schema) -> int:
    """Returns how often the expression of a schema holds those of the schemas within it."""
    counts = [int(schema[name]) for name in _LENGTHS if name in schema]
    # Any of the optional properties may be the first.
    optional = 0 if schema.get("required") else len(schema.get("properties", ()))
    return max(1, optional, *counts)


def _own_parts(schema: Schema) -> int:
    """Returns the parts of a schema itself."""
    if "pattern" in schema:
        return size_of_pattern(schema["pattern"]).parts
    if any(name in schema for name in ("enum", "const", "properties")):
        listed = (schema.get(name) for name in ("enum", "const"))
        return len(_quoted([*listed, *schema.get("properties", ())]))
    if any(name in schema for name in _READ if name != "type"):
        return 0
    kinds = schema.get("type", ("array", "object"))
    free = {"array": "items", "object": "additionalProperties"}
    return sum(
        _FREE_PARTS if free.get(kind, kind) not in {*schema, kind} else 10
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
    )


def _parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yields the schemas within a schema, with their places in it."""
    for name in ("items", "additionalProperties"):
        yield name, schema.get(name)
    for name in ("properties", "prefixItems", "allOf", "anyOf", "oneOf"):
        within = schema.get(name)
        pairs = within.items() if isinstance(within, Mapping) else enumerate(within or ())
        yield from ((f"{name}/{key}", each) for key, each in pairs)


def _referred(schema: Schema, reference: str) -> Any:
    part: Any = schema if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        part = part.get(step) if isinstance(part, Mapping) else None
    if part is None:
        raise ValueError(
            f"json_schema: it refers to {reference}, which is not in it; put that into its $defs."
        )
    return part


_quoted = partial(json.dumps, ensure_ascii=False)


def with_whole_lengths(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns one part of a schema whose lengths are integers: 3.0 is one, but for the compiler."""
    return {
        name: int(value)
        if name in _LENGTHS and isinstance(value, float) and value.is_integer()
        else value
        for name, value in schema.items()
    }


def _check_values(schema: Schema, place: str) -> None:
    """Refuses values of one part's keywords that JSON Schema does not know."""
    for name, hint in _VALUES.items():
        if name in schema:
            checked(f"json_schema: {name} at {place}", schema[name], hint)
    for least, most in (_LENGTHS[:2], _LENGTHS[2:]):
        if schema.get(least, 0) > schema.get(most, math.inf):
            raise ValueError(
                f"json_schema: {least} at {place} must be at most its {most}, {schema[most]}, got "
                f"{schema[least]}."
            )


def _check_keywords(schema: Schema, place: str) -> None:
    """Refuses keywords of one part that would not be obeyed."""
    form = next((name for name in _READ if name in schema), "type")
    unread = [name for name in schema if name in _BREAKABLE - {form, *_READ[form]}]
    if form == "type":
        # Of these the first counts.
        kinds = (("minLength", "maxLength"), ("pattern",), ("format",))
        given = [kind for kind in kinds if any(name in schema for name in kind)]
        unread += [name for kind in given[1:] for name in kind]
        if "string" in schema.get("type", ()) and schema.get("format", "date") not in _FORMATS:
            unread.append(f"format ({schema['format']})")
    elif form == "properties":
        lacking = {*schema.get("required", ())} - {*schema["properties"]}
        unread += [f"required ({', '.join(sorted(lacking))})"] if lacking else []
        # Names are not escaped.
        names = schema["properties"]
        unread += [f"the name {name!r}" for name in names if f'"{name}"' != _quoted(name)]
    elif form == "prefixItems":
        # The compiler writes each of them, and no more.
        count = len(schema["prefixItems"])
        unread += ["minItems"] if schema.get("minItems", 0) > count else []
        unread += ["maxItems"] if schema.get("maxItems", count) < count else []
    elif form == "allOf" and len(schema["allOf"]) > 1:
        unread.append("allOf")
    if unread:
        raise ValueError(
            f"json_schema: {', '.join(unread)} at {place} cannot be held to; leave it out, or list "
            "the values in an enum."
        )
