"""An answer in the form of the Responses API: whole, or as a stream of events.

An answer is a list of items: what the model thought, what it says, and each function call. A stream
says when an item begins, gives its text as it comes, and says when it is done; every event has a
number. ``ResponseRenderer`` builds the same items for both, so that a stream's last event has what
the whole answer would be. Must not know how an answer is generated.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.counts import Counts
from minisgl_gateway.errors import ApiError
from minisgl_gateway.event_stream import named_event, to_json
from minisgl_gateway.logprobs import TokenLogprob, token_logprobs
from minisgl_gateway.parts import Piece
from minisgl_gateway.responses import answer as schema
from minisgl_gateway.responses.schema import (
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
    Status,
)
from minisgl_gateway.responses.strictness import is_strict
from minisgl_gateway.responses.text_tokens import TextTokens
from minisgl_gateway.responses.translation import logprobs_of, namespaced
from minisgl_gateway.thinking import Thought

Keep = Callable[[schema.Response], None]
"""Takes a response to be remembered."""


class _OpenItem:
    """The item that texts go into: thoughts, or what is said."""

    def __init__(self, index: int, *, thinks: bool) -> None:
        self.index = index
        self.thinks = thinks
        self.id = f"{'rs' if thinks else 'msg'}_{uuid.uuid4().hex}"
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []

    @property
    def part(self) -> schema.Thoughts | schema.AnsweredText:
        """The only part of its content, as it is so far."""
        return self._thoughts() if self.thinks else self._said()

    def item(self, status: Status) -> schema.AnsweredReasoning | schema.AnsweredMessage:
        """The item as it is so far; at its beginning it has no content."""
        has_content = status != "in_progress"
        if self.thinks:
            thoughts = [self._thoughts()] if has_content else []
            return schema.AnsweredReasoning(id=self.id, status=status, content=thoughts)
        said = [self._said()] if has_content else []
        return schema.AnsweredMessage(id=self.id, status=status, content=said)

    def _thoughts(self) -> schema.Thoughts:
        return schema.Thoughts(text="".join(self.texts))

    def _said(self) -> schema.AnsweredText:
        return schema.AnsweredText(text="".join(self.texts), logprobs=self.logprobs)


class ResponseRenderer:
    """The answer to one request, which has one choice."""

    fields = ResponsesRequest.model_fields
    names: Mapping[str, str] = {
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "enable_thinking": "reasoning.effort",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, request: ResponsesRequest, keep: Keep) -> None:
        self._num_logprobs = logprobs_of(request)
        self._keep = keep
        self._namespaced = namespaced(request)
        self._response = _begun(request)
        self._open: _OpenItem | None = None
        self._delta_head = ""
        self._number = 0
        self._tokens = TextTokens()

    @property
    def id(self) -> str:
        return self._response.id

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        self.push(choices[0])
        self._end(counts)
        return self._response.model_dump_json().encode()

    def writer(self, index: int) -> ResponseRenderer:
        return self

    def push(self, piece: Piece) -> bytes:
        """The events of a piece of the answer."""
        events = []
        if not self._number:
            told = {"response": self._response.model_dump()}
            events += [self._event(f"response.{name}", told) for name in ("created", "in_progress")]
        if self._num_logprobs is not None:
            self._tokens.add(token_logprobs(piece.source.logprobs, self._num_logprobs))
        for part in piece.parts:
            if isinstance(part, CalledTool):
                self._tokens.skip(part.arguments)
                events += [*self._close("completed"), *self._call(part)]
            elif isinstance(part, Thought):
                self._tokens.skip(part.text)
                events += self._add(part.text, thinks=True)
            else:
                events += self._add(part, thinks=False)
        if piece.ending is not None:
            is_cut = piece.ending.reason == "length"
            if self._open is not None and not self._open.thinks and not is_cut:
                self._open.logprobs += self._tokens.take_rest()[-1:]  # what ended the answer
            events += self._close("incomplete" if is_cut else "completed")
            self._response.status = "incomplete" if is_cut else "completed"
        return "".join(events).encode()

    def closing(self, counts: Counts) -> bytes:
        self._end(counts)
        told = {"response": self._response.model_dump()}
        return self._event(f"response.{self._response.status}", told).encode()

    def failure(self, error: ApiError) -> bytes:
        if self._open is not None:
            self._response.output.append(self._open.item("incomplete"))
            self._open = None
        self._response.status = "failed"
        code = "server_error" if error.status >= 500 else error.code
        self._response.error = schema.ResponseError(code=code, message=error.message)
        about = {"code": error.code, "message": error.message, "param": error.param}
        told = {"response": self._response.model_dump()}
        return (self._event("error", about) + self._event("response.failed", told)).encode()

    def _end(self, counts: Counts) -> None:
        response = self._response
        if response.status == "incomplete":
            response.incomplete_details = schema.IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        response.usage = schema.ResponseUsage(
            input_tokens=counts.num_input_tokens,
            input_tokens_details=schema.InputTokensDetails(cached_tokens=counts.num_cached_tokens),
            output_tokens=counts.num_output_tokens,
            output_tokens_details=schema.OutputTokensDetails(
                reasoning_tokens=counts.num_thought_tokens
            ),
            total_tokens=counts.num_input_tokens + counts.num_output_tokens,
        )
        if response.store:
            self._keep(response)

    # --- items -------------------------------------------------------------------------------

    def _add(self, text: str, *, thinks: bool) -> list[str]:
        """Add a text to the item that it belongs to; begin the item if necessary."""
        events = []
        if self._open is None or self._open.thinks is not thinks:
            events = [*self._close("completed"), *self._begin(thinks=thinks)]
        assert self._open is not None
        self._open.texts.append(text)
        told = ""
        if not thinks:
            logprobs = self._tokens.take(text)
            self._open.logprobs += logprobs
            told = f',"logprobs":{to_json([one.model_dump() for one in logprobs])}'
        events.append(f'{self._delta_head}{self._next()},"delta":{to_json(text)}{told}}}\n\n')
        return events

    def _begin(self, *, thinks: bool) -> list[str]:
        item = self._open = _OpenItem(len(self._response.output), thinks=thinks)
        kind = "response.reasoning_text.delta" if thinks else "response.output_text.delta"
        where = to_json({"type": kind, **_place(item)})
        self._delta_head = f'event: {kind}\ndata: {where[:-1]},"sequence_number":'
        return [
            self._item_event("added", item.index, item.item("in_progress")),
            self._part_event("added", item),
        ]

    def _close(self, status: Status) -> list[str]:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        part = item.part
        kind = "response.reasoning_text.done" if item.thinks else "response.output_text.done"
        done = part.model_dump(include={"text", "logprobs"})
        whole = item.item(status)
        self._response.output.append(whole)
        return [
            self._event(kind, {**_place(item), **done}),
            self._part_event("done", item),
            self._item_event("done", item.index, whole),
        ]

    def _call(self, call: CalledTool) -> list[str]:
        index = len(self._response.output)
        namespace, name = self._namespaced.get(call.name, (None, call.name))
        item = schema.AnsweredCall(
            id=f"fc_{uuid.uuid4().hex}",
            status="completed",
            call_id=f"call_{uuid.uuid4().hex[:24]}",
            name=name,
            namespace=namespace,
            arguments=call.arguments,
        )
        self._response.output.append(item)
        begun = item.model_copy(update={"status": "in_progress", "arguments": ""})
        where = {"item_id": item.id, "output_index": index}
        kind = "response.function_call_arguments"
        return [
            self._item_event("added", index, begun),
            self._event(f"{kind}.delta", {**where, "delta": call.arguments}),
            self._event(f"{kind}.done", {**where, "name": name, "arguments": call.arguments}),
            self._item_event("done", index, item),
        ]

    # --- events ------------------------------------------------------------------------------

    def _item_event(self, what: str, index: int, item: BaseModel) -> str:
        told = {"output_index": index, "item": item.model_dump()}
        return self._event(f"response.output_item.{what}", told)

    def _part_event(self, what: str, item: _OpenItem) -> str:
        told = {**_place(item), "part": item.part.model_dump()}
        return self._event(f"response.content_part.{what}", told)

    def _event(self, kind: str, told: Mapping[str, Any]) -> str:
        data = {"type": kind, "sequence_number": self._next(), **told}
        return named_event(kind, data)

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number


def _place(item: _OpenItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def _begun(request: ResponsesRequest) -> schema.Response:
    """The response of a request before anything is answered."""
    form = request.text.format if request.text else None
    reasoning = request.reasoning
    return schema.Response(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        store=request.store,
        **{"temperature": None, "top_p": None, **request.given("temperature", "top_p")},
        text={"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
        tool_choice=request.tool_choice,
        tools=[_told_of(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
    )


def _told_of(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    """A tool as the answer repeats it."""
    if isinstance(tool, NamespaceTool):
        told = tool.model_dump(include={"type", "name", "description"})
        return {**told, "tools": [_told_of(function) for function in tool.tools]}
    told = tool.model_dump(include={"type", "name", "description", "parameters"})
    return {**told, "strict": is_strict(tool)}
