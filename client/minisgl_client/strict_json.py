"""JSON read strictly: no repeated keys, of which Python keeps one, and no NaN, which JSON lacks."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class Refused(ValueError):
    """Well formed, but not accepted; the message says why."""


def loads(text: str | bytes) -> Any:
    """The value of a JSON text; raises ``Refused``, another ``ValueError``, or ``RecursionError``
    if it nests too deeply."""
    try:
        return json.loads(text, object_pairs_hook=_unrepeated, parse_constant=no_constant)
    except (Refused, UnicodeError, json.JSONDecodeError):
        raise
    except ValueError:  # the only other thing that Python refuses
        raise Refused("an integer has thousands of digits") from None


def no_constant(name: str) -> NoReturn:
    """For ``parse_constant`` of ``json``: refuse NaN and infinities, which Python reads."""
    raise Refused(f"{name} is not a number of JSON")


def is_shallow(value: Any, depth: int) -> bool:
    """Whether arrays and objects nest at most ``depth`` levels deep."""
    if not isinstance(value, (dict, list)):
        return True
    children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(is_shallow(child, depth - 1) for child in children)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Refused(f"the key {name[:60]!r} is given twice")
        found[name] = value
    return found
