"""Which functions of the Responses API are strict: OpenAI's default is yes, if it is possible.

Knows which keywords of JSON schemas a grammar can follow for sure. Must not know how a model writes
calls: what the form of a dialect cannot keep to is the dialect's matter.
"""

from __future__ import annotations

from typing import Any, Final

from minisgl_gateway.responses.schema import FunctionTool


def is_strict(tool: FunctionTool) -> bool:
    """Whether arguments must follow the schema: if the request does not say, whenever possible."""
    if tool.strict is not None:
        return tool.strict
    schema = tool.parameters
    is_object = schema is not None and schema.get("type", "object") == "object"
    return is_object and can_be_enforced(schema)


def can_be_enforced(schema: Any) -> bool:
    """Whether a schema has nothing but keywords that a grammar can follow for sure.

    Matters only if the request does not say: for a strict tool, what cannot be enforced is an
    error.
    """
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or not schema.keys() <= _ENFORCED:
        return False
    if not str(schema.get("$ref", "#")).startswith("#"):
        return False
    listed = schema.get("enum", [])
    if not isinstance(listed, list) or any(map(_is_large, [schema.get("const"), *listed])):
        return False
    subschemas = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for name in ("properties", "$defs", "definitions"):
        named = schema.get(name, {})
        if not isinstance(named, dict):
            return False
        subschemas += named.values()
    either = schema.get("anyOf", [])
    return isinstance(either, list) and all(map(can_be_enforced, [*subschemas, *either]))


def _is_large(value: Any) -> bool:
    """Whether it is an integer that a float may not hold."""
    return isinstance(value, int) and abs(value) > 2**53


_ENFORCED: Final = frozenset(
    {
        "$defs",
        "$ref",
        "$schema",
        "additionalProperties",
        "anyOf",
        "const",
        "default",
        "definitions",
        "description",
        "enum",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "properties",
        "required",
        "title",
        "type",
    }
)
