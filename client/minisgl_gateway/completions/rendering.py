"""How chat completions and completions are answered: whole, or as a stream that ends in ``[DONE]``.

Must not know how the engine is asked, or how bytes are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from minisgl_gateway.completions.answers import (
    CallForm,
    Echo,
    Heading,
    chat_answer,
    completion_answer,
)
from minisgl_gateway.completions.events import DONE, ChatWriter, CompletionWriter, usage_event
from minisgl_gateway.completions.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from minisgl_gateway.completions.translation import (
    continues_usage,
    includes_usage,
    name_of_max_tokens,
)
from minisgl_gateway.counts import Counts
from minisgl_gateway.errors import ApiError
from minisgl_gateway.parts import Piece


class _EndingInDone:
    """What the streams of chat completions and completions have in common."""

    _kind: ClassVar[str]
    """The ``object`` of each chunk."""

    def __init__(self, request: GenerationRequest, heading: Heading) -> None:
        self._includes_usage = includes_usage(request)
        self._heading = heading

    @property
    def id(self) -> str:
        return self._heading.id

    def closing(self, counts: Counts) -> bytes:
        if not self._includes_usage:
            return DONE
        return usage_event(self._heading, self._kind, counts) + DONE

    def failure(self, error: ApiError) -> bytes:
        return error.event


class ChatRenderer(_EndingInDone):
    """OpenAI's chat completions; with ``prompt_ids`` they tell tokens, as vLLM's do."""

    _kind = "chat.completion.chunk"
    fields = ChatCompletionRequest.model_fields

    def __init__(self, request: ChatCompletionRequest) -> None:
        super().__init__(request, Heading.of("chatcmpl", request.model))
        self._request = request
        self.names: Mapping[str, str] = {"max_tokens": name_of_max_tokens(request)}
        self._num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        self.prompt_ids: Sequence[int] | None = None
        self._call_form: CallForm = "tool_calls" if request.tools else "function_call"

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        answer = chat_answer(
            self._heading,
            choices,
            counts,
            num_logprobs=self._num_logprobs,
            num_prompt_logprobs=self._request.prompt_logprobs,
            prompt_ids=self.prompt_ids,
            call_form=self._call_form,
            tells_thoughts=self._request.include_reasoning,
        )
        return answer.model_dump_json().encode()

    def writer(self, index: int) -> ChatWriter:
        return ChatWriter(
            self._heading,
            index,
            num_logprobs=self._num_logprobs,
            prompt_ids=self.prompt_ids,
            call_form=self._call_form,
            tells_thoughts=self._request.include_reasoning,
            usage=self._includes_usage,
            continuous=continues_usage(self._request),
        )


class CompletionRenderer(_EndingInDone):
    """OpenAI's completions; ``echoes`` and ``prompt_ids`` have one for each choice."""

    _kind = "text_completion"
    fields = CompletionRequest.model_fields
    names: Mapping[str, str] = {}

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, Heading.of("cmpl", request.model))
        self._request = request
        self.echoes: Sequence[Echo | None] = ()
        self.prompt_ids: Sequence[Sequence[int] | None] = ()

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        answer = completion_answer(
            self._heading,
            choices,
            counts,
            num_logprobs=self._request.logprobs,
            num_prompt_logprobs=self._request.prompt_logprobs,
            echoes=self.echoes,
            prompt_ids=self.prompt_ids,
        )
        return answer.model_dump_json().encode()

    def writer(self, index: int) -> CompletionWriter:
        return CompletionWriter(
            self._heading,
            index,
            num_logprobs=self._request.logprobs,
            echo=self.echoes[index],
            prompt_ids=self.prompt_ids[index],
            usage=self._includes_usage,
            continuous=continues_usage(self._request),
        )
