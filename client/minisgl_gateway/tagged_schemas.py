"""Which arguments as plain text fit a JSON schema: what the engine can enforce for them.

Text that is a string follows no schema but a list of choices; numbers, lists and objects are JSON,
which follows any. Must not know the tags around the texts (``tagged_calls``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_gateway.call_syntax import MOST_NAME_CHARS
from minisgl_gateway.json_schemas import DEFINITIONS, NOTES, kinds_of, referred
from minisgl_gateway.tagged_values import value_of

_OF_OBJECTS: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "$schema", *DEFINITIONS}
)
_NAME: Final = re.compile(r"[^\s<>{\"](?:[^\n<>{\"]*[^\s<>{\"])?")


@dataclass(frozen=True, slots=True)
class Argument:
    """What the text of an argument must be: JSON of a ``schema``, or one of the ``choices``, or
    without both any text."""

    name: str
    is_optional: bool
    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] | None = None


def arguments_of(parameters: Mapping[str, Any], closing: str) -> list[Argument] | None:
    """The arguments that follow a schema, in its order, without those that it does not name; each
    text ends with ``closing``. None if there are schemas that such texts cannot follow, such as one
    of strings of a limited length."""
    named = parameters.get("properties", {} if _allows_no_others(parameters) else None)
    required = parameters.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(required, list):
        return None
    names = [*named]  # what is required may be no name, and not hashable
    if parameters.keys() - _OF_OBJECTS - NOTES or not all(one in names for one in required):
        return None
    found = []
    for name, schema in named.items():
        argument = _argument(name, name not in required, schema, parameters)
        if argument is None or not _NAME.fullmatch(name) or len(name) > MOST_NAME_CHARS:
            return None
        if any(closing in text for text in argument.choices or ()):
            return None
        found.append(argument)
    return found


def _allows_no_others(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("additionalProperties") is False


def _argument(
    name: str, is_optional: bool, schema: Any, root: Mapping[str, Any]
) -> Argument | None:
    kinds = kinds_of(schema, root)
    if "string" not in kinds:
        if not _refers_to_definitions(schema):
            return None
        defined = {key: root[key] for key in DEFINITIONS if key in root}
        return Argument(name, is_optional, schema={**schema, **defined})
    if (values := _listed(schema, root, set())) is not None:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        read = [json.loads(value_of(text, kinds)) for text in texts]
        is_read = all(repr(one) == repr(value) for one, value in zip(read, values, strict=True))
        return Argument(name, is_optional, choices=texts) if is_read else None
    return Argument(name, is_optional) if _is_any_text(schema, root, set()) else None


def _listed(schema: Any, root: Mapping[str, Any], followed: set[str]) -> list[Any] | None:
    """The values that a schema allows, if it lists them, or lists them and null."""
    bare = _bare(schema, root, followed)
    if bare == {"type": "null"}:
        return [None]
    if isinstance(parts := bare.get("anyOf"), list) and len(bare) == 1:
        of_parts = [_listed(part, root, followed) for part in parts]
        known = [values for values in of_parts if values is not None]
        return [one for values in known for one in values] if len(known) == len(parts) else None
    if bare.keys() - {"type", "enum", "const"}:
        return None
    values = bare.get("enum", [bare["const"]] if "const" in bare else None)
    return values if isinstance(values, list) else None


def _is_any_text(schema: Any, root: Mapping[str, Any], followed: set[str]) -> bool:
    """Whether a schema allows any text as what it is read as: it limits nothing but types."""
    bare = {} if schema is True else _bare(schema, root, followed)
    if isinstance(parts := bare.get("anyOf"), list) and len(bare) == 1:
        return all(_is_any_text(part, root, followed) for part in parts)
    return not bare.keys() - {"type"} and schema is not False


def _bare(schema: Any, root: Mapping[str, Any], followed: set[str]) -> Mapping[str, Any]:
    """What a schema says without notes, a reference being what it refers to. ``{"$ref": None}`` if
    that is no object, or if the reference is ``followed`` already: each is, at most once."""
    while isinstance(schema, Mapping):
        bare = {key: value for key, value in schema.items() if key not in NOTES}
        reference = bare.get("$ref")
        if len(bare) != 1 or not isinstance(reference, str):
            return bare
        if reference in followed:
            break
        followed.add(reference)
        schema = referred(reference, root)
    return {"$ref": None}


def _refers_to_definitions(value: Any) -> bool:
    """Whether all references in a schema are to definitions, so that it can stand alone with
    these."""
    if isinstance(value, list):
        return all(map(_refers_to_definitions, value))
    if not isinstance(value, Mapping):
        return True
    known = tuple(f"#/{key}/" for key in DEFINITIONS)
    reference = value.get("$ref", known[0])
    is_right = not isinstance(reference, str) or reference.startswith(known)
    return is_right and all(map(_refers_to_definitions, value.values()))
