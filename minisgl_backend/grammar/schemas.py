"""Rewrites JSON schemas into equivalent ones whose keywords llguidance enforces.

- A keyword that constrains nothing, such as ``uniqueItems: false``, is left out, and so is one that
  ``is_changed``: if all keywords must be enforced, ``sources`` refuses it.
- ``oneOf`` becomes ``anyOf`` if its alternatives exclude each other. llguidance does not see that
  by itself if they are behind a ``$ref``.
- ``propertyNames`` that lists names, or has a pattern, becomes ``properties`` or
  ``patternProperties``.
- An exclusive bound becomes an inclusive one at a number next to it, if the other bound is less
  than 1 away and further from 0: llguidance then lets a bound that is a whole number through.
- Negated classes of patterns exclude NUL: if one such as ``[^"]`` does not, llguidance takes an
  escaped quote or backslash for one of its characters, whether it is one or not.

Anything else that llguidance does not enforce stays, for it to refuse, unless it is to be left out
(``without_look_around``; llguidance itself leaves out keywords). Must not know where a schema
is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

DEFINITIONS: Final = ("$defs", "definitions")
ANYWHERE: Final = frozenset({"type", "$schema", *DEFINITIONS})
"""Keywords beside which any others of a type may stand."""
NAMES: Final = ("properties", "patternProperties", *DEFINITIONS)
"""Keywords whose objects have names in place of keywords."""
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose values are lists of schemas."""
FURTHER: Final = ("additionalItems", "additionalProperties")
"""Keywords whose values are schemas for what other keywords do not name."""
DATA: Final = ("const", "enum", "default", "examples")
"""Keywords whose values are data, in which nothing is a keyword."""
NOT_NUL: Final = r"[^\x00"
"""How the negated classes of rewritten patterns begin."""
_NEGATED: Final = re.compile(r"\\.|\[\^(?!\])(?P<hyphen>-?)", re.DOTALL)
"""An escaped character, or the beginning of a negated class; one that begins with ``]`` stays."""
_LOOKS_AROUND: Final = re.compile(
    r"(?P<does>\(\?<?[=!]|\\[1-9k])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL
)
"""What looks around or back in a pattern; or an escaped character or a class, in which nothing
does."""
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment"}
)
_EXACT: Final = ("enum", "const", "pattern")
_STRING: Final = {"type": "string"}
_ANY_TEXT: Final = frozenset({"binary", "password", "path", "file-path", "directory-path"})
"""Formats that say what a text is for: those of OpenAPI and of pydantic."""
_OBJECT: Final = frozenset({"object"})
_ANYTHING: Final = _OBJECT | {"null", "boolean", "number", "string", "array"}
_LEAST: Final = 1e-15
_LEAST_SHARE: Final = 1e-13
"""The least distance from a bound, absolute and as a share of the bound: llguidance reads no number
with hundreds of digits, and rounds others."""
_MOST_DEPTH: Final = 128
"""llguidance reads no JSON that is nested more deeply."""
MOST_STEPS: Final = 8
"""The most references in a row that are followed."""


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """An equivalent schema, in keywords that are enforced as far as possible."""
    return _plain(schema, schema, _MOST_DEPTH)


def without_look_around(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the patterns that look around or back, which llguidance cannot match."""
    found: dict[str, Any] = _not_looking(schema, has_keywords=True)
    return found


def _not_looking(value: Any, has_keywords: bool) -> Any:
    """A schema or, unless it ``has_keywords``, schemas by name, or a list of either."""
    if isinstance(value, list):
        return [_not_looking(one, has_keywords) for one in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if has_keywords and key == "pattern" and _looks_around(inner):
            continue
        if has_keywords and key == "patternProperties" and isinstance(inner, dict):
            inner = {name: one for name, one in inner.items() if not _looks_around(name)}
        is_data = has_keywords and key in DATA
        found[key] = inner if is_data else _not_looking(inner, not has_keywords or key not in NAMES)
    return found


def _looks_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and any(
        found["does"] for found in _LOOKS_AROUND.finditer(pattern)
    )


def says_nothing(key: str, schema: Schema) -> bool:
    """Whether a keyword of the schema constrains nothing, whatever the value."""
    given = schema[key]
    if key == "uniqueItems":
        return given is False
    if key in ("unevaluatedItems", "unevaluatedProperties"):
        return _is_true(given)
    if key == "propertyNames":  # names are strings
        return _is_true(given) or (isinstance(given, dict) and without_notes(given) == _STRING)
    return key == "format" and isinstance(given, str) and given in _ANY_TEXT


def is_changed(key: str, value: Any) -> bool:
    """Whether a keyword lists an integer that llguidance, which reads floats, would change."""
    return key in ("const", "enum") and any(
        _is_rounded(number) for number in _numbers(value) if isinstance(number, int)
    )


def is_beyond_floats(key: str, value: Any) -> bool:
    """Whether a keyword has a number that is too large for a float: llguidance reads none."""
    is_data = key in DATA or not isinstance(value, dict | list)
    return is_data and any(map(_is_beyond_floats, _numbers(value)))


def _numbers(value: Any) -> Iterator[int | float]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int | float):
            yield one
        elif isinstance(one, list | dict):
            waiting += one.values() if isinstance(one, dict) else one


def _is_beyond_floats(number: float) -> bool:
    try:
        return math.isinf(float(number))
    except OverflowError:
        return True


def _is_rounded(integer: int) -> bool:
    """Whether no float has this value."""
    try:
        return int(float(integer)) != integer
    except OverflowError:
        return True


def _plain(schema: dict[str, Any], root: Schema, depth: int) -> dict[str, Any]:
    if depth == 0 or (schema is not root and "$id" in schema):  # its references have another root
        return schema
    found = {
        key: _inside(key, value, root, depth - 1)
        for key, value in schema.items()
        if not (says_nothing(key, schema) or is_changed(key, value))
    }
    if "propertyNames" in found:
        found = _with_names(found, root)
    found = _with_near_bounds(found)
    alternatives = found.get("oneOf")
    if not found.keys() & {"anyOf", "discriminator"} and _exclude_each_other(alternatives, root):
        found["anyOf"] = found.pop("oneOf")
    return found


def without_nul(pattern: str) -> str:
    """The pattern, with NUL excluded from its negated classes."""
    return _NEGATED.sub(
        lambda found: found[0] if found[0][0] == "\\" else NOT_NUL + "\\-" * len(found["hyphen"]),
        pattern,
    )


def _inside(key: str, value: Any, root: Schema, depth: int) -> Any:
    """A keyword's value, with its schemas and patterns made plain."""
    if key == "pattern" and isinstance(value, str):
        return without_nul(value)
    if isinstance(value, dict):
        if key in NAMES:
            spelled = without_nul if key == "patternProperties" else str
            return {
                spelled(name): _plain(one, root, depth) if isinstance(one, dict) else one
                for name, one in value.items()
            }
        if key == "items" or key in FURTHER:
            return _plain(value, root, depth)
    elif isinstance(value, list) and (key == "items" or key in LISTS):
        return [_plain(one, root, depth) if isinstance(one, dict) else one for one in value]
    return value


def _with_names(schema: dict[str, Any], root: Schema) -> dict[str, Any]:
    """The schema with its ``propertyNames`` as properties, if they can be expressed so."""
    others = schema.get("additionalProperties", True)
    properties = schema.get("properties", {})
    names = without_notes(_resolved(schema["propertyNames"], root))
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if "patternProperties" in schema or not isinstance(properties, dict):
        return schema
    if (listed := literals(names)) is not None and names.keys() <= {"type", "enum", "const"}:
        known = [name for name in listed if isinstance(name, str)]
        return {
            **rest,
            "properties": {
                **{name: one for name, one in properties.items() if name in known},
                **{name: others for name in known if name not in properties},
            },
            "additionalProperties": False,
        }
    is_pattern = isinstance(names.get("pattern"), str) and names.keys() <= {"type", "pattern"}
    if is_pattern and not properties:
        by_pattern = {"patternProperties": {without_nul(names["pattern"]): others}}
        return {**rest, **by_pattern, "additionalProperties": False}
    return schema


def _with_near_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the exclusive bound that is nearer to 0, if it is a whole number and the
    other one is near."""
    low = _bounds(schema, "minimum", "exclusiveMinimum")
    high = _bounds(schema, "maximum", "exclusiveMaximum")
    if not (low and high) or min(high.values()) - max(low.values()) >= 1:
        return schema
    found = dict(schema)
    for exclusive, inclusive, tighter, sign in (
        ("exclusiveMinimum", "minimum", max, 1),
        ("exclusiveMaximum", "maximum", min, -1),
    ):
        bound = {**low, **high}.get(exclusive)
        if bound is not None and float(bound).is_integer() and sign * bound >= 0:
            del found[exclusive]
            beside = bound + sign * max(_LEAST, _LEAST_SHARE * abs(bound))
            found[inclusive] = tighter(beside, found.get(inclusive, beside))
    return found


def _bounds(schema: Schema, *keys: str) -> dict[str, float]:
    """The keywords among ``keys`` whose values are numbers so small that floats are exact."""
    given = {key: schema[key] for key in keys if key in schema}
    return {
        key: bound
        for key, bound in given.items()
        if isinstance(bound, int | float) and not isinstance(bound, bool) and abs(bound) < 2**53
    }


def _exclude_each_other(alternatives: Any, root: Schema) -> bool:
    """Whether no value is valid for two of the alternatives, and a reference hides that from
    llguidance."""
    if not (isinstance(alternatives, list) and any(map(_is_reference, alternatives))):
        return False
    known = [_Alternative.of(schema, root) for schema in alternatives]
    return all(one.excludes(other) for one, other in combinations(known, 2))


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and "$ref" in schema


@dataclass(frozen=True, slots=True)
class _Values:
    """The valid values of a schema: their types, where an integer is a number, and all of them if
    they are listed."""

    types: frozenset[str]
    listed: frozenset[tuple[str, Any]] | None

    @classmethod
    def of(cls, schema: Any, root: Schema) -> _Values:
        schema = _resolved(schema, root)
        given = schema.get("type")
        named = given if isinstance(given, list) else [given]
        texts = [name for name in named if isinstance(name, str)]
        types = frozenset("number" if name == "integer" else name for name in texts)
        given_values = literals(schema)
        if given_values is None:
            return cls(types or _ANYTHING, None)
        listed = frozenset(map(_comparable, given_values))
        return cls((types or _ANYTHING) & {kind for kind, _ in listed}, listed)

    def exclude(self, other: _Values) -> bool:
        if self.types.isdisjoint(other.types):
            return True
        return (
            self.listed is not None
            and other.listed is not None
            and self.listed.isdisjoint(other.listed)
        )


@dataclass(frozen=True, slots=True)
class _Alternative:
    """One of several schemas. ``is_closed``: its values have no properties but ``properties``."""

    values: _Values
    properties: Mapping[str, _Values]
    required: frozenset[str]
    is_closed: bool

    @classmethod
    def of(cls, schema: Any, root: Schema) -> _Alternative:
        schema = _resolved(schema, root)
        properties, required = schema.get("properties"), schema.get("required")
        return cls(
            _Values.of(schema, root),
            {name: _Values.of(one, root) for name, one in properties.items()}
            if isinstance(properties, dict)
            else {},
            frozenset(name for name in required if isinstance(name, str))
            if isinstance(required, list)
            else frozenset(),
            schema.get("additionalProperties") is False and "patternProperties" not in schema,
        )

    def excludes(self, other: _Alternative) -> bool:
        """Whether it is evident that no value is valid for both."""
        if self.values.exclude(other.values):
            return True
        if not self.values.types == other.values.types == _OBJECT:
            return False
        required, both = self.required | other.required, self.properties.keys() & other.properties
        return (
            (self.is_closed and not required <= self.properties.keys())
            or (other.is_closed and not required <= other.properties.keys())
            or any(
                self.properties[name].exclude(other.properties[name]) for name in required & both
            )
        )


def _resolved(schema: Any, root: Schema) -> Schema:
    """What a schema refers to, together with what it adds to that; {} if that is not known."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, dict):
            break
        if "$ref" not in schema:
            return schema
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        found = at(schema["$ref"], root)
        schema = _together(found, beside) if isinstance(found, dict) else found
    return {}


def _together(one: Schema, other: Schema) -> Schema:
    """A schema that every value follows that follows both; if both have a keyword, ``other`` wins.
    {} if their listed values, or their patterns, differ."""
    if any(key in one and key in other and one[key] != other[key] for key in _EXACT):
        return {}
    both = {**one, **other}
    if isinstance(one.get("properties"), dict) and isinstance(other.get("properties"), dict):
        both["properties"] = {**one["properties"], **other["properties"]}
    if isinstance(one.get("required"), list) and isinstance(other.get("required"), list):
        both["required"] = [*one["required"], *other["required"]]
    return both


def at(pointer: Any, root: Schema) -> Any:
    """What is at ``#/...``; None if nothing is."""
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


def _comparable(value: Any) -> tuple[str, Any]:
    """A value with JSON's name for its type: pairs are equal if their values are equal in JSON."""
    if value is None:
        return "null", None
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name, value
    return "array" if isinstance(value, list) else "object", json.dumps(value, sort_keys=True)


def literals(schema: Schema) -> list[Any] | None:
    """The only valid values; None if the schema does not list them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _is_true(schema: Any) -> bool:
    return schema is True or schema == {}


def without_notes(schema: Schema) -> Schema:
    """The schema without what only describes its values."""
    return {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
