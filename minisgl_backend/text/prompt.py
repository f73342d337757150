"""The three forms of a prompt, before it is token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text as it is; what looks like a special token becomes one only on demand."""

    text: str
    parse_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class MessagesPrompt:
    """A chat: JSON texts of a list of messages and, if there are any, of a list of tools and of
    an object of variables for the template."""

    messages: str
    tools: str | None = None
    variables: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """Token ids, int32[num_prompt_tokens]."""

    ids: IntArray


Prompt: TypeAlias = TextPrompt | MessagesPrompt | TokenPrompt
