"""Texts and JSON schemas in Lark, llguidance's language for grammars.

Must not know what a grammar is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar import schemas
from minisgl_backend.grammar.special_tokens import SpecialTokens

TEXT: Final = r"TEXT: /(.|\n)*/"
_WHITESPACE: Final = r"[ ]?|\n[ ]{0,40}"
"""White space between the tokens of JSON: on one line, or on indented lines. Without a limit, small
models generate white space until ``max_tokens``."""
_SPACES: Final = ("whitespace_pattern", "whitespace_flexible")
_GUIDANCE: Final = (*_SPACES, "item_separator", "key_separator")
"""Allowed fields of ``x-guidance`` in a schema. With the others, llguidance would enforce less than
the schema says."""


def quoted(text: str) -> str:
    """A text in Lark, which takes DEL only escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def any_of(bodies: Iterable[str]) -> str:
    """Alternatives in Lark."""
    return " | ".join(f"({body})" for body in bodies)


def spelled(text: str, special_tokens: SpecialTokens) -> str:
    """A text in Lark, in which special tokens are given by their ids, since they have no text."""
    parts = special_tokens.parts_of(text)
    return " ".join(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


def up_to(end: str, name: str, special_tokens: SpecialTokens) -> str:
    """The rule ``name``, which needs ``TEXT``: any text up to the first ``end``, and that."""
    if special_tokens.begin(end):  # no text runs into it
        return f"{name}: TEXT {spelled(end, special_tokens)}"
    return f"{name}[lazy]: TEXT {quoted(end)}"


def text_of_length(
    name: str, least: int, most: int | None, end: str, special_tokens: SpecialTokens
) -> tuple[str, str]:
    """A rule for a text of at least and at most so many characters up to the first ``end``, and
    that: its name, which is ``name`` in small or in capital letters, and the rule."""
    text = rf"/(.|\n){{{least},{'' if most is None else most}}}/"
    if special_tokens.begin(end):
        return name.lower(), f"{name.lower()}: {text} {spelled(end, special_tokens)}"
    with_more = rf"/(.|\n)*/ {quoted(end)} /(.|\n)+/"
    return name.upper(), f"{name.upper()}: ({text} {quoted(end)}) & ~({with_more})"


def name_of_up_to(end: str) -> str:
    """The name of such a rule that all who need it share."""
    return f"until_{end.encode().hex()}"


def spaced(schema: dict[str, Any] | bool, *, is_lenient: bool = False) -> str:
    """A schema as llguidance reads it, with limited white space by default. The schema true is
    written as the empty object, which means the same.

    Raises ``InvalidRequest`` and ``Unsupported``.
    """
    if isinstance(schema, bool):
        if not schema:
            raise InvalidRequest("a JSON schema must be one that some value follows, got false")
        schema = {}
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise InvalidRequest("x-guidance must be an object")
    for key in guidance:
        if key not in _GUIDANCE:
            raise Unsupported(f"x-guidance.{key} is not supported")
    if not guidance.keys() & set(_SPACES):
        guidance = {**guidance, "whitespace_pattern": _WHITESPACE}
    if is_lenient:
        guidance = {**guidance, "lenient": True}
        schema = schemas.without_look_around(schema)
    return json.dumps({**schemas.plain(schema), "x-guidance": guidance})
