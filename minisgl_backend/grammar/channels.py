"""Answers in channels, as gpt-oss writes them (OpenAI's harmony format).

A prompt ends with ``<|start|>assistant``. The answer is a series of messages:

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant      thoughts
    <|channel|>commentary<|message|>TEXT<|end|><|start|>assistant    text before a call
    <|channel|>final<|message|>TEXT

The last message may also be a call: its header names the tool, and its text is the arguments. The
form that a request asks for applies to the final message. But if all structures of a structural tag
begin with the header of a message, they are messages themselves. Then the answer ends with one of
them or with a final message. That is free text, or the tag's ``otherwise``; with ``at_least_one``
and no ``otherwise`` there is no final message. Must not know what the messages are used for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from minisgl_backend.errors import Unsupported
from minisgl_backend.grammar.lark import TEXT, any_of, spaced, spelled
from minisgl_backend.grammar.pieces import Writer
from minisgl_backend.grammar.special_tokens import SpecialTokens
from minisgl_backend.grammar.structural_tags import FormattedTag, StructuralTag

_MARKS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_NEXT: Final = "<|end|><|start|>assistant"


def around(form: str, special_tokens: SpecialTokens) -> str:
    """An answer whose final message has this form, in llguidance's own language.

    Raises ``Unsupported`` if a mark of the format is not a token.
    """
    inner: dict[str, Any] = {"lark_grammar": form}
    further: list[dict[str, Any]] = []
    if form.lstrip().startswith("{"):
        inner, *further = json.loads(form)["grammars"]
    lines = [*_rules(special_tokens), "start: thought* final form", "form: @form"]
    outer = {"name": "answer", "lark_grammar": "\n".join(lines)}
    return json.dumps({"grammars": [outer, {**inner, "name": "form"}, *further]})


def are_messages(tag: StructuralTag | FormattedTag) -> bool:
    """Whether all structures of a tag are messages."""
    return bool(tag.beginnings) and all("<|message|>" in begin for begin in tag.beginnings)


def of_messages(tag: StructuralTag | FormattedTag, special_tokens: SpecialTokens) -> str:
    """An answer with such structures, in llguidance's own language. Raises ``Unsupported`` as
    ``around`` does."""
    writer = Writer()
    writer.lines += _rules(special_tokens)
    writer.lines.append(f"call: {any_of(tag.written(writer, special_tokens))}")
    if not tag.at_least_one:
        commentary = spelled("<|channel|>commentary<|message|>", special_tokens)
        preamble = f"preamble: {commentary} TEXT {spelled(_NEXT, special_tokens)}"
        return writer.source(preamble, "start: (thought | preamble)* (call | final TEXT)")
    if tag.otherwise is not None:
        other = f"other: %json {spaced(tag.otherwise)}"
        return writer.source(other, "start: thought* (call | final other)")
    return writer.source("start: thought* call")


def _rules(special_tokens: SpecialTokens) -> Iterator[str]:
    """The rules for what precedes the last message, and for the header of a final one."""
    for mark in _MARKS:
        if mark not in special_tokens:
            raise Unsupported(f"a form of an answer in channels needs {mark} to be a token")
    yield TEXT
    analysis = spelled("<|channel|>analysis<|message|>", special_tokens)
    yield f"thought: {analysis} TEXT {spelled(_NEXT, special_tokens)}"
    yield f"final: {spelled('<|channel|>final<|message|>', special_tokens)}"
