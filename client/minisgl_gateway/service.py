"""What routes have in common: they check a request, generate in the engine, and answer.

Knows the engine only through ``Engine``. However a request ends, its generations end in the engine
too, and its place becomes free.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Container,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from minisgl_client.answer import Result
from minisgl_client.errors import MinisglError
from starlette.requests import Request
from starlette.responses import Response

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.adapters import Adapters
from minisgl_gateway.admission import Admission
from minisgl_gateway.answers import Counts, Echo
from minisgl_gateway.body import received
from minisgl_gateway.chat import Chat, Generation, Policy
from minisgl_gateway.conversion import chat_of, completion_generations, num_samples
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.errors import GONE, ApiError, client_gone, unavailable
from minisgl_gateway.event_stream import (
    Disconnected,
    EventStream,
    gathered,
    merged,
    unless_disconnected,
)
from minisgl_gateway.form_schema import form_of
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.parts import AnswerReader, Piece
from minisgl_gateway.renderers import ChatRenderer, CompletionRenderer, Renderer
from minisgl_gateway.request_state import state_of
from minisgl_gateway.schema import ChatCompletionRequest, CompletionRequest
from minisgl_gateway.servers import Engine
from minisgl_gateway.strict_schema import Body
from minisgl_gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)
_Request = TypeVar("_Request", bound=Body)
_Outcome = TypeVar("_Outcome")
_HEALTH_S: Final = 5.0
_PROBED_S: Final = 1.0
_AT_ONCE: Final = 16
"""The most simultaneous calls of the engine for a request with many inputs."""


@dataclass(frozen=True, slots=True)
class _Job:
    """The generations of a request, one per prompt, and how their answers are read and rendered.

    ``of_form`` words errors about the form of the answer (``engine_errors.api_error``). Each
    generation has ``num_choices`` choices, for which the engine makes ``num_samples``. There is a
    reader for each choice, those of the first prompt first.
    """

    generations: Sequence[Generation]
    readers: Sequence[AnswerReader]
    renderer: Renderer
    of_form: Callable[[str], tuple[str, str]]
    num_choices: int
    num_samples: int

    @property
    def num_answers(self) -> int:
        """Samples that the engine makes, of all prompts."""
        return len(self.generations) * self.num_samples

    def call(self, index: int) -> dict[str, Any]:
        """The arguments of a call of the engine, with an id of its own for each prompt."""
        generation = self.generations[index]
        return {
            "prompt": generation.prompt,
            "messages": generation.messages,
            "input_ids": generation.input_ids,
            "tools": generation.tools,
            "request_id": f"{self.renderer.id}.{index}",
            **generation.parameters,
        }

    def read(self, results: Sequence[Result]) -> tuple[list[Piece], Counts]:
        """The pieces of all choices, each of which is whole, and their counts; raises
        ``ApiError``."""
        pieces, counts = list[Piece](), Counts()
        choices = [each for result in results for each in enumerate(result.samples)]
        for reader, (sample, choice) in zip(self.readers, choices, strict=True):
            piece = reader.push(choice)
            counts.add(choice, prompt=sample == 0, num_thought_tokens=piece.num_thought_tokens)
            pieces.append(piece)
        return pieces, counts

    @contextmanager
    def errors(self, index: int) -> Iterator[None]:
        """Turn errors of the engine about the prompt of an index into ``ApiError``s of this
        request."""
        try:
            yield
        except MinisglError as error:
            renderer = self.renderer
            names = renderer.names
            if len(self.generations) > 1:
                names = {**names, **_named("prompt", index, len(self.generations))}
            raise api_error(error, renderer.fields, names, self.of_form) from error


def _named(param: str, index: int, num_prompts: int) -> dict[str, str]:
    """What errors call the prompt of an index, which the parameter has given."""
    return {"prompt": param if num_prompts == 1 else f"{param}[{index}]"}


@dataclass(frozen=True, slots=True)
class _Probe:
    """Whether the engine took requests, and how long this answer is valid."""

    is_ready: bool
    until_s: float


class Service:
    """One gateway in front of one engine, or of several servers."""

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
        self._probing = asyncio.Lock()
        self._probe = _Probe(is_ready=False, until_s=0.0)

    # --- routes ------------------------------------------------------------------------------

    async def chat(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        request = await self.received(ChatCompletionRequest, http)
        return await self.answer(http, chat_of(request), ChatRenderer(request))

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        request = await self.received(CompletionRequest, http)
        generations = completion_generations(request, self.policy(http))
        renderer = CompletionRenderer(request)
        state_of(http.scope).request_id = renderer.id
        renderer.echoes = await self._echoes(request, generations)
        readers = [AnswerReader() for _ in range(len(generations) * request.n)]
        _, param = form_of(request)
        job = _Job(
            generations,
            readers,
            renderer,
            lambda message: (param, message),
            request.n,
            num_samples(request),
        )
        return await self._answer(http, job, stream=request.stream)

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
            raise unavailable("the engine is not ready")
        return schema.Health()

    async def _is_ready(self) -> bool:
        try:
            await asyncio.wait_for(self._engine.cancel(f"health-{uuid.uuid4().hex}"), _HEALTH_S)
        except (MinisglError, asyncio.TimeoutError):
            return False
        return True

    # --- the way of a request ----------------------------------------------------------------

    async def received(self, kind: type[_Request], http: Request) -> _Request:
        """The request that a caller sends; raises ``ApiError``, also for another ``model``."""
        request = await received(kind, http)
        state_of(http.scope).adapter = await self._adapters.of_model(request.model)
        return request

    async def answer(self, http: Request, chat: Chat, renderer: Renderer) -> Response:
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
        job = _Job([generation], readers, renderer, of_form, chat.n, chat.n)
        return await self._answer(http, job, stream=chat.stream)

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
                    raise api_error(error, fields, _named(prompt, index, num_inputs)) from error

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

    async def _echoes(
        self, request: CompletionRequest, generations: Sequence[Generation]
    ) -> list[Echo | None]:
        """What comes before each answer, if it is asked for."""
        if not request.echo:
            return [None for _ in generations for _ in range(request.n)]
        scored = request.logprobs is not None

        async def one(index: int) -> Echo:
            try:
                return await self._lookups.echo(generations[index], scored=scored)
            except MinisglError as error:
                names = _named("prompt", index, len(generations))
                raise api_error(error, CompletionRequest.model_fields, names) from error

        echoes = await gathered(one, len(generations))
        return [echo for echo in echoes for _ in range(request.n)]

    async def _answer(self, http: Request, job: _Job, *, stream: bool) -> Response:
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

    async def _results(self, job: _Job) -> list[Result]:
        """The results of all prompts; the first error ends them all. Raises ``ApiError``."""

        async def one(index: int) -> Result:
            with job.errors(index):
                return await self._engine.generate(**job.call(index))

        return await gathered(one, len(job.generations))

    def _streamed(self, http: Request, job: _Job) -> Response:
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
