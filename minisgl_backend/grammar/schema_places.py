"""Where a JSON schema has which keyword: places for errors, as JSON pointers.

Knows which keywords hold schemas, lists of them, or names. Must not know what llguidance does with
a schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from minisgl_backend.grammar.lark import quoted
from minisgl_backend.grammar.schemas import DATA, FURTHER, LISTS, NAMES, says_nothing

_MOST_PLACES: Final = 5
_MOST_OF_PLACES: Final = 100
_SCHEMAS: Final = ("items", "schema", "json_schema")
"""Keywords whose values are schemas; two are those of structural tags."""


def keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """The keywords of a schema with their places, as JSON pointers, and their values."""
    waiting: list[tuple[str, Any, bool]] = [("#", schema, True)]
    while waiting:
        place, value, has_keywords = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{place}/{at}", one, True) for at, one in enumerate(value)]
        elif isinstance(value, dict):
            for key, inner in value.items():
                at = f"{place}/{escaped(key)}"
                if has_keywords and not says_nothing(key, value):
                    yield at, key, inner
                if not (has_keywords and key in DATA):
                    waiting.append((at, inner, not has_keywords or key not in NAMES))


def false_schemas(schema: Any) -> Iterator[str]:
    """The places of the schemas ``false``, except those that only forbid further properties or
    items."""
    return (place for key, place, one in _inner(schema) if one is False and key not in FURTHER)


def no_schemas(schema: Any) -> Iterator[str]:
    """The places where there should be a schema, but neither an object nor a boolean is."""
    return (place for _, place, one in _inner(schema) if not isinstance(one, dict | bool))


def _inner(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """What stands where keywords hold schemas: the keyword, the place and the value."""
    for place, key, value in keywords(schema):
        if key in NAMES and isinstance(value, dict):
            yield from ((key, f"{place}/{escaped(name)}", one) for name, one in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from ((key, f"{place}/{at}", one) for at, one in enumerate(value))
        elif key in _SCHEMAS or key in FURTHER:
            yield key, place, value


def shown(places: list[str]) -> str:
    """The first few places, short enough that the error fits next to them."""
    text = ", ".join(places[:_MOST_PLACES])
    return text if len(text) <= _MOST_OF_PLACES else text[:_MOST_OF_PLACES] + "…"


def escaped(key: str) -> str:
    """A step of a JSON pointer, in one line."""
    return quoted(key.replace("~", "~0").replace("/", "~1"))[1:-1]
