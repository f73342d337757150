"""GBNF, the EBNF of llama.cpp, which vLLM and XGrammar write in the same form -> llguidance's Lark.

Uses llguidance's own reader of GBNF. Must not know where a grammar stands.
"""

from __future__ import annotations

import re
from typing import Final

from llguidance import grammar_from
from llguidance.gbnf_to_lark import GrammarParser, RuleNode, RuleRefNode, is_lark_syntax, resolve

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.grammar.complaints import one_line

_CODE: Final = re.compile(r"\\(?:\\|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8}))")
"""Of a character in GBNF; or a backslash, which begins none."""
_MOST_CHARACTERS: Final = 100_000


def to_lark(source: str) -> str:
    """A grammar in GBNF, or in Lark already, in Lark. Raises ``InvalidRequest``."""
    try:
        return grammar_from(
            "grammar", source if is_lark_syntax(source) else _with_characters(source)
        )
    except ValueError as error:
        raise InvalidRequest(f"the grammar is wrong: {one_line(str(error))}") from error


def to_terminal(gbnf: str) -> str | None:
    """The body of a terminal in Lark that matches what a grammar in GBNF allows; None if its rules
    refer to themselves, or if it would be too long. The grammar is one that ``to_lark``
    takes."""
    rules = GrammarParser().parse(_with_characters(gbnf))
    resolve(rules)
    start = rules["start"]
    return _body(start, set()) if start.is_terminal() else None


def _body(rule: RuleNode, done: set[int]) -> str | None:
    """The rule's body, with the bodies of other rules in place of their names."""
    waiting = list(rule.children())
    while waiting:
        node = waiting.pop()
        waiting += node.children()
        if isinstance(node, RuleRefNode) and node.target and id(node.target) not in done:
            body = _body(node.target, done)
            if body is None:
                return None
            node.target.name = body
            done.add(id(node.target))
    body = f"({rule.alternatives})"
    return body if len(body) <= _MOST_CHARACTERS else None


def _with_characters(gbnf: str) -> str:
    """The grammar with its character codes spelled so that llguidance reads them all: it drops
    their leading zeros."""

    def spelled(found: re.Match[str]) -> str:
        code = int(found["four"] or found["eight"] or "-1", 16)
        if 0 <= code < 256:
            return f"\\x{code:02x}"
        is_character = code in range(256, 0xD800) or code in range(0xE000, 0x110000)
        return chr(code) if is_character else found[0]

    return _CODE.sub(spelled, gbnf)
