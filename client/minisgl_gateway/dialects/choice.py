"""Chooses the dialect of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from minisgl_client.answer import ChatFormat

from minisgl_gateway import call_syntax, python_calls
from minisgl_gateway.dialects.bare import Gemma4
from minisgl_gateway.dialects.base import Dialect, DialectName
from minisgl_gateway.dialects.harmony import Harmony
from minisgl_gateway.dialects.hermes import Hermes, Plain
from minisgl_gateway.dialects.listed import Command, Lfm, Nemotron
from minisgl_gateway.dialects.llama import Llama
from minisgl_gateway.dialects.mistral import Mistral
from minisgl_gateway.dialects.tagged import Glm, MiniMax, QwenXml, Seed

_DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (
        *(Hermes(), QwenXml(), Seed(), Glm(), MiniMax()),
        *(Gemma4(), Llama(), Nemotron(), Command(), Harmony(), Plain()),
    )
}


def dialect_of(chat_format: ChatFormat | None, option: DialectName | None = None) -> Dialect:
    """The dialect that a chat template reveals, or the one that the operator chose."""
    name = option or (chat_format and chat_format.tool_dialect)
    marks = frozenset[str]() if chat_format is None else chat_format.tool_marks
    if name == "mistral":
        return Mistral(is_spelled=call_syntax.ARGUMENTS in marks)
    if name == "lfm2":
        return Lfm(writes_calls=python_calls.OPENING in marks)
    return _DIALECTS.get(name or "plain", _DIALECTS["plain"])
