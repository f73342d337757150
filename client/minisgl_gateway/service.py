"""What routes have in common: they check a request, generate in the engine, and answer.

Knows the engine only through ``Engine``. However a request ends, its generations end in the engine
too, and its place becomes free. Must not know which routes there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

from minisgl_client.answer import Result
from minisgl_client.errors import MinisglError
from starlette.requests import Request
from starlette.responses import Response

from minisgl_gateway.adapters import Adapters
from minisgl_gateway.admission import Admission
from minisgl_gateway.body import received
from minisgl_gateway.chat import Chat
from minisgl_gateway.counts import Counts
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.errors import GONE, ApiError, client_gone
from minisgl_gateway.event_stream import (
    Disconnected,
    EventStream,
    gathered,
    merged,
    unless_disconnected,
)
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.generation import Policy
from minisgl_gateway.job import Job, named_prompt
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.renderers import Renderer
from minisgl_gateway.request_state import state_of
from minisgl_gateway.servers import Engine
from minisgl_gateway.strict_schema import Body
from minisgl_gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)
_Request = TypeVar("_Request", bound=Body)
_Outcome = TypeVar("_Outcome")
_AT_ONCE: Final = 16
"""The most simultaneous calls of the engine for a request with many inputs."""


class Service:
    """What routes need of one gateway, in front of one engine or of several servers."""

    def __init__(
        self,
        options: GatewayOptions,
        engine: Engine,
        lookups: Lookups,
        adapters: Adapters,
        telemetry: Telemetry,
    ) -> None:
        self._options = options
        self._adapters = adapters
        self._engine = engine
        self._lookups = lookups
        self._telemetry = telemetry
        self._admission = Admission(options.max_requests, options.max_requests_per_key)

    async def received(self, kind: type[_Request], http: Request) -> _Request:
        """The request that a caller sends; raises ``ApiError``, also for another ``model``."""
        request = await received(kind, http)
        state_of(http.scope).adapter = await self._adapters.of_model(request.model)
        return request

    async def answer_chat(self, http: Request, chat: Chat, renderer: Renderer) -> Response:
        """The answer to a chat, at once or as a stream; raises ``ApiError``."""
        state = state_of(http.scope)
        state.request_id = renderer.id
        names = renderer.names
        template = await self._lookups.template(http, chat, renderer.fields, names)
        known = {names.get(name, name) for name in template.unfulfilled}
        state.without_effect = sorted(known.union(state.without_effect))
        generation = chat.generation(self.policy(http), template)
        readers = [chat.reader(template, generation.own_stop) for _ in range(chat.n)]
        of_form = partial(chat.complaint, template.dialect)
        job = Job([generation], readers, renderer, of_form, chat.n, chat.n)
        return await self.answer(http, job, stream=chat.stream)

    async def each(
        self,
        http: Request,
        work: Callable[[int], Awaitable[_Outcome]],
        num_inputs: int,
        request_id: str,
        fields: Container[str],
        prompt: str,
    ) -> list[_Outcome]:
        """What comes of each input of a request, a few at a time.

        ``work`` does all for the input of an index, and has one call of the engine at a time. The
        first error ends them all; raises ``ApiError``, which names one of ``fields``: ``prompt`` is
        the one that prompts are of.
        """
        state = state_of(http.scope)
        state.request_id = request_id
        most = min(_AT_ONCE, self._options.max_requests, self._options.max_requests_per_key)
        num_places = min(num_inputs, most)
        places = asyncio.Semaphore(num_places)

        async def one(index: int) -> _Outcome:
            async with places:
                try:
                    return await work(index)
                except MinisglError as error:
                    names = named_prompt(prompt, index, num_inputs)
                    raise api_error(error, fields, names) from error

        with self._admission.admit(state.caller.label, num_places):
            try:
                return await unless_disconnected(http.receive, gathered(one, num_inputs))
            except Disconnected:
                raise client_gone() from None

    def policy(self, http: Request) -> Policy:
        """What the operator, the caller's key and the deadline add to a request."""
        state = state_of(http.scope)
        return Policy(
            state.left_s,
            self._options.default_max_tokens,
            self._options.shorten_max_tokens,
            state.caller.salt,
            state.adapter,
        )

    async def answer(self, http: Request, job: Job, *, stream: bool) -> Response:
        """The answer to a request, at once or as a stream; raises ``ApiError``."""
        if stream:
            return self._streamed(http, job)
        label = state_of(http.scope).caller.label
        with self._admission.admit(label, job.num_answers):
            try:
                results = await unless_disconnected(http.receive, self._results(job))
                pieces, counts = job.read(results)
            except Disconnected:
                logger.info("%s: the client went away", job.renderer.id)
                return Response(status_code=GONE)
            except ApiError as error:
                logger.info("%s: %s", job.renderer.id, error.story)
                raise
        return Response(job.renderer.body(pieces, counts), media_type="application/json")

    async def _results(self, job: Job) -> list[Result]:
        """The results of all prompts; the first error ends them all. Raises ``ApiError``."""

        async def one(index: int) -> Result:
            with job.errors(index):
                return await self._engine.generate(**job.call(index))

        return await gathered(one, len(job.generations))

    def _streamed(self, http: Request, job: Job) -> Response:
        label = state_of(http.scope).caller.label
        counts = Counts()

        async def choices(index: int) -> AsyncGenerator[bytes, None]:
            """The events of all choices of a prompt."""
            first = index * job.num_choices
            places = range(first, first + job.num_choices)
            writers = [job.renderer.writer(place) for place in places]
            readers = [job.readers[place] for place in places]
            with job.errors(index):
                async with self._engine.stream(**job.call(index)) as stream:
                    async for delta in stream:
                        sample = delta.sample
                        piece = readers[sample].push(delta)
                        counts.add(
                            delta, prompt=sample == 0, num_thought_tokens=piece.num_thought_tokens
                        )
                        if event := writers[sample].push(piece):
                            yield event

        async def events() -> AsyncGenerator[bytes, None]:
            with self._admission.admit(label, job.num_answers):
                sources = [choices(index) for index in range(len(job.generations))]
                async with aclosing(merged(sources) if len(sources) > 1 else sources[0]) as merging:
                    async for event in merging:
                        yield event

        return EventStream(
            events(),
            lambda: job.renderer.closing(counts),
            job.renderer.failure,
            request_id=job.renderer.id,
            telemetry=self._telemetry,
        )
