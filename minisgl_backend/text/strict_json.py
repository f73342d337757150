"""JSON of clients, in which an object may name each key once.

Which of two values counts differs from reader to reader, so neither does. Raises ``InvalidRequest``
with one short sentence, whatever comes in.
"""

from __future__ import annotations

import json
from typing import Any

from minisgl_backend.errors import InvalidRequest


def parse_json(name: str, text: str) -> Any:
    """The value of a JSON text; an object that repeats a key is refused."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name} {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} must be valid JSON") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(f"has the key {name[:60]!r} twice")
        found[name] = value
    return found
