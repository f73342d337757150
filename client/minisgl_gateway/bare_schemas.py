"""Which JSON schemas the engine can enforce for arguments with bare keys (``bare_calls``): its
structural tags have a notation for such values.

Must not know the text around arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from minisgl_gateway.bare_calls import QUOTE
from minisgl_gateway.json_schemas import DEFINITIONS, NOTES, referred

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS: Final = frozenset(
    {
        *("type", "$schema", "properties", "required", "additionalProperties", *DEFINITIONS),
        *("items", "minItems", "maxItems", "minLength", "maxLength", *_BOUNDS),
    }
)
"""Those of schemas that have no alternatives."""


class _NotEnforced(Exception):
    pass


def ordered(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of arguments in the order in which templates write these, that of names. None if
    it says what cannot be enforced, such as a pattern of strings."""
    try:
        found: dict[str, Any] = _ordered(parameters, parameters)
    except _NotEnforced:
        return None
    return found


def _ordered(schema: Any, root: Mapping[str, Any]) -> Any:
    if schema is True:
        return schema
    if not isinstance(schema, Mapping):
        raise _NotEnforced
    bare = {key: value for key, value in schema.items() if key not in NOTES}
    if "$ref" in bare:
        _check(len(bare) == 1 and isinstance(bare["$ref"], str))
        _check(referred(bare["$ref"], root) is not None)
        return bare
    if isinstance(parts := bare.get("anyOf"), list):
        _check(len(bare) == 1 and parts)
        return {"anyOf": [_ordered(part, root) for part in parts]}
    if bare.keys() & {"enum", "const"}:
        _check(not bare.keys() - {"type", "enum", "const"})
        _check(QUOTE not in json.dumps(bare, ensure_ascii=False).replace('\\"', '"'))
        return bare
    _check(not bare.keys() - _KEYWORDS)
    for key in ("properties", *DEFINITIONS):
        if key in bare:
            named = bare[key]
            _check(isinstance(named, Mapping) and not any(QUOTE in name for name in named))
            inner = sorted(named.items(), key=lambda item: item[0].lower())
            bare[key] = {name: _ordered(one, root) for name, one in inner}
    if "properties" in bare:  # others need not be allowed
        bare["additionalProperties"] = False
    if bare.get("additionalProperties", False) is not False:
        bare["additionalProperties"] = _ordered(bare["additionalProperties"], root)
    if "items" in bare:
        bare["items"] = _ordered(bare["items"], root)
    required, names = bare.get("required", []), [*bare.get("properties", ())]
    _check(isinstance(required, list) and all(one in names for one in required))
    return bare


def _check(can_be_enforced: object) -> None:
    if not can_be_enforced:
        raise _NotEnforced
