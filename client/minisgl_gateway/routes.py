"""The routes that answer: those of completions, of the Responses and of the Messages API.

On top of ``Service``. Must not know how the engine is asked, or how an answer is written
(``Renderer``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from minisgl_client.errors import MinisglError
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from minisgl_gateway.completions.rendering import ChatRenderer, CompletionRenderer
from minisgl_gateway.completions.schema import ChatCompletionRequest, CompletionRequest
from minisgl_gateway.completions.translation import chat_of, completion_generations, num_samples
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.errors import ApiError, shown, unsupported
from minisgl_gateway.event_stream import gathered
from minisgl_gateway.form_schema import form_of
from minisgl_gateway.generation import Generation
from minisgl_gateway.job import Job, named_prompt
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.messages import translation as messages_api
from minisgl_gateway.messages.answer import CountedTokens
from minisgl_gateway.messages.rendering import MessagesRenderer
from minisgl_gateway.messages.schema import CountTokensRequest, MessagesRequest
from minisgl_gateway.parts import AnswerReader
from minisgl_gateway.request_state import state_of
from minisgl_gateway.responses import answer as schema
from minisgl_gateway.responses import translation as responses_api
from minisgl_gateway.responses.memory import Kept, ResponseMemory
from minisgl_gateway.responses.rendering import ResponseRenderer
from minisgl_gateway.responses.schema import InputTokensRequest, ResponsesRequest
from minisgl_gateway.service import Service

_Found = TypeVar("_Found")


class CompletionRoutes:
    """OpenAI's API of chat completions and completions."""

    def __init__(self, service: Service, lookups: Lookups) -> None:
        self._service = service
        self._lookups = lookups

    async def chat(self, http: Request) -> HttpResponse:
        """POST /v1/chat/completions."""
        request = await self._service.received(ChatCompletionRequest, http)
        chat, renderer = chat_of(request), ChatRenderer(request)
        state_of(http.scope).request_id = renderer.id
        if request.return_token_ids:
            tokens = await self._lookups.chat_tokens(http, chat, ChatCompletionRequest.model_fields)
            renderer.prompt_ids = tokens.ids
        return await self._service.answer_chat(http, chat, renderer)

    async def completions(self, http: Request) -> HttpResponse:
        """POST /v1/completions."""
        request = await self._service.received(CompletionRequest, http)
        generations = completion_generations(request, self._service.policy(http))
        renderer = CompletionRenderer(request)
        state_of(http.scope).request_id = renderer.id
        scored = request.logprobs is not None
        echo = partial(self._lookups.echo, scored=scored) if request.echo else None
        prompt_ids = self._lookups.prompt_ids if request.return_token_ids else None
        renderer.echoes = await _looked_up(echo, request, generations)
        renderer.prompt_ids = await _looked_up(prompt_ids, request, generations)
        includes_stop = request.include_stop_str_in_output
        num_choices = len(generations) * request.n
        readers = [AnswerReader(includes_stop=includes_stop) for _ in range(num_choices)]
        _, param = form_of(request)
        job = Job(
            generations,
            readers,
            renderer,
            lambda message: (param, message),
            request.n,
            num_samples(request),
        )
        return await self._service.answer(http, job, stream=request.stream)


class ResponsesRoutes:
    """OpenAI's Responses API: new responses, stored ones, and the lengths of prompts."""

    def __init__(self, service: Service, lookups: Lookups, memory: ResponseMemory) -> None:
        self._service = service
        self._lookups = lookups
        self._memory = memory

    async def create(self, http: Request) -> HttpResponse:
        """POST /v1/responses."""
        request = await self._service.received(ResponsesRequest, http)
        label = state_of(http.scope).caller.label
        messages = self._messages(label, request)

        def keep(response: schema.Response) -> None:
            items = {item.id: item.model_dump() for item in response.output}
            whole = [*messages, *responses_api.messages_of_output(items.values())]
            body = response.model_dump_json().encode()
            self._memory.keep(label, Kept.of(response.id, body, whole, items))

        chat = responses_api.chat_of(request, messages)
        return await self._service.answer_chat(http, chat, ResponseRenderer(request, keep))

    async def count_tokens(self, http: Request) -> schema.CountedInput:
        """POST /v1/responses/input_tokens."""
        request = await self._service.received(InputTokensRequest, http)
        messages = self._messages(state_of(http.scope).caller.label, request)
        chat = responses_api.counted_chat(request, messages)
        tokens = await self._lookups.chat_tokens(http, chat, InputTokensRequest.model_fields)
        return schema.CountedInput(input_tokens=len(tokens.ids))

    async def retrieve(self, id: str, http: Request) -> HttpResponse:
        """GET /v1/responses/{id}; raises ``ApiError`` 404."""
        if http.query_params.get("stream", "false") != "false":
            raise unsupported("stream is not supported: only whole responses are kept", "stream")
        included = [http.query_params.getlist(name) for name in ("include", "include[]")]
        if any(responses_api.LOGPROBS in names for names in included):
            raise unsupported(
                "include is not supported: a response comes as it was answered", "include"
            )
        kept = self._memory.find(state_of(http.scope).caller.label, id)
        if kept is None:
            raise _not_kept(id)
        return HttpResponse(kept.body, media_type="application/json")

    async def delete(self, id: str, http: Request) -> schema.DeletedResponse:
        """DELETE /v1/responses/{id}; raises ``ApiError`` 404."""
        if not self._memory.remove(state_of(http.scope).caller.label, id):
            raise _not_kept(id)
        return schema.DeletedResponse(id=id)

    def _messages(self, label: str, request: InputTokensRequest) -> list[Mapping[str, Any]]:
        """The conversation so far, and the input of a request; raises ``ApiError`` 404."""
        history = self._history(label, request.previous_response_id)
        new = responses_api.messages_of(request.input, lambda id: self._item(label, id))
        return [*history, *new]

    def _history(self, label: str, id: str | None) -> tuple[Mapping[str, Any], ...]:
        """The conversation up to and including a kept response."""
        if id is None:
            return ()
        kept = self._memory.find(label, id)
        if kept is None:
            raise ApiError(
                404,
                f"Previous response with id {_quoted(id)} not found.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return tuple(kept.messages)

    def _item(self, label: str, id: str) -> Mapping[str, Any]:
        item = self._memory.find_item(label, id)
        if item is None:
            raise ApiError(
                404, f"Item with id {_quoted(id)} not found.", code="not_found", param="input"
            )
        return item


class MessagesRoutes:
    """Anthropic's API: answers, and the lengths of prompts."""

    def __init__(self, service: Service, lookups: Lookups) -> None:
        self._service = service
        self._lookups = lookups

    async def create(self, http: Request) -> HttpResponse:
        """POST /v1/messages."""
        request = await self._service.received(MessagesRequest, http)
        chat = messages_api.chat_of(request)
        renderer = MessagesRenderer(request, state_of(http.scope).callers_id)
        return await self._service.answer_chat(http, chat, renderer)

    async def count_tokens(self, http: Request) -> CountedTokens:
        """POST /v1/messages/count_tokens."""
        request = await self._service.received(CountTokensRequest, http)
        chat, fields = messages_api.counted_chat(request), CountTokensRequest.model_fields
        tokens = await self._lookups.chat_tokens(http, chat, fields)
        return CountedTokens(input_tokens=len(tokens.ids))


async def _looked_up(
    lookup: Callable[[Generation], Awaitable[_Found]] | None,
    request: CompletionRequest,
    generations: Sequence[Generation],
) -> list[_Found | None]:
    """What is found out about each choice's prompt, if it is asked for; raises ``ApiError``."""
    if lookup is None:
        return [None for _ in generations for _ in range(request.n)]

    async def one(index: int) -> _Found:
        try:
            return await lookup(generations[index])
        except MinisglError as error:
            names = named_prompt("prompt", index, len(generations))
            raise api_error(error, CompletionRequest.model_fields, names) from error

    found = await gathered(one, len(generations))
    return [it for it in found for _ in range(request.n)]


def _not_kept(id: str) -> ApiError:
    return ApiError(404, f"Response with id {_quoted(id)} not found.", code="not_found")


def _quoted(id: str) -> str:
    """An id as OpenAI's messages quote it; an unknown one may be any text."""
    return f"'{id}'" if id.isascii() and id.isprintable() and len(id) <= 80 else shown(id)
