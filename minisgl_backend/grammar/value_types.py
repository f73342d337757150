"""The types of JSON values: those that a schema allows, and with which characters they begin.

Must not know how a value is written otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from minisgl_backend.grammar import schemas

Schema: TypeAlias = "dict[str, Any] | bool"

_FIRST: Final[Mapping[str, str]] = {
    "object": r"\{",
    "array": r"\[",
    "string": '"',
    "boolean": "tf",
    "null": "n",
    "integer": r"\-0-9",
    "number": r"\-0-9",
}
"""The characters with which values of a type begin, for a class of characters."""
_CLASSES: Final[Mapping[str, Any]] = {
    "string": str,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_MOST_DEPTH: Final = 8


def first(schema: Schema) -> str:
    """The characters with which values may begin, for a class of characters."""
    return "".join(sorted({_FIRST[kind] for kind in _kinds(schema, schema, _MOST_DEPTH)}))


def more(schema: Schema) -> str:
    """The characters with which values may go on behind their ends: those of numbers."""
    kinds = _kinds(schema, schema, _MOST_DEPTH)
    if "number" in kinds:
        return "0-9.eE"
    return "0-9" if "integer" in kinds else ""


def is_number(schema: Schema) -> bool:
    """Whether all values are numbers."""
    return _kinds(schema, schema, _MOST_DEPTH) <= {"integer", "number"}


def is_of(kind: str, value: Any) -> bool:
    """Whether a value is of a type."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _CLASSES[kind])


def _kinds(schema: Any, root: Schema, depth: int) -> set[str]:
    """The types of values that a schema allows, or more."""
    if not isinstance(schema, dict) or not isinstance(root, dict) or not depth:
        return set(_FIRST)
    if "$ref" in schema:
        return _kinds(schemas.at(schema["$ref"], root), root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            return {kind for one in parts for kind in _kinds(one, root, depth - 1)}
    if (literals := schemas.literals(schema)) is not None:
        return {kind for kind in _FIRST for one in literals if is_of(kind, one)}
    given = schema.get("type")
    kinds: list[Any] = given if isinstance(given, list) else [given]
    is_known = all(isinstance(kind, str) and kind in _FIRST for kind in kinds)
    return set(kinds) if is_known else set(_FIRST)
