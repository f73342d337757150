"""Deltas of the engine -> what OpenAI's clients read: the events of a stream, or a whole answer.

``ChatWriter`` and ``CompletionWriter`` are on the path of every chunk: what repeats is made once
for a stream, and only the new text is encoded. JSON is ASCII there, so that no client takes a
character such as U+2028 for the end of a line.

A finish reason that OpenAI does not have, of a deadline or of a request that was cancelled by its
id, is raised as ``ApiError``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from minisgl_client.answer import Delta, Result

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.errors import api_error_of_finish
from minisgl_gateway.logprobs import chat_logprobs, completion_logprobs
from minisgl_gateway.tool_calls import CLOSING, CalledTool, ToolCallReader

DONE: Final = b"data: [DONE]\n\n"
_json: Final = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Heading:
    """What a whole answer, and each chunk of a stream, begins with."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, kind: str, model: str) -> Heading:
        """A heading with an id of its own; ``kind`` is ``chatcmpl`` or ``cmpl``."""
        return cls(f"{kind}-{uuid.uuid4().hex}", model)


@dataclass(slots=True)
class Counts:
    """Tokens of a request so far."""

    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, part: Delta | Result, *, prompt: bool) -> None:
        """Add a choice's tokens; with ``prompt`` those of its prompt, at its end."""
        self.num_output_tokens += part.num_output_tokens or 0
        if prompt and part.finish_reason is not None:
            self.num_input_tokens += part.num_input_tokens or 0
            self.num_cached_tokens += part.num_cached_tokens or 0

    @property
    def usage(self) -> schema.Usage:
        """The same in OpenAI's form."""
        return schema.Usage(
            prompt_tokens=self.num_input_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_input_tokens + self.num_output_tokens,
            prompt_tokens_details=schema.PromptTokensDetails(cached_tokens=self.num_cached_tokens),
        )


class Writer(Protocol):
    """Writes one choice of a stream."""

    def push(self, delta: Delta) -> bytes:
        """The events of a delta, which may be none; raises ``ApiError``."""
        ...


class ChatWriter:
    """One choice of a chat. ``num_logprobs`` is None where they were not asked for."""

    def __init__(
        self,
        heading: Heading,
        index: int,
        *,
        num_logprobs: int | None = None,
        tool_calls: bool = False,
        usage: bool = False,
    ) -> None:
        start = _start(heading, "chat.completion.chunk")
        self._head = f'{start},"choices":[{{"index":{index},"delta":'
        self._end = _end(usage)
        self._num_logprobs = num_logprobs
        self._reader = ToolCallReader() if tool_calls else None
        self._opened = False

    def push(self, delta: Delta) -> bytes:
        """The events of a delta."""
        events = []
        if not self._opened:
            self._opened = True
            events.append(self._event('{"role":"assistant","content":""}'))
        logprobs = "null"
        if self._num_logprobs is not None and delta.logprobs:
            logprobs = _json(chat_logprobs(delta.logprobs, self._num_logprobs).model_dump())
        for change in self._changes(delta) or (['{"content":""}'] if logprobs != "null" else []):
            events.append(self._event(change, logprobs))
            logprobs = "null"
        if delta.finish_reason is not None:
            calls = self._reader.num_calls if self._reader else 0
            reason = _chat_finish(delta.finish_reason, calls)
            events.append(self._event("{}", finish_reason=f'"{reason}"'))
        return "".join(events).encode()

    def _changes(self, delta: Delta) -> list[str]:
        """The delta objects of OpenAI's chunks, as JSON."""
        if self._reader is None:
            return [f'{{"content":{_json(delta.text)}}}'] if delta.text else []
        before = self._reader.num_calls
        pieces = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish(closed=delta.stop_reason == CLOSING)
        changes = []
        for piece in pieces:
            if isinstance(piece, str):
                changes.append(f'{{"content":{_json(piece)}}}')
            else:
                call = {"index": before, **_called(piece).model_dump()}
                changes.append(f'{{"tool_calls":[{_json(call)}]}}')
                before += 1
        return changes

    def _event(self, change: str, logprobs: str = "null", finish_reason: str = "null") -> str:
        return (
            f'{self._head}{change},"logprobs":{logprobs},"finish_reason":{finish_reason}{self._end}'
        )


class CompletionWriter:
    """One choice of a completion; ``echo`` stands before its text."""

    def __init__(
        self,
        heading: Heading,
        index: int,
        *,
        num_logprobs: int | None = None,
        echo: str = "",
        usage: bool = False,
    ) -> None:
        self._head = f'{_start(heading, "text_completion")},"choices":[{{"index":{index},"text":'
        self._end = _end(usage)
        self._num_logprobs = num_logprobs
        self._echo = echo
        self._offset = 0

    def push(self, delta: Delta) -> bytes:
        """The event of a delta."""
        text = self._echo + delta.text
        self._echo = ""
        logprobs = finish_reason = "null"
        if self._num_logprobs is not None and delta.logprobs:
            told = completion_logprobs(delta.logprobs, self._num_logprobs, self._offset)
            self._offset += sum(map(len, told.tokens))
            logprobs = _json(told.model_dump())
        if delta.finish_reason is not None:
            finish_reason = f'"{_finish(delta.finish_reason)}"'
        elif not text and logprobs == "null":
            return b""
        return (
            f'{self._head}{_json(text)},"logprobs":{logprobs},"finish_reason":{finish_reason}'
            f"{self._end}"
        ).encode()


def usage_event(heading: Heading, kind: str, counts: Counts) -> bytes:
    """The chunk that ``include_usage`` asks for."""
    usage = counts.usage.model_dump_json()
    return f'{_start(heading, kind)},"choices":[],"usage":{usage}}}\n\n'.encode()


def chat_answer(
    heading: Heading,
    results: Sequence[Result],
    counts: Counts,
    *,
    num_logprobs: int | None,
    tool_calls: bool,
) -> schema.ChatCompletion:
    """The answer of a chat, its choices in order."""
    choices = []
    for index, result in enumerate(results):
        pieces: list[str | CalledTool] = [result.text]
        if tool_calls:
            reader = ToolCallReader()
            pieces = reader.push(result.text)
            pieces += reader.finish(closed=result.stop_reason == CLOSING)
        calls = [_called(piece) for piece in pieces if isinstance(piece, CalledTool)]
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        message = schema.AnswerMessage(
            content=text if text or not calls else None, tool_calls=calls or None
        )
        logprobs = None
        if num_logprobs is not None:
            logprobs = chat_logprobs(result.logprobs, num_logprobs)
        choices.append(
            schema.ChatChoice(
                index=index,
                message=message,
                logprobs=logprobs,
                finish_reason=_chat_finish(result.finish_reason, len(calls)),
            )
        )
    return schema.ChatCompletion(
        id=heading.id,
        created=heading.created,
        model=heading.model,
        choices=choices,
        usage=counts.usage,
    )


def completion_answer(
    heading: Heading,
    results: Sequence[Result],
    counts: Counts,
    *,
    num_logprobs: int | None,
    echoes: Sequence[str],
) -> schema.Completion:
    """The answer of a completion, its choices in order, each behind its echo."""
    choices = []
    for index, (result, echo) in enumerate(zip(results, echoes, strict=True)):
        logprobs = None
        if num_logprobs is not None:
            logprobs = completion_logprobs(result.logprobs, num_logprobs)
        choices.append(
            schema.CompletionChoice(
                index=index,
                text=echo + result.text,
                logprobs=logprobs,
                finish_reason=_finish(result.finish_reason),
            )
        )
    return schema.Completion(
        id=heading.id,
        created=heading.created,
        model=heading.model,
        choices=choices,
        usage=counts.usage,
    )


def _start(heading: Heading, kind: str) -> str:
    fields: dict[str, Any] = {
        "id": heading.id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
    }
    return "data: " + _json(fields)[:-1]


def _end(usage: bool) -> str:
    """After a choice; with ``include_usage`` all chunks but the last say that they have none."""
    return '}],"usage":null}\n\n' if usage else "}]}\n\n"


def _called(piece: CalledTool) -> schema.CalledTool:
    return schema.CalledTool(
        id=f"call_{uuid.uuid4().hex[:24]}",
        function=schema.CalledFunction(name=piece.name, arguments=piece.arguments),
    )


def _finish(reason: str | None) -> Literal["stop", "length"]:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise api_error_of_finish(reason)


def _chat_finish(reason: str | None, num_calls: int) -> Literal["stop", "length", "tool_calls"]:
    known = _finish(reason)
    return "tool_calls" if known == "stop" and num_calls else known
