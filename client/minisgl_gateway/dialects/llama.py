"""The dialect of Llama 3.1 and later, in its JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl_gateway import call_syntax
from minisgl_gateway.dialects.base import Arguments, Dialect, Message, Structure
from minisgl_gateway.dialects.single_calls import with_single_calls
from minisgl_gateway.json_reading import as_json
from minisgl_gateway.tools import Tool


class Llama(Dialect):
    """Llama 3.1 and later, in its JSON form. Models write several calls in an answer, but templates
    take one per message."""

    name = "llama3_json"
    syntax = call_syntax.LLAMA
    keeps_special_tokens = True
    _separators = ("; ",)

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        return with_single_calls(messages)

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        tag, bare, typed = self.syntax.openings
        openings = (
            [f"{bare}: "] if required else [f"{tag}{bare}: ", f"{bare}: ", f'{typed}, "name": ']
        )
        return [
            of_tool.between(f'{opening}{as_json(name)}, "parameters": ', "}")
            for opening in openings
            for name, of_tool in arguments.items()
        ]
