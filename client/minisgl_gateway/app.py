"""The application: routes, their description, and the gate before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request
from minisgl_client.client import AsyncClient
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.description import answer_of, body_of, describe
from minisgl_gateway.errors import ApiError, error_response, internal
from minisgl_gateway.gate import PAGE_FILES, Gate
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.keys import Keys
from minisgl_gateway.schema import ChatCompletionRequest, CompletionRequest
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
    """A gateway as an ASGI application; it connects to Triton when it is first asked."""
    engine = AsyncClient(options.triton, protocol="grpc", model=options.model, retries=0)
    service = Service(options, engine, telemetry)

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
        description="OpenAI's API in front of MiniSGL in Triton Inference Server.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        separate_input_output_schemas=False,
        responses=_RESPONSES,
    )
    _add_api(app, service, telemetry)
    _add_page(app)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    describe(app)
    return Gate(app, options, Keys(options.api_keys), telemetry)


def _add_api(app: FastAPI, service: Service, telemetry: Telemetry) -> None:
    app.post(
        "/v1/chat/completions",
        responses={200: answer_of(schema.ChatCompletion)},
        openapi_extra=body_of(ChatCompletionRequest),
    )(service.chat)
    app.post(
        "/v1/completions",
        responses={200: answer_of(schema.Completion)},
        openapi_extra=body_of(CompletionRequest),
    )(service.completions)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.get("/health")(service.health)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(telemetry.text(), media_type=CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    def page(name: str) -> Callable[[], Awaitable[Response]]:
        async def send() -> Response:
            return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

        return send

    for path, name in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(page(name))


async def _on_error(_: Request, error: Exception) -> Response:
    """Every error in OpenAI's form: ours, the framework's (no such route, no such method), bugs."""
    if isinstance(error, ApiError):
        return error_response(error)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        told = ApiError(error.status_code, error.detail, code=code, headers=error.headers)
        return error_response(told)
    return error_response(internal())
