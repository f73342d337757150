"""Chat templates: messages -> the prompt's text, by the Jinja program in a model's folder.

Templates come with checkpoints, which are not always trustworthy, and process what clients send. So
they run in a ``Sandbox``, see only plain data, and are bounded in time and size. Extensions of
Jinja are those of transformers: ``raise_exception``, ``strftime_now``, ``tojson`` without escapes
for HTML, loop controls, and the ``generation`` block, which only marks text for training.

A ``ChatTemplate`` may render on several threads at once. Must not know tokens, or which request a
chat belongs to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError

from minisgl_backend.errors import ConfigError, InvalidRequest
from minisgl_backend.text.chat_format import TemplateFacts
from minisgl_backend.text.messages import join_parts
from minisgl_backend.text.sandbox import Meter, Sandbox
from minisgl_backend.text.sandbox_sizes import OutOfBounds, Sizes

MAX_SECONDS: Final = 5.0
_MOST_OF_A_DATE: Final = 256
"""Python's ``strftime`` gives up when a text is so many times as long as its format."""
_PROBES: Final = ("a probe of 29 letters and more", "another one, which comes second")
_CALL: Final = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "probe", "arguments": {}},
}
_USER: Final = {"role": "user", "content": "x"}
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")
"""Where a message may have what the model thought."""
_RESULTS: Final = ("tool", "function", "ipython")
"""Roles of what a tool answered."""
_AROUND: Final[Mapping[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]] = MappingProxyType(
    {
        "user": ([], []),
        "system": ([], [_USER]),
        "developer": ([], [_USER]),
        "assistant": ([_USER], [_USER]),
    }
    | dict.fromkeys(
        _RESULTS, ([_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}], [])
    )
)
"""By role: what comes before and after a message in a chat that templates take."""


class ChatTemplate:
    """One template. ``special_tokens`` are variables for it, such as ``bos_token``; ``facts`` say
    what its program reveals about answers."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        *,
        max_chars: int,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._clock = clock
        environment = Sandbox(max_chars, {"tojson": _to_json})
        environment.globals["raise_exception"] = partial(_raise_exception, environment.sizes)
        environment.globals["strftime_now"] = partial(_strftime_now, environment.sizes)
        self._meter_name = environment.meter_name
        try:
            self._template = environment.compiled(source)
            self.facts = TemplateFacts.of(environment.parse(source))
        except TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self._takes_parts = self._roles_with_parts()
        self._takes_null = self._takes_calls_alone()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat; with ``add_generation_prompt`` it includes the beginning of the
        assistant's answer.

        ``variables`` are added to those that every template gets. Raises ``InvalidRequest`` if the
        template refuses the chat, a bound is exceeded, or a variable has the name of one that every
        template gets.
        """
        told = [self._told(message) for message in messages]
        return self._render(told, tools, variables or {}, add_generation_prompt)

    def _told(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message in the form that the program takes."""
        told = dict(message) if message.get("role") in self._takes_parts else join_parts(message)
        if told.get("content") is None:
            told["content"] = None if self._takes_null else ""
        if not told.get("tool_calls"):  # clients send answers back with their empty fields, too
            told.pop("tool_calls", None)
        thoughts = next((told[name] for name in _THOUGHTS if told.get(name) is not None), None)
        if thoughts is not None:  # as in transformers: templates read one name or another
            told = {"thinking": thoughts, **told, "reasoning_content": thoughts}
        return told

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        own = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            self._meter_name: Meter(self._clock, self._max_seconds, 4 * self._max_chars),
        }
        for name in variables:
            if name in own or not name.isidentifier():
                raise InvalidRequest(f"chat_template_kwargs may not hold {name[:40]!r}")
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate({"documents": None, **variables, **own}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise OutOfBounds(f"makes more than {self._max_chars} characters")
        except OutOfBounds as error:
            raise InvalidRequest(f"the chat template {error}") from None
        except Exception as error:
            # A program may raise anything for data that it does not expect.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise InvalidRequest(f"the chat template refuses the messages: {reason}") from None
        return "".join(pieces)

    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose content may be a list of text parts, not only a string.

        Templates that take parts of the user may write those of a tool as Python does, or take only
        the first part of a system message. Those that take none of the user take none at all.
        """
        if not self._shows_parts("user"):
            return frozenset()
        return frozenset(role for role in _AROUND if role == "user" or self._shows_parts(role))

    def _takes_calls_alone(self) -> bool:
        """Whether the content of a message with calls may be null, as clients send it. Some
        templates fail on it or write it down, and need an empty text."""
        (user, calls), _ = _AROUND["tool"]
        result = {"role": "tool", "content": "x", "tool_call_id": _CALL["id"], "name": "probe"}

        def num_nulls(content: str | None) -> int:
            text = self._render([user, {**calls, "content": content}, result], None, {})
            return text.count("None") + text.count("null")

        try:
            return num_nulls(None) == num_nulls("")
        except InvalidRequest:
            return False

    def _shows_parts(self, role: str) -> bool:
        before, after = _AROUND[role]
        parts = [{"type": "text", "text": text} for text in _PROBES]
        message: dict[str, Any] = {"role": role, "content": parts}
        if role in _RESULTS:
            message |= {"tool_call_id": _CALL["id"], "name": "probe"}
        try:
            text = self._render([*before, message, *after], None, {})
        except InvalidRequest:
            return False
        is_spelled = "'type'" in text or '"type"' in text
        return all(probe in text for probe in _PROBES) and not is_spelled


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(sizes: Sizes, message: Any) -> NoReturn:
    raise TemplateError(sizes.text(message))


def _strftime_now(sizes: Sizes, format: str) -> str:
    sizes.check(_MOST_OF_A_DATE * len(format))
    return datetime.now().strftime(format)
