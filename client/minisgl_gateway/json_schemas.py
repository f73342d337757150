"""What a JSON schema says: the types of its values, and what its references point to.

Must not know what follows the schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import unquote

from minisgl_gateway.json_reading import kind_of_json

_ANY: Final = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
NOTES: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords of schemas that limit nothing."""
DEFINITIONS: Final = ("$defs", "definitions")
_MOST_DIGITS: Final = 10
"""Of a place in a list, in a reference."""


def kinds_of(schema: Any, root: Mapping[str, Any]) -> Collection[str]:
    """The types of the values that a schema allows, as far as it shows them; never none."""
    return _shown_kinds(schema, root, set()) or _ANY


def _shown_kinds(schema: Any, root: Mapping[str, Any], followed: set[str]) -> Collection[str]:
    """``kinds_of``; of references that are ``followed`` already, the types are known."""
    if not isinstance(schema, Mapping):
        return _ANY
    if isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return frozenset()
        followed.add(reference)
        return _shown_kinds(referred(reference, root), root, followed)
    if isinstance(kinds := schema.get("type"), str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {kind_of_json(json.dumps(value)) or "" for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            return {kind for part in parts for kind in _shown_kinds(part, root, followed)}
    if isinstance(parts := schema.get("allOf"), list):
        of_parts = [_shown_kinds(part, root, followed) for part in parts]
        return next((kinds for kinds in of_parts if kinds is not _ANY), _ANY)
    return _ANY


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema points to; None if to nothing."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < _MOST_DIGITS:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found
