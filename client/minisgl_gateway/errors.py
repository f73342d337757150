"""The answer to a request that fails: an HTTP status, and OpenAI's error object or Anthropic's.

Must not know the engine, whose errors ``engine_errors`` translates. A caller learns no details of
an error of ours; the log has these under the request id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import Scope

from minisgl_gateway.request_state import state_of

GONE: Final = 499
"""The status that proxies use for a request whose client did not wait for the answer."""
RETRY_AFTER_S: Final = 1
"""The value of ``Retry-After`` in answers to requests that are refused for now."""


class ApiError(Exception):
    """An answer other than 200. ``param`` names the part of the request that is at fault.
    ``for_anthropic`` is the message in the words that clients of Anthropic's API look for, if those
    differ."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        for_anthropic: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.for_anthropic = for_anthropic

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Anthropic's error object."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        message = self.for_anthropic or self.message
        error: dict[str, Any] = {"type": kind, "message": message}
        if (self.code, self.param) == ("unsupported_parameter", "thread"):
            # for Anthropic's clients, which then send the whole conversation without it
            error["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": error, "request_id": request_id}

    @property
    def story(self) -> str:
        """The version for the log: the message, and its cause if the caller is not to blame."""
        if self.status < 500 or self.__cause__ is None or str(self.__cause__) == self.message:
            return self.message
        return f"{self.message}: {self.__cause__}"

    @property
    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, whose errors have its form."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def shown(value: object) -> str:
    """A value as shown in an error message: its JSON, or a description if that is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        if not text.isprintable():
            text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # or an int of thousands of digits
        return "a value that cannot be shown"
    if len(text) <= _SHOWN_CHARS:
        return text
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, (list, dict)):
        noun = "an array" if isinstance(value, list) else "an object"
        return f"{noun} of {len(value)} item{'s' if len(value) > 1 else ''}"
    return f"a number of {len(text)} digits"


_SHOWN_CHARS: Final = 80


def invalid(message: str, param: str | None = None) -> ApiError:
    """The request is wrong."""
    return ApiError(400, message, code="invalid_value", param=param)


def too_long(message: str, param: str | None, for_anthropic: str) -> ApiError:
    """The prompt, or what is asked for after it, exceeds the context."""
    code = "context_length_exceeded"
    return ApiError(400, message, code=code, param=param, for_anthropic=for_anthropic)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """The request is right, but asks for something that is not offered."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def no_model(name: str) -> ApiError:
    """Neither the base model nor an adapter has this name."""
    return ApiError(
        404, f"the model {shown(name)} does not exist", code="model_not_found", param="model"
    )


def busy(status: int, message: str, code: str) -> ApiError:
    """The request may succeed later."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def unavailable(message: str) -> ApiError:
    """The engine cannot answer now."""
    return busy(503, message, "engine_unavailable")


def shutting_down() -> ApiError:
    """The gateway is ending, and waits no longer."""
    return busy(503, "the gateway is shutting down", "shutting_down")


def deadline_passed() -> ApiError:
    """The request took longer than its deadline allows."""
    return ApiError(504, "the deadline passed before the answer was complete", code="timeout")


def cancelled() -> ApiError:
    """Someone else ended the request."""
    return ApiError(GONE, "the request was cancelled", code="cancelled")


def client_gone() -> ApiError:
    """The client did not wait for the answer, or did not send all of its request."""
    return ApiError(GONE, "the client went away", code="client_gone")


def internal() -> ApiError:
    """An error of ours; the caller learns no more."""
    return ApiError(500, "internal error", code="internal_error")


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """An error in the form that a route's clients read. If a body was left unread, the connection
    ends."""
    headers = dict(error.headers)
    if error.status in (408, 413, 431):
        headers["Connection"] = "close"
    body = error.body
    if is_anthropic(scope["path"]):
        body = error.anthropic_body(state_of(scope).told_id)
    return JSONResponse(body, status_code=error.status, headers=headers)
