"""JSON schemas for chat templates that show types, properties, items and choices, but neither
references nor alternatives: these are spelled out if one schema says the same.

A type or null becomes the type, ``nullable``, as OpenAPI has it. Must not know any template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from minisgl_gateway.json_reading import kind_of_json
from minisgl_gateway.json_schemas import DEFINITIONS, NOTES, referred

_MOST_REFERENCES: Final = 100
"""The most that are spelled out: those of a small schema may multiply."""
_MOST_DEPTH: Final = 24
"""Of a schema that is deeper then, all references stay: the engine takes no deep tools."""
_UNSHOWN: Final = NOTES - {"description"}
_NULL: Final = {"type": "null"}


def spelled_out(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that shows more to such a template."""
    whole = {key: value for key, value in schema.items() if key not in DEFINITIONS}
    found: Mapping[str, Any] = _Spelling(schema).of(whole, frozenset())
    return found if _depth(found) <= _MOST_DEPTH else schema


class _Spelling:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MOST_REFERENCES

    def of(self, schema: Any, followed: frozenset[str]) -> Any:
        """A schema spelled out; references that are ``followed`` already lead back to it."""
        if not isinstance(schema, Mapping):
            return schema
        found = {key: value for key, value in schema.items() if key not in _UNSHOWN}
        if isinstance(reference := found.get("$ref"), str):
            del found["$ref"]
            target = referred(reference, self._root)
            if not isinstance(target, Mapping):
                return found
            if reference in followed or self._num_left == 0:
                kind = target.get("type", "object")
                return {"type": kind, "properties": {}, **found}
            self._num_left -= 1
            return self.of({**target, **found}, followed | {reference})
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := found.get(key), list):
                others = [part for part in parts if part != _NULL]
                if len(others) == 1 and isinstance(others[0], Mapping):
                    del found[key]
                    more = {"nullable": True} if len(others) < len(parts) else {}
                    return self.of({**others[0], **found, **more}, followed)
        _name_type(found)
        if isinstance(named := found.get("properties"), Mapping):
            found["properties"] = {name: self.of(one, followed) for name, one in named.items()}
        if "items" in found:
            found["items"] = self.of(found["items"], followed)
        return found


def _name_type(schema: dict[str, Any]) -> None:
    """Give a schema the one type of its values, if there is one beside null."""
    if isinstance(kinds := schema.get("type"), list):
        others = [kind for kind in kinds if kind != "null"]
        if len(others) == 1:
            schema["type"] = others[0]
            if len(others) < len(kinds):
                schema["nullable"] = True
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        given = [value for value in values if value is not None]
        found = {kind_of_json(json.dumps(value)) for value in given}
        if len(found) == 1:
            schema["enum"] = given
            schema.setdefault("type", found.pop())
            if len(given) < len(values):
                schema["nullable"] = True


def _depth(value: Any) -> int:
    if not isinstance(value, Mapping | list):
        return 0
    children = value.values() if isinstance(value, Mapping) else value
    return 1 + max(map(_depth, children), default=0)
