"""The application: the routes, their description, and the gate in front of them.

Must not know what a route does with a request.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from minisgl_client.client import AsyncClient
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.adapters import Adapters, LoadAdapterRequest, UnloadAdapterRequest
from minisgl_gateway.completions.answer_schema import ChatCompletion, Completion
from minisgl_gateway.completions.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minisgl_gateway.description import BodyOf, answer_of, describe, page_of
from minisgl_gateway.error_handler import on_error
from minisgl_gateway.errors import ApiError
from minisgl_gateway.gate import (
    ANTHROPIC_REQUEST_ID,
    PAGE_FILES,
    REQUEST_ID,
    WITHOUT_EFFECT,
    Gate,
)
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.health import HealthRoute
from minisgl_gateway.keys import Keys
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.messages.answer import CountedTokens, MessagesAnswer, MessagesErrorAnswer
from minisgl_gateway.messages.schema import CountTokensRequest, MessagesRequest
from minisgl_gateway.responses.answer import CountedInput
from minisgl_gateway.responses.answer import Response as AnsweredResponse
from minisgl_gateway.responses.memory import ResponseMemory
from minisgl_gateway.responses.schema import InputTokensRequest, ResponsesRequest
from minisgl_gateway.retrieval import RetrievalRoutes
from minisgl_gateway.retrieval_schema import (
    EmbeddingList,
    EmbeddingRequest,
    Reranked,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from minisgl_gateway.routes import CompletionRoutes, MessagesRoutes, ResponsesRoutes
from minisgl_gateway.servers import Engine, Servers
from minisgl_gateway.service import Service
from minisgl_gateway.telemetry import CONTENT_TYPE, Telemetry

_PAGE: Final = Path(__file__).parent / "page"
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ERRORS: Final = (400, 401, 404, 405, 408, 413, 415, 429, 431, 499, 500, 503, 504)
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": schema.ErrorAnswer} for status in _ERRORS
}


def create_app(options: GatewayOptions, telemetry: Telemetry) -> ASGIApp:
    """A gateway as an ASGI application, which connects to Triton at its first request."""
    engine: Engine = (
        Servers(options.servers, options.model)
        if options.servers
        else AsyncClient(options.triton, protocol="grpc", model=options.model, retries=0)
    )
    adapters = Adapters(options, engine)
    lookups = Lookups(options, engine, adapters)
    service = Service(options, engine, lookups, adapters, telemetry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        except asyncio.CancelledError:  # a second Ctrl-C, which also cancels requests under way
            return
        await engine.aclose()

    app = FastAPI(
        title="MiniSGL gateway",
        version="1",
        description="OpenAI's and Anthropic's APIs in front of MiniSGL in Triton Inference Server.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # this page and the next would load scripts from other sites
        redoc_url=None,
        separate_input_output_schemas=False,
        responses=_RESPONSES,
    )
    _add_completions(app, CompletionRoutes(service, lookups))
    memory = ResponseMemory(options.max_stored_responses, options.max_stored_bytes)
    _add_responses(app, ResponsesRoutes(service, lookups, memory))
    _add_messages(app, MessagesRoutes(service, lookups))
    _add_retrieval(app, RetrievalRoutes(service, lookups, engine))
    _add_probes(app, HealthRoute(engine), lookups, telemetry)
    _add_adapters(app, adapters)
    _add_page(app)
    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(HTTPException, on_error)
    app.add_exception_handler(Exception, on_error)
    describe(app)
    gate = Gate(app, options, _keys(options), telemetry)
    if not options.cors_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=options.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),  # OpenAI's browser client sends a dozen of its own
        expose_headers=(REQUEST_ID, ANTHROPIC_REQUEST_ID, WITHOUT_EFFECT, "Retry-After"),
    )


def _keys(options: GatewayOptions) -> Keys:
    """The keys of callers, including those of operators."""
    own = (*options.api_keys, *options.admin_keys) if options.api_keys else ()
    return Keys(own, options.cors_origins)


def _add_completions(app: FastAPI, routes: CompletionRoutes) -> None:
    """Add OpenAI's APIs of chat completions and completions."""
    app.post(
        "/v1/chat/completions",
        responses={200: answer_of(ChatCompletion)},
        openapi_extra=BodyOf(ChatCompletionRequest),
    )(routes.chat)
    app.post(
        "/v1/completions",
        responses={200: answer_of(Completion)},
        openapi_extra=BodyOf(CompletionRequest),
    )(routes.completions)


def _add_responses(app: FastAPI, routes: ResponsesRoutes) -> None:
    """Add OpenAI's Responses API; responses are kept for a while."""
    app.post(
        "/v1/responses",
        responses={200: answer_of(AnsweredResponse, named_events=True)},
        openapi_extra=BodyOf(ResponsesRequest),
    )(routes.create)
    app.post(
        "/v1/responses/input_tokens",
        responses={200: {"model": CountedInput}},
        openapi_extra=BodyOf(InputTokensRequest),
    )(routes.count_tokens)
    app.get("/v1/responses/{id}", responses={200: {"model": AnsweredResponse}})(routes.retrieve)
    app.delete("/v1/responses/{id}")(routes.delete)


def _add_messages(app: FastAPI, routes: MessagesRoutes) -> None:
    """Add Anthropic's API, which has its own form of errors."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": MessagesErrorAnswer} for status in _ERRORS
    }
    app.post(
        "/v1/messages",
        responses={**errors, 200: answer_of(MessagesAnswer, named_events=True)},
        openapi_extra=BodyOf(MessagesRequest),
    )(routes.create)
    app.post(
        "/v1/messages/count_tokens",
        responses={**errors, 200: {"model": CountedTokens}},
        openapi_extra=BodyOf(CountTokensRequest),
    )(routes.count_tokens)


def _add_retrieval(app: FastAPI, routes: RetrievalRoutes) -> None:
    """Add embeddings, in OpenAI's API, reranking, in Jina's and Cohere's, and scores, in vLLM's."""
    app.post(
        "/v1/embeddings",
        responses={200: {"model": EmbeddingList}},
        openapi_extra=BodyOf(EmbeddingRequest),
    )(routes.embeddings)
    app.post(
        "/v1/rerank",
        responses={200: {"model": Reranked}},
        openapi_extra=BodyOf(RerankRequest),
    )(routes.rerank)
    app.post(
        "/v1/score",
        responses={200: {"model": ScoreList}},
        openapi_extra=BodyOf(ScoreRequest),
    )(routes.score)
    for path in ("/v2/rerank", "/rerank"):  # that of Cohere's clients; vLLM has all these
        app.post(path, include_in_schema=False)(routes.rerank)
    app.post("/score", include_in_schema=False)(routes.score)


def _add_probes(app: FastAPI, health: HealthRoute, lookups: Lookups, telemetry: Telemetry) -> None:
    """Add routes for probes and lookups, under OpenAI's and vLLM's names."""
    app.get("/v1/models")(lookups.models)
    app.get("/v1/models/{name:path}")(lookups.model)
    app.post("/tokenize", openapi_extra=BodyOf(TokenizeRequest))(lookups.tokenize)
    app.post("/detokenize", openapi_extra=BodyOf(DetokenizeRequest))(lookups.detokenize)
    app.get("/health")(health.health)
    app.get("/ping")(health.health)
    app.post("/ping", include_in_schema=False)(health.health)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(telemetry.text(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> schema.Version:
        return schema.Version(version=importlib.metadata.version("minisgl-triton"))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page_of(app.openapi()), headers=_PAGE_HEADERS)


def _add_adapters(app: FastAPI, adapters: Adapters) -> None:
    """Add routes that load and unload LoRA adapters, under vLLM's names."""
    app.post(
        "/v1/load_lora_adapter",
        response_class=PlainTextResponse,
        responses={403: {"model": schema.ErrorAnswer}},
        openapi_extra=BodyOf(LoadAdapterRequest),
    )(adapters.load)
    app.post(
        "/v1/unload_lora_adapter",
        response_class=PlainTextResponse,
        responses={403: {"model": schema.ErrorAnswer}},
        openapi_extra=BodyOf(UnloadAdapterRequest),
    )(adapters.unload)


def _add_page(app: FastAPI) -> None:
    def page(name: str) -> Callable[[], Awaitable[Response]]:
        async def send() -> Response:
            return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

        return send

    for path, name in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(page(name))
