"""How an API writes the answer to one of its requests.

A route makes a ``Renderer`` for each request, and ``Service`` gives it the answer: either all of
its choices at once (``body``), or the pieces of each choice as they come (``writer``), and then
what concerns all choices (``closing``, or ``failure``).

A writer's first piece has the number of input tokens (``piece.source``, if ``Chat.tells_counts`` is
set), so that a stream can begin with it. A renderer that keeps complete answers for later requests
stores them in ``body`` or ``closing``. Must not know how the engine is asked, or how bytes are
sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Protocol

from minisgl_gateway.answers import CallForm, Counts, Echo, Heading, chat_answer, completion_answer
from minisgl_gateway.conversion import continues_usage, includes_usage, name_of_max_tokens
from minisgl_gateway.errors import ApiError
from minisgl_gateway.events import DONE, ChatWriter, CompletionWriter, usage_event
from minisgl_gateway.parts import Piece
from minisgl_gateway.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest


class Writer(Protocol):
    """Writes one choice of a stream."""

    def push(self, piece: Piece) -> bytes:
        """The events of a piece, which may be none."""
        ...


class Renderer(Protocol):
    """The answer to one request."""

    @property
    def id(self) -> str:
        """The id of the answer, which also appears in the log."""
        ...

    @property
    def fields(self) -> Collection[str]:
        """Names that an error may have as its ``param``."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """Names of the API for those of the engine, if they differ (see
        ``engine_errors.api_error``)."""
        ...

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        """The whole answer as JSON; a piece is a whole choice."""
        ...

    def writer(self, index: int) -> Writer:
        """The writer of a choice."""
        ...

    def closing(self, counts: Counts) -> bytes:
        """The last events, after all choices have ended."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event if the answer fails."""
        ...


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
    """OpenAI's chat completions."""

    _kind = "chat.completion.chunk"
    fields = ChatCompletionRequest.model_fields

    def __init__(self, request: ChatCompletionRequest) -> None:
        super().__init__(request, Heading.of("chatcmpl", request.model))
        self._request = request
        self.names: Mapping[str, str] = {"max_tokens": name_of_max_tokens(request)}
        self._num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        self._call_form: CallForm = "tool_calls" if request.tools else "function_call"

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        answer = chat_answer(
            self._heading,
            choices,
            counts,
            num_logprobs=self._num_logprobs,
            num_prompt_logprobs=self._request.prompt_logprobs,
            call_form=self._call_form,
            tells_thoughts=self._request.include_reasoning,
        )
        return answer.model_dump_json().encode()

    def writer(self, index: int) -> ChatWriter:
        return ChatWriter(
            self._heading,
            index,
            num_logprobs=self._num_logprobs,
            call_form=self._call_form,
            tells_thoughts=self._request.include_reasoning,
            usage=self._includes_usage,
            continuous=continues_usage(self._request),
        )


class CompletionRenderer(_EndingInDone):
    """OpenAI's completions; ``echoes`` has one for each choice."""

    _kind = "text_completion"
    fields = CompletionRequest.model_fields
    names: Mapping[str, str] = {}

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, Heading.of("cmpl", request.model))
        self._request = request
        self.echoes: Sequence[Echo | None] = ()

    def body(self, choices: Sequence[Piece], counts: Counts) -> bytes:
        answer = completion_answer(
            self._heading,
            choices,
            counts,
            num_logprobs=self._request.logprobs,
            num_prompt_logprobs=self._request.prompt_logprobs,
            echoes=self.echoes,
        )
        return answer.model_dump_json().encode()

    def writer(self, index: int) -> CompletionWriter:
        return CompletionWriter(
            self._heading,
            index,
            num_logprobs=self._request.logprobs,
            echo=self.echoes[index],
            usage=self._includes_usage,
            continuous=continues_usage(self._request),
        )
