"""Pieces of an answer -> the events of a stream as OpenAI's clients read them.

``ChatWriter`` and ``CompletionWriter`` are on the path of every chunk: what repeats is made once
per stream, and only new text is encoded. Must not know connections, or how the engine is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from minisgl_client.answer import TokenLogprobs

from minisgl_gateway.completions.answers import (
    CallForm,
    Echo,
    Heading,
    TextOffsets,
    called,
    chat_finish,
    chat_logprobs,
    completion_logprobs,
    finish,
    token_ids,
    usage_of,
)
from minisgl_gateway.counts import Counts
from minisgl_gateway.event_stream import to_json
from minisgl_gateway.parts import Part, Piece
from minisgl_gateway.thinking import Thought

DONE: Final = b"data: [DONE]\n\n"


class ChatWriter:
    """One choice of a chat. ``num_logprobs`` is None if logprobs were not asked for. With
    ``prompt_ids`` the first chunk has these, and chunks have the tokens that have come with them.
    With ``continuous`` every chunk has the number of tokens so far."""

    def __init__(
        self,
        heading: Heading,
        index: int,
        *,
        num_logprobs: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        call_form: CallForm = "tool_calls",
        tells_thoughts: bool = True,
        usage: bool = False,
        continuous: bool = False,
    ) -> None:
        start = _start(heading, "chat.completion.chunk")
        self._head = f'{start},"choices":[{{"index":{index},"delta":'
        self._end = _end(usage)
        self._num_logprobs = num_logprobs
        self._prompt_ids = prompt_ids
        self._call_form = call_form
        self._tells_thoughts = tells_thoughts
        self._num_calls = 0
        self._counts = Counts() if continuous else None
        self._opened = False

    def push(self, piece: Piece) -> bytes:
        """The events of a piece."""
        delta = piece.source
        if self._counts is not None:
            self._end = _told(self._counts, piece)
        events = []
        if not self._opened:
            self._opened = True
            opening = self._event('{"role":"assistant","content":""}')
            if self._prompt_ids is not None:
                told = f'}}],"prompt_token_ids":{to_json(list(self._prompt_ids))}'
                opening = opening.removesuffix(self._end) + told + self._end.removeprefix("}]")
            events.append(opening)
        logprobs, ids = "null", ""
        if self._prompt_ids is not None and delta.logprobs:
            ids = f',"token_ids":{to_json(token_ids(delta))}'
        if self._num_logprobs is not None and delta.logprobs:
            logprobs = to_json(chat_logprobs(delta.logprobs, self._num_logprobs).model_dump())
        changes = [
            self._change(part)
            for part in piece.parts
            if self._tells_thoughts or not isinstance(part, Thought)
        ]
        for change in changes or (['{"content":""}'] if logprobs != "null" or ids else []):
            events.append(self._event(change, logprobs, ids=ids))
            logprobs, ids = "null", ""
        if piece.ending is not None:
            reason = chat_finish(piece, self._call_form)
            events.append(self._event("{}", finish_reason=f'"{reason}"'))
        return "".join(events).encode()

    def _change(self, part: Part) -> str:
        """The delta object of one of OpenAI's chunks, as JSON."""
        if isinstance(part, str):
            return f'{{"content":{to_json(part)}}}'
        if isinstance(part, Thought):
            return f'{{"reasoning_content":{to_json(part.text)}}}'
        if self._call_form == "function_call":
            return f'{{"function_call":{to_json(called(part).function.model_dump())}}}'
        call = {"index": self._num_calls, **called(part).model_dump()}
        self._num_calls += 1
        return f'{{"tool_calls":[{to_json(call)}]}}'

    def _event(
        self, change: str, logprobs: str = "null", finish_reason: str = "null", ids: str = ""
    ) -> str:
        return (
            f'{self._head}{change},"logprobs":{logprobs},"finish_reason":{finish_reason}{ids}'
            f"{self._end}"
        )


class CompletionWriter:
    """One choice of a completion; ``echo``, if any, comes before its text and, with
    ``num_logprobs``, its logprobs. The rest is as for a chat."""

    def __init__(
        self,
        heading: Heading,
        index: int,
        *,
        num_logprobs: int | None = None,
        echo: Echo | None = None,
        prompt_ids: Sequence[int] | None = None,
        usage: bool = False,
        continuous: bool = False,
    ) -> None:
        self._head = f'{_start(heading, "text_completion")},"choices":[{{"index":{index},"text":'
        self._end = _end(usage)
        self._num_logprobs = num_logprobs
        self._counts = Counts() if continuous else None
        self._tells_ids = prompt_ids is not None
        self._prompt_ids = prompt_ids
        self._echo_text = "" if echo is None else echo.text
        self._echo = echo
        self._offsets = TextOffsets()

    def push(self, piece: Piece) -> bytes:
        """The event of a piece."""
        delta = piece.source
        if self._counts is not None:
            self._end = _told(self._counts, piece)
        text, self._echo_text = self._echo_text + delta.text, ""
        logprobs = finish_reason = "null"
        tokens: tuple[TokenLogprobs | None, ...] = delta.logprobs
        if self._echo is not None:
            tokens = (*delta.prompt_logprobs, *tokens)
        if self._num_logprobs is not None and tokens:
            told = completion_logprobs(tokens, self._num_logprobs, self._offsets, self._echo)
            logprobs = to_json(told.model_dump())
        if piece.ending is not None:
            finish_reason = f'"{finish(piece)}"'
        elif not text and logprobs == "null" and not (self._tells_ids and delta.logprobs):
            return b""
        ids = f',"token_ids":{to_json(token_ids(delta))}' if self._tells_ids else ""
        if self._prompt_ids is not None:
            ids += f',"prompt_token_ids":{to_json(list(self._prompt_ids))}'
            self._prompt_ids = None
        return (
            f'{self._head}{to_json(text)},"logprobs":{logprobs},"finish_reason":{finish_reason}'
            f"{ids}{self._end}"
        ).encode()


def usage_event(heading: Heading, kind: str, counts: Counts) -> bytes:
    """The chunk that ``include_usage`` asks for."""
    usage = usage_of(counts).model_dump_json()
    return f'{_start(heading, kind)},"choices":[],"usage":{usage}}}\n\n'.encode()


def _start(heading: Heading, kind: str) -> str:
    fields: dict[str, Any] = {
        "id": heading.id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
    }
    return "data: " + to_json(fields)[:-1]


def _told(counts: Counts, piece: Piece) -> str:
    """The end of a chunk, with the tokens of the prompt and of the answer up to this piece."""
    delta = piece.source
    counts.num_input_tokens = delta.num_input_tokens or 0
    counts.num_cached_tokens = delta.num_cached_tokens or 0
    counts.num_output_tokens += delta.num_output_tokens or 0
    counts.num_thought_tokens += piece.num_thought_tokens
    return f'}}],"usage":{usage_of(counts).model_dump_json()}}}\n\n'


def _end(usage: bool) -> str:
    """The end of a chunk; with ``include_usage`` all chunks but the last have a null usage."""
    return '}],"usage":null}\n\n' if usage else "}]}\n\n"
