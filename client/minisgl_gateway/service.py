"""What the routes do: a checked request, its generations in the engine, and the answer.

Knows the engine through ``AsyncClient`` only. Whatever way a request ends, its generations have
ended in the engine too, and its place is free again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from minisgl_client.answer import Result
from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.admission import Admission
from minisgl_gateway.answers import Counts, Echo, Heading, chat_answer, completion_answer
from minisgl_gateway.body import received
from minisgl_gateway.conversion import (
    Generation,
    Policy,
    call_form,
    chat_generations,
    completion_generations,
    continues_usage,
    includes_usage,
)
from minisgl_gateway.errors import GONE, ApiError, api_error, busy
from minisgl_gateway.event_stream import (
    Disconnected,
    EventStream,
    ended,
    merged,
    unless_disconnected,
)
from minisgl_gateway.events import DONE, ChatWriter, CompletionWriter, Writer, usage_event
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.keys import Caller
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from minisgl_gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)
_Request = TypeVar("_Request", bound=GenerationRequest)
_HEALTH_S: Final = 5.0
_PROBED_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Probe:
    """Whether the engine took requests, and until when this answer is used."""

    is_ready: bool
    until_s: float


class Service:
    """One gateway in front of one engine."""

    def __init__(
        self,
        options: GatewayOptions,
        engine: AsyncClient,
        lookups: Lookups,
        telemetry: Telemetry,
    ) -> None:
        self._options = options
        self._engine = engine
        self._lookups = lookups
        self._telemetry = telemetry
        self._admission = Admission(options.max_requests, options.max_requests_per_key)
        self._probing = asyncio.Lock()
        self._probe = _Probe(is_ready=False, until_s=0.0)

    # --- routes ------------------------------------------------------------------------------

    async def chat(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        request = await self._received(ChatCompletionRequest, http)
        caller: Caller = http.scope["state"]["caller"]
        generations = chat_generations(request, self._policy(http))
        heading = Heading.of("chatcmpl", request.model)
        http.scope["state"]["request_id"] = heading.id
        form = call_form(request)
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        if not request.stream:

            def body(results: Sequence[Result], counts: Counts) -> BaseModel:
                return chat_answer(
                    heading,
                    results,
                    counts,
                    num_logprobs=num_logprobs,
                    num_prompt_logprobs=request.prompt_logprobs,
                    call_form=form,
                )

            return await self._whole(http, caller, heading, generations, request, body)
        writers = [
            ChatWriter(
                heading,
                index,
                num_logprobs=num_logprobs,
                call_form=form,
                usage=includes_usage(request),
                continuous=continues_usage(request),
            )
            for index in range(len(generations))
        ]
        return self._streamed(
            caller, heading, generations, writers, request, "chat.completion.chunk"
        )

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        request = await self._received(CompletionRequest, http)
        caller: Caller = http.scope["state"]["caller"]
        generations = completion_generations(request, self._policy(http))
        heading = Heading.of("cmpl", request.model)
        http.scope["state"]["request_id"] = heading.id
        echoes = await self._echoes(request, generations)
        if not request.stream:

            def body(results: Sequence[Result], counts: Counts) -> BaseModel:
                return completion_answer(
                    heading,
                    results,
                    counts,
                    num_logprobs=request.logprobs,
                    num_prompt_logprobs=request.prompt_logprobs,
                    echoes=echoes,
                )

            return await self._whole(http, caller, heading, generations, request, body)
        writers = [
            CompletionWriter(
                heading,
                index,
                num_logprobs=request.logprobs,
                echo=echo,
                usage=includes_usage(request),
                continuous=continues_usage(request),
            )
            for index, echo in enumerate(echoes)
        ]
        return self._streamed(caller, heading, generations, writers, request, "text_completion")

    async def health(self) -> schema.Health:
        """GET /health; raises ``ApiError`` 503 if the engine takes no requests.

        A request to cancel an unknown id goes all the way through it, costs nothing, and is
        taken by a full queue too, which is no reason to take the gateway out of service. One such
        probe serves all who ask within a second, since it needs no key.
        """
        async with self._probing:
            if time.monotonic() >= self._probe.until_s:
                is_ready = await self._is_ready()
                self._probe = _Probe(is_ready, time.monotonic() + _PROBED_S)
        if not self._probe.is_ready:
            raise busy(503, "the engine is not ready", "engine_unavailable")
        return schema.Health()

    async def _is_ready(self) -> bool:
        try:
            await asyncio.wait_for(self._engine.cancel(f"health-{uuid.uuid4().hex}"), _HEALTH_S)
        except (MinisglError, asyncio.TimeoutError):
            return False
        return True

    # --- the way of a request ----------------------------------------------------------------

    async def _received(self, kind: type[_Request], http: Request) -> _Request:
        request = await received(kind, http)
        self._lookups.check_model(request.model)
        return request

    def _policy(self, http: Request) -> Policy:
        state = http.scope["state"]
        left_s = state["deadline_s"] - time.monotonic()
        return Policy(
            left_s,
            self._options.default_max_tokens,
            self._options.shorten_max_tokens,
            state["caller"].salt,
        )

    async def _echoes(
        self, request: CompletionRequest, generations: Sequence[Generation]
    ) -> list[Echo | None]:
        """What stands before each answer, if it is asked for."""
        if not request.echo:
            return [None] * len(generations)
        scored = request.logprobs is not None
        tasks = [
            asyncio.ensure_future(self._lookups.echo(generation, scored=scored))
            for generation in generations[:: request.n]
        ]
        try:
            with _as_api_errors(CompletionRequest):
                return [echo for echo in await asyncio.gather(*tasks) for _ in range(request.n)]
        finally:
            await ended(*tasks)

    async def _whole(
        self,
        http: Request,
        caller: Caller,
        heading: Heading,
        generations: Sequence[Generation],
        request: GenerationRequest,
        body: Callable[[Sequence[Result], Counts], BaseModel],
    ) -> Response:
        with self._admission.admit(caller.label, len(generations)):
            try:
                with _as_api_errors(type(request)):
                    results = await unless_disconnected(
                        http.receive, self._results(heading, generations)
                    )
            except Disconnected:
                logger.info("%s: the client went away", heading.id)
                return Response(status_code=GONE)
            except ApiError as error:
                logger.info("%s: %s", heading.id, error.story)
                raise
        counts = Counts()
        for index, result in enumerate(results):
            counts.add(result, prompt=index % request.n == 0)
        return Response(body(results, counts).model_dump_json(), media_type="application/json")

    async def _results(self, heading: Heading, generations: Sequence[Generation]) -> list[Result]:
        """The results of all generations; the first error ends them all."""
        tasks = [
            asyncio.ensure_future(self._engine.generate(**_call(heading, index, generation)))
            for index, generation in enumerate(generations)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await ended(*tasks)

    def _streamed(
        self,
        caller: Caller,
        heading: Heading,
        generations: Sequence[Generation],
        writers: Sequence[Writer],
        request: GenerationRequest,
        kind: str,
    ) -> Response:
        counts = Counts()

        async def choice(index: int) -> AsyncGenerator[bytes, None]:
            writer = writers[index]
            has_prompt = index % request.n == 0
            call = _call(heading, index, generations[index])
            with _as_api_errors(type(request)):
                async with self._engine.stream(**call) as stream:
                    async for delta in stream:
                        counts.add(delta, prompt=has_prompt)
                        if event := writer.push(delta):
                            yield event

        async def events() -> AsyncGenerator[bytes, None]:
            with self._admission.admit(caller.label, len(generations)):
                choices = [choice(index) for index in range(len(generations))]
                async with aclosing(merged(choices) if len(choices) > 1 else choices[0]) as merging:
                    async for event in merging:
                        yield event

        def closing() -> bytes:
            usage = usage_event(heading, kind, counts) if includes_usage(request) else b""
            return usage + DONE

        return EventStream(
            events(),
            closing,
            request_id=heading.id,
            telemetry=self._telemetry,
        )


@contextmanager
def _as_api_errors(kind: type[GenerationRequest]) -> Iterator[None]:
    """Errors of the engine as those of a request of this kind."""
    try:
        yield
    except MinisglError as error:
        raise api_error(error, kind.model_fields) from error


def _call(heading: Heading, index: int, generation: Generation) -> dict[str, Any]:
    """The arguments of a call of the engine; choices are told apart in its log."""
    return {
        "prompt": generation.prompt,
        "messages": generation.messages,
        "input_ids": generation.input_ids,
        "tools": generation.tools,
        "request_id": f"{heading.id}.{index}",
        **generation.parameters,
    }
