"""Arguments of calls as plain text: what a text means, and which texts fit a schema.

Text does not tell the number 5 from the string "5": the schema of the tool's parameters does. Text
that is a string follows no schema but a list of choices; numbers, lists and objects are JSON, which
follows any. Must not know the tags around the texts (``tagged_calls``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from minisgl_gateway.call_syntax import MOST_NAME_CHARS
from minisgl_gateway.json_reading import BLANKS, PYTHON_WORDS, as_json, kind_of_json, sendable
from minisgl_gateway.tools import Tool

_ANY: Final = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
NOTES: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords of schemas that limit nothing."""
DEFINITIONS: Final = ("$defs", "definitions")
_MOST_DIGITS: Final = 10
"""Of a place in a list, in a reference."""
_OF_OBJECTS: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "$schema", *DEFINITIONS}
)
_NAME: Final = re.compile(r"[^\s<>{\"](?:[^\n<>{\"]*[^\s<>{\"])?")


class ArgumentKinds:
    """The types that the arguments of tools may have, by their schemas."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters or {} for tool in tools}

    def as_json(self, tool: str, texts: Mapping[str, str]) -> str:
        """The arguments of a call, as a JSON object. A value is a string if its schema says so, or
        if what is written is no JSON of a type that the schema allows."""
        members = [
            f"{as_json(name)}: {_value_of(text, self._of(tool, name))}"
            for name, text in texts.items()
        ]
        return sendable("{" + ", ".join(members) + "}")

    def are_json(self, tool: str, name: str) -> bool:
        """Whether all values of an argument are written as JSON, since none is a string."""
        return "string" not in self._of(tool, name)

    def _of(self, tool: str, name: str) -> Collection[str]:
        root = self._schemas.get(tool, {})
        schemas = root.get("properties")
        return kinds_of(schemas.get(name) if isinstance(schemas, Mapping) else None, root)


class JsonStrings:
    """Whether a text, so far, ends within a string of a JSON list or object."""

    def __init__(self) -> None:
        self.is_open = False
        self._is_json: bool | None = None  # unknown until something is written
        self._is_escaped = False

    def push(self, char: str) -> None:
        if self._is_json is None and char not in BLANKS:
            self._is_json = char in "[{"
        if not self._is_json:
            return
        if self.is_open and char < " ":  # so it is no JSON
            self._is_json = self.is_open = False
        elif self._is_escaped:
            self._is_escaped = False
        elif char == '"':
            self.is_open = not self.is_open
        else:
            self._is_escaped = self.is_open and char == "\\"


def _value_of(text: str, kinds: Collection[str]) -> str:
    """A value in JSON."""
    written = text.strip()
    written = PYTHON_WORDS.get(written, written)
    kind = kind_of_json(written)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return written if fits and kind != "string" else as_json(text)


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


# --- which texts fit a schema --------------------------------------------------------------------


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
        read = [json.loads(_value_of(text, kinds)) for text in texts]
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
