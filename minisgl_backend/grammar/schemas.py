"""JSON schemas in words that llguidance enforces: another schema that the same values follow.

- A keyword that constrains nothing, such as ``uniqueItems: false``, is left out.
- ``oneOf`` whose alternatives exclude each other is ``anyOf``. llguidance finds that out by itself
  only if no alternative is a ``$ref``.
- ``propertyNames`` that lists names, or has a pattern, is ``properties`` or ``patternProperties``.

What else llguidance does not enforce stays, for it to refuse. Must not know where a schema stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

NAMES: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose objects have names in place of keywords."""
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS: Final = ("items", "additionalItems", "additionalProperties")
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment"}
)
_STRING: Final = {"type": "string"}
_ANY_TEXT: Final = frozenset({"binary", "password", "path", "file-path", "directory-path"})
"""Formats that say what a text is for: those of OpenAPI and of pydantic."""
_ANYTHING: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MOST_DEPTH: Final = 128
"""Beyond that llguidance reads no JSON."""
_MOST_STEPS: Final = 8
"""From a schema to a property that tells it from another, by references and nested objects."""


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that the same values follow, in words that are enforced as far as there are any."""
    return _plain(schema, schema, _MOST_DEPTH)


def says_nothing(key: str, schema: Schema) -> bool:
    """Whether a keyword of the schema constrains nothing, whatever the value."""
    given = schema[key]
    if key == "uniqueItems":
        return given is False
    if key in ("unevaluatedItems", "unevaluatedProperties"):
        return _is_true(given)
    if key == "propertyNames":  # which are strings
        return _is_true(given) or (isinstance(given, dict) and _without_notes(given) == _STRING)
    return key == "format" and isinstance(given, str) and given in _ANY_TEXT


def _plain(schema: dict[str, Any], root: Schema, depth: int) -> dict[str, Any]:
    if depth == 0 or (schema is not root and "$id" in schema):  # its references have another root
        return schema
    found = {
        key: _inside(key, value, root, depth - 1)
        for key, value in schema.items()
        if not says_nothing(key, schema)
    }
    if "propertyNames" in found:
        found = _with_names(found, root)
    alternatives = found.get("oneOf")
    if not found.keys() & {"anyOf", "discriminator"} and _exclude_each_other(alternatives, root):
        found["anyOf"] = found.pop("oneOf")
    return found


def _inside(key: str, value: Any, root: Schema, depth: int) -> Any:
    """What stands behind a keyword, with its schemas made plain."""
    if isinstance(value, dict):
        if key in NAMES:
            return {
                name: _plain(one, root, depth) if isinstance(one, dict) else one
                for name, one in value.items()
            }
        if key in _SCHEMAS:
            return _plain(value, root, depth)
    elif isinstance(value, list) and key in _LISTS:
        return [_plain(one, root, depth) if isinstance(one, dict) else one for one in value]
    return value


def _with_names(schema: dict[str, Any], root: Schema) -> dict[str, Any]:
    """The schema with its ``propertyNames`` as properties, if that can be said so."""
    others = schema.get("additionalProperties", True)
    properties = schema.get("properties", {})
    names = _without_notes(_resolved(schema["propertyNames"], root))
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if "patternProperties" in schema or not isinstance(properties, dict):
        return schema
    if (listed := _literals(names)) is not None and names.keys() <= {"type", "enum", "const"}:
        known = [name for name in listed if isinstance(name, str)]
        return {
            **rest,
            "properties": {
                **{name: one for name, one in properties.items() if name in known},
                **{name: others for name in known if name not in properties},
            },
            "additionalProperties": False,
        }
    if "pattern" in names and names.keys() <= {"type", "pattern"} and not properties:
        by_pattern = {"patternProperties": {names["pattern"]: others}}
        return {**rest, **by_pattern, "additionalProperties": False}
    return schema


def _exclude_each_other(alternatives: Any, root: Schema) -> bool:
    return isinstance(alternatives, list) and all(
        _exclude(one, other, root, _MOST_STEPS) for one, other in combinations(alternatives, 2)
    )


def _exclude(one: Any, other: Any, root: Schema, steps: int) -> bool:
    """Whether it is plain to see that no value follows both."""
    if steps == 0:
        return False
    one, other = _resolved(one, root), _resolved(other, root)
    if not _types(one) & _types(other):
        return True
    literals, others = _literals(one), _literals(other)
    if literals is not None and others is not None:
        return not any(value in others for value in literals)
    if not _types(one) == _types(other) == {"object"}:
        return False
    properties, required = _object(one, "properties"), _names(one)
    more_properties, more_required = _object(other, "properties"), _names(other)
    return (
        any(name not in more_properties for name in required if _is_closed(other))
        or any(name not in properties for name in more_required if _is_closed(one))
        or any(
            _exclude(properties[name], more_properties[name], root, steps - 1)
            for name in required | more_required
            if name in properties and name in more_properties
        )
    )


def _resolved(schema: Any, root: Schema) -> Schema:
    """What a schema refers to, and what it adds to that; {} if that is not known."""
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, dict):
            break
        if "$ref" not in schema:
            return schema
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        found = _at(schema["$ref"], root)
        schema = {**found, **beside} if isinstance(found, dict) else found
    return {}


def _at(pointer: Any, root: Schema) -> Any:
    """What lies at ``#/...``; None if nothing does."""
    if not (isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))):
        return None
    found: Any = root
    for step in pointer.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _types(schema: Schema) -> frozenset[str]:
    """The types of the values that may follow it; integers are numbers."""
    given = schema.get("type", ())
    named = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    types = frozenset("number" if name == "integer" else name for name in named) or _ANYTHING
    if (literals := _literals(schema)) is not None:
        types &= frozenset(map(_type, literals))
    return types


def _type(value: Any) -> str:
    """JSON's name of a value's type."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


def _literals(schema: Schema) -> list[Any] | None:
    """The only values that may follow it; None if they are not listed."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _object(schema: Schema, key: str) -> Schema:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _names(schema: Schema) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if required else set()


def _is_closed(schema: Schema) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _is_true(schema: Any) -> bool:
    return schema is True or schema == {}


def _without_notes(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
