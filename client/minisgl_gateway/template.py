"""The model's chat template, as far as answers depend on it, and what it can be asked for.

Must not know any API, or how the engine is asked what a template shows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from minisgl_client.answer import ChatFormat

from minisgl_gateway.content import texts_of
from minisgl_gateway.dialects.base import Dialect, Message

_SWITCH: Final = re.compile(r"/(?:no_)?think\b|detailed thinking (?:on|off)")
"""What callers write into a message to make a model think or not, if its template looks for it."""
_HARMONY_EFFORTS: Final = MappingProxyType(
    {
        "minimal": "low",
        "low": "low",
        "medium": "medium",
        "high": "high",
        "xhigh": "high",
        "max": "high",
    }
)
"""The efforts of models with channels, by the caller's wish; such models always think."""
_THINKS: Final = ("enable_thinking", "thinking")
"""Names of the variable in templates that decides whether the model thinks."""
_KNOWN_TO_MOST: Final = frozenset({"enable_thinking"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a caller wants of a template.

    ``thinks`` and ``effort`` are passed to templates with such a variable (``enable_thinking``,
    ``reasoning_effort``); None leaves the choice to the template. ``variables`` are further
    variables that the caller gives to it.
    """

    thinks: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def variables_for(self, chat_format: ChatFormat | None) -> dict[str, Any]:
        """The variables for a template: the wishes for which it has variables, and those that the
        caller gives."""
        known = _known(chat_format)
        variables: dict[str, Any] = {}
        effort = self.effort
        if _has_channels(chat_format):
            effort = _HARMONY_EFFORTS.get(effort or "")
        if effort is not None and "reasoning_effort" in known:
            variables["reasoning_effort"] = effort
        if (thinks := self._thinks) is not None:
            variables |= {name: thinks for name in _THINKS if name in known}
        return {**variables, **self.variables}

    def unfulfilled(self, chat_format: ChatFormat | None) -> list[str]:
        """The wishes for which a template has no variable and which it does not fulfil anyway."""
        known = _known(chat_format)
        decides = any(name in known for name in _THINKS)
        thinks_anyway = chat_format is not None and chat_format.thinking is not None
        names = []
        if self.thinks is not None and not decides and self.thinks is not thinks_anyway:
            names.append("enable_thinking")
        is_told = "reasoning_effort" in known
        if _has_channels(chat_format):
            is_told = is_told and self.effort in _HARMONY_EFFORTS
        if self.effort is not None and not decides and not is_told:
            names.append("reasoning_effort")
        return names

    @property
    def _thinks(self) -> bool | None:
        if self.thinks is None and self.effort is not None:
            return self.effort != "none"
        return self.thinks


@dataclass(frozen=True, slots=True)
class Template:
    """The model's chat template, as far as the answer to one chat depends on it.

    ``dialect`` is how tool calls are written; ``variables`` are those given to the template;
    ``thinking`` are the marks around thoughts, if there can be any, which the prompt may have
    begun. ``unfulfilled`` are the names of wishes that the template cannot fulfil.
    """

    dialect: Dialect
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking: tuple[str, str] | None = None
    begins_thinking: bool = False
    unfulfilled: Sequence[str] = ()

    @classmethod
    def of(cls, chat_format: ChatFormat | None, dialect: Dialect, wishes: Wishes) -> Template:
        """The template that has this ``chat_format``, which is None if unknown."""
        return cls(
            dialect,
            wishes.variables_for(chat_format),
            None if chat_format is None else chat_format.thinking,
            chat_format is not None and chat_format.begins_thinking,
            wishes.unfulfilled(chat_format),
        )


def _has_channels(chat_format: ChatFormat | None) -> bool:
    return chat_format is not None and chat_format.tool_dialect == "harmony"


def _known(chat_format: ChatFormat | None) -> Collection[str]:
    """The variables by which a template can be given wishes."""
    return _KNOWN_TO_MOST if chat_format is None else chat_format.variables


def probe_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """A short chat that templates begin to answer as they do one of these messages: all that is
    left of them are the last switches for thoughts."""
    system, user = (_last_switch(messages, role) for role in ("system", "user"))
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": f"Hi {user}".rstrip()}]


def _last_switch(messages: Sequence[Message], role: str) -> str:
    for message in reversed(messages):
        texts = texts_of(message.get("content")) if message["role"] == role else ()
        for text in reversed(texts):
            if found := _SWITCH.findall(text):
                last: str = found[-1]
                return last
    return ""
