"""An answer in the form of the Messages API: whole, or as a stream of events.

An answer is a list of blocks: what the model thought, what it says, and each tool call. A stream
says when a block begins, gives its text as it comes, and says when it ends. ``MessagesRenderer``
goes through the same blocks for both. Must not know how an answer is generated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.counts import Counts
from minisgl_gateway.errors import ApiError
from minisgl_gateway.event_stream import named_event, to_json
from minisgl_gateway.messages import answer as schema
from minisgl_gateway.messages.schema import MessagesRequest
from minisgl_gateway.messages.translation import tells_thoughts
from minisgl_gateway.parts import Piece
from minisgl_gateway.thinking import Thought

SIGNATURE: Final = "unsigned"
"""The signature of thoughts: clients do not send back unsigned ones, and here any will do."""
_PING: Final = named_event("ping", {"type": "ping"})


class MessagesRenderer:
    """The answer to one request, which has one choice. ``callers_id`` is the id that the caller
    gave the request, or ""."""

    fields = MessagesRequest.model_fields
    names: Mapping[str, str] = {
        "stop": "stop_sequences",
        "enable_thinking": "thinking",
        "reasoning_effort": "output_config.effort",
    }

    def __init__(self, request: MessagesRequest, callers_id: str = "") -> None:
        self._callers_id = callers_id
        self._tells_thoughts = tells_thoughts(request)
        self._message = schema.MessagesAnswer(
            id=f"msg_{uuid.uuid4().hex}",
            model=request.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(0, 0),
        )
        self._texts: list[str] = []
        """The texts of the open block."""
        self._thinks: bool | None = None
        """Whether the open block is thoughts; None if no block is open."""
        self._delta = ""
        self._begun = False

    @property
    def id(self) -> str:
        return self._message.id

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        self.push(choices[0])
        self._end(counts)
        return self._message.model_dump_json().encode()

    def writer(self, index: int) -> MessagesRenderer:
        return self

    def push(self, piece: Piece) -> bytes:
        """The events of a piece of the answer."""
        events = [] if self._begun else self._begin(piece)
        for part in piece.parts:
            if isinstance(part, CalledTool):
                events += [*self._close(), *self._call(part)]
            elif not isinstance(part, Thought):
                events += self._add(part, thinks=False)
            elif self._tells_thoughts:
                events += self._add(part.text, thinks=True)
        if piece.ending is not None:
            events += self._close()
            message = self._message
            message.stop_sequence = piece.ending.stop
            if piece.ending.reason == "length":
                message.stop_reason = "max_tokens"
            elif piece.ending.stop is not None:
                message.stop_reason = "stop_sequence"
            else:
                message.stop_reason = "tool_use" if piece.num_calls else "end_turn"
        return "".join(events).encode()

    def closing(self, counts: Counts) -> bytes:
        self._end(counts)
        message = self._message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        told = {"delta": delta, "usage": message.usage.model_dump()}
        return (_event("message_delta", told) + _event("message_stop", {})).encode()

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error.anthropic_body(self._callers_id or self.id)).encode()

    def _begin(self, piece: Piece) -> list[str]:
        self._begun = True
        source = piece.source
        self._message.usage = _usage(source.num_input_tokens or 0, source.num_cached_tokens or 0)
        return [_event("message_start", {"message": self._message.model_dump()}), _PING]

    def _end(self, counts: Counts) -> None:
        self._message.usage = _usage(
            counts.num_input_tokens,
            counts.num_cached_tokens,
            counts.num_output_tokens,
            counts.num_thought_tokens,
        )

    # --- blocks ------------------------------------------------------------------------------

    def _add(self, text: str, *, thinks: bool) -> list[str]:
        """Add a text to the block that it belongs to; begin the block if necessary."""
        events = []
        if self._thinks is not thinks:
            events = [*self._close(), *self._open(thinks=thinks)]
        self._texts.append(text)
        events.append(f"{self._delta}{to_json(text)}}}}}\n\n")
        return events

    def _open(self, *, thinks: bool) -> list[str]:
        self._thinks = thinks
        index = len(self._message.content)
        kind, field = ("thinking_delta", "thinking") if thinks else ("text_delta", "text")
        self._delta = (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{index},"delta":{{"type":"{kind}","{field}":'
        )
        block: dict[str, Any] = {"type": field, field: ""}
        if thinks:
            block["signature"] = ""
        return [_event("content_block_start", {"index": index, "content_block": block})]

    def _close(self) -> list[str]:
        """End the open block, if there is one."""
        if self._thinks is None:
            return []
        index = len(self._message.content)
        text = "".join(self._texts)
        events = []
        block: schema.AnsweredBlock
        if self._thinks:
            block = schema.AnsweredThinkingBlock(thinking=text, signature=SIGNATURE)
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            events.append(_event("content_block_delta", {"index": index, "delta": delta}))
        else:
            block = schema.AnsweredTextBlock(text=text)
        self._message.content.append(block)
        self._texts = []
        self._thinks = None
        return [*events, _event("content_block_stop", {"index": index})]

    def _call(self, call: CalledTool) -> list[str]:
        index = len(self._message.content)
        block = schema.AnsweredToolUseBlock(
            id=f"toolu_{uuid.uuid4().hex[:24]}",
            name=call.name,
            input=json.loads(call.arguments),  # keeps the last value of a repeated key
        )
        self._message.content.append(block)
        begun = {**block.model_dump(), "input": {}}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [
            _event("content_block_start", {"index": index, "content_block": begun}),
            _event("content_block_delta", {"index": index, "delta": delta}),
            _event("content_block_stop", {"index": index}),
        ]


def _event(kind: str, told: Mapping[str, Any]) -> str:
    return named_event(kind, {"type": kind, **told})


def _usage(
    num_input: int, num_cached: int, num_output: int = 0, num_thought: int = 0
) -> schema.MessagesUsage:
    return schema.MessagesUsage(
        input_tokens=num_input - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=num_output,
        output_tokens_details=schema.ThinkingTokens(thinking_tokens=num_thought),
    )
