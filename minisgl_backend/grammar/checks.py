"""Checks of what a structural tag says, with the place of each mistake.

Raises ``InvalidRequest``, or ``Unsupported`` for unknown keys. Must not know any form of tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported

FLAGS: Final = ("at_least_one", "stop_after_first")
"""Of tags in free text, or beside each other."""
MOST_COUNT: Final = 2**31 - 1
"""llguidance counts no further."""


def check(is_right: object, place: str, expected: str) -> None:
    """Refuse what is at ``place`` unless it ``is_right``: it must be what is ``expected``."""
    if not is_right:
        raise InvalidRequest(f"{place} must be {expected}")


def check_keys(given: Mapping[str, Any], prefix: str, known: tuple[str, ...]) -> None:
    """Refuse keys that are not ``known``; ``prefix`` is the place before a key, with its dot."""
    for key in given:
        if key not in known:
            raise Unsupported(f"{prefix}{key} of a structural tag is not supported")


def check_schema(schema: object, place: str) -> None:
    """Refuse what is no schema, and the schema false."""
    check(isinstance(schema, dict | bool), place, "a JSON schema")
    check(schema is not False, place, "a JSON schema that some value follows, got false")


def items(given: Mapping[str, Any], key: str, prefix: str) -> list[tuple[int, Any]]:
    """The items of a list, with their indices."""
    found = given.get(key)
    check(isinstance(found, list) and found, f"{prefix}{key}", "a list, not empty")
    return list(enumerate(found or ()))


def texts(found: Any, place: str) -> list[str]:
    """A text, or a list of texts, as a list."""
    several: list[str] = found if isinstance(found, list) else [found]
    is_right = several and all(isinstance(one, str) for one in several)
    check(is_right, place, "a string, or a list of strings, not empty")
    return several


def flag(given: Mapping[str, Any], key: str, prefix: str) -> bool:
    """A flag; false if it is not given."""
    value = given.get(key, False)
    check(isinstance(value, bool), f"{prefix}{key}", "true or false")
    return value is True


def count(given: Mapping[str, Any], key: str, place: str) -> int | None:
    """A number of something; None if it is not given."""
    value = given.get(key)
    if value is None:
        return None
    is_right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT
    check(is_right, f"{place}.{key}", f"an integer from 0 to {MOST_COUNT}")
    return int(value)
