"""Arguments of calls as plain text: what a text means.

Text does not tell the number 5 from the string "5": the schema of the tool's parameters does. Must
not know the tags around the texts (``tagged_calls``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from minisgl_gateway.json_reading import BLANKS, PYTHON_WORDS, as_json, kind_of_json, sendable
from minisgl_gateway.json_schemas import kinds_of
from minisgl_gateway.tools import Tool


class ArgumentKinds:
    """The types that the arguments of tools may have, by their schemas."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters or {} for tool in tools}

    def as_json(self, tool: str, texts: Mapping[str, str]) -> str:
        """The arguments of a call, as a JSON object. A value is a string if its schema says so, or
        if what is written is no JSON of a type that the schema allows."""
        members = [
            f"{as_json(name)}: {value_of(text, self._of(tool, name))}"
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


def value_of(text: str, kinds: Collection[str]) -> str:
    """A value in JSON."""
    written = text.strip()
    written = PYTHON_WORDS.get(written, written)
    kind = kind_of_json(written)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return written if fits and kind != "string" else as_json(text)
