"""The answer to an error that a route raises, or to a request for a route that is not there.

Must not know any route, beyond its path and its method.
"""

from __future__ import annotations

import difflib
from typing import Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from minisgl_gateway.errors import ApiError, error_response, internal, shown

_PREFIXES: Final = ("api", "openai", "v1", "v2")
"""Parts of a path that callers repeat or leave out."""
_ELSEWHERE: Final = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "embed": "/v1/embeddings",
    "generate": "/v1/completions",
    "tags": "/v1/models",
}
"""Routes of other APIs (llama.cpp's, Ollama's), and the most similar ones here."""


async def on_error(request: Request, error: Exception) -> Response:
    """The answer to an error, in the form of the API: our own error, the framework's (no such route
    or method), or a bug."""
    if isinstance(error, HTTPException):
        error = _of_framework(error, request)
    return error_response(error if isinstance(error, ApiError) else internal(), request.scope)


def _of_framework(error: HTTPException, request: Request) -> ApiError:
    """An error of the framework, with a message that names method and path, and suggests the right
    ones."""
    path = request.scope["path"]
    is_plain = path.isascii() and path.isprintable() and len(path) <= 100
    asked = f"{request.method} {path if is_plain else shown(path)}"
    if error.status_code == 404:
        near = _near_route(request.app, path)
        hint = f"; did you mean {near}?" if near else ""
        return ApiError(404, f"{asked} is not offered{hint}", code="not_found")
    if error.status_code == 405:
        allowed = _methods(request)
        message = f"{asked} is not offered, only {' and '.join(allowed)}"
        headers = {"Allow": ", ".join(allowed)}
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, error.detail, code="http_error", headers=error.headers)


def _methods(request: Request) -> list[str]:
    """The methods of all routes of the path; the framework names those of the first alone."""
    methods = [
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in sorted(route.methods or ())
    ]
    return list(dict.fromkeys(methods))


def _near_route(app: FastAPI, path: str) -> str | None:
    """The route that was probably meant, with its method."""
    routes = {
        route.path: method
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }
    words = [part for part in path.split("/") if part not in ("", *_PREFIXES)]
    name = "/".join(words)
    near = [f"/v1/{name}", f"/{name}", _ELSEWHERE.get(name, "")]
    # a client's base URL may hold a whole route, to which the client appends another
    ends = [route for route in routes if path.endswith(route.removeprefix("/v1"))]
    near += sorted(ends, key=len, reverse=True)
    near += difflib.get_close_matches(path[:100], routes, n=1, cutoff=0.75)
    return next((f"{routes[one]} {one}" for one in near if one in routes), None)
