"""JSON schemas: refuses those that a machine over tokens would not hold texts to.

The compiler of schemas reads one keyword of a part, such as `properties` or `anyOf`, with a few
others next to it. The rest it leaves out in silence, and so it does with references past a depth.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

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
# All others that a text can break (JSON Schema 2020-12, and two of draft 7).
_UNREAD = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("uniqueItems", "contains", "minContains", "maxContains"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "not", "if", "$dynamicRef"),
)
# The compiler has no others, or lets characters into them that JSON does not allow.
_FORMATS = ("date", "date-time", "uuid")
_BREAKABLE = {*_READ, *_UNREAD, *(name for names in _READ.values() for name in names)} - {"type"}


def reference_depth(schema: Schema) -> int:
    """Returns the most references that lead from one to the next; 0 without any.

    Args:
        schema: a JSON schema.

    Raises:
        ValueError: it refers to itself or to what is not there, or it has keywords that would not
            be obeyed; the message names the place.

    Example:
        >>> name = {"$defs": {"name": {"type": "string"}}, "$ref": "#/$defs/name"}
        >>> reference_depth(name), reference_depth({"type": "integer"})
        (1, 0)
        >>> reference_depth({"type": "integer", "minimum": 0})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: json_schema: minimum at # cannot be held to; leave it out, or list ...
    """
    known: dict[str, int | None] = {}

    def depth_of(reference: str) -> int:
        if reference not in known:
            known[reference] = None
            known[reference] = 1 + deepest(_referred(schema, reference), reference)
        depth = known[reference]
        if depth is None:
            raise ValueError(
                f"json_schema: {reference} refers to itself, and texts without a bound on their "
                "depth have no machine; write out as many levels as there may be."
            )
        return depth

    def deepest(part: Any, place: str) -> int:
        if not isinstance(part, Mapping):
            return 0
        _check_keywords(part, place)
        depths = [deepest(each, f"{place}/{name}") for name, each in _parts(part)]
        if "$ref" in part:
            depths.append(depth_of(str(part["$ref"])))
        return max(depths, default=0)

    return deepest(schema, "#")


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
    elif form == "allOf" and len(schema["allOf"]) > 1:
        unread.append("allOf")
    if unread:
        raise ValueError(
            f"json_schema: {', '.join(unread)} at {place} cannot be held to; leave it out, or list "
            "the values in an enum."
        )
