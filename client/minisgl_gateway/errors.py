"""The answer to a request that fails: an HTTP status, and OpenAI's error object or Anthropic's.

Knows the errors of ``minisgl_client``, whose messages the server wrote for callers. Any other error
becomes one sentence without details, and the log has these under the request id. Some clients look
for OpenAI's phrases, so the error for a prompt that is too long uses them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from typing import Any, Final

from minisgl_client import errors as client
from starlette.responses import JSONResponse
from starlette.types import Scope

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


def api_error_of_finish(reason: str | None) -> ApiError:
    """The error that a finish reason other than ``stop`` and ``length`` means."""
    by_reason = {"timeout": deadline_passed, "cancelled": cancelled}
    return by_reason.get(reason or "", internal)()


_NO_NAMES: Final[Mapping[str, str]] = {}


def api_error(
    error: client.MinisglError,
    fields: Container[str],
    names: Mapping[str, str] = _NO_NAMES,
    of_form: Callable[[str], tuple[str, str]] = lambda message: ("structured_outputs", message),
) -> ApiError:
    """What an error of the engine, or on the way to it, means to a caller.

    ``fields`` are those of the request; the engine's sentences begin with the one at fault.
    ``names`` are the API's names for OpenAI's ``prompt``, ``max_tokens`` and others, if they
    differ. For a sentence about the form of the answer, ``of_form`` returns the parameter that
    asked for it, and the sentence as it reads there.
    """
    if found := _by_sentence(str(error)):
        return found
    if isinstance(error, (client.InvalidArgument, client.Unsupported)):
        return _at_fault(error, fields, names, of_form)
    if isinstance(error, client.Timeout):
        return deadline_passed()
    if isinstance(error, client.ConnectionFailed):
        return unavailable("the engine cannot be reached")
    if isinstance(error, client.ConnectionLost):
        return unavailable("the connection to the engine broke")
    if isinstance(error, client.Unavailable) or is_lost(error):
        return unavailable(str(error))
    if isinstance(error, client.Closed):  # by the gateway when it ends
        return shutting_down()
    if isinstance(error, client.Cancelled):
        return cancelled()
    return internal()


def _by_sentence(sentence: str) -> ApiError | None:
    """What an error means whose sentence says it, whatever kind of error that is; None for any
    other sentence."""
    if _NO_MODEL.match(sentence):  # callers know the model by the gateway's name, not by this one
        return unavailable("the engine does not have the model")
    if _DEAD.search(sentence):
        return unavailable("a process of the engine has died")
    if _STOPPING in sentence:
        return unavailable("the server is shutting down")
    if unknown := _NO_ADAPTER.match(sentence):  # the gateway's list of adapters was older
        return no_model(unknown[1])
    if sentence in _ONLY_EMBEDS:
        return unsupported("the model only makes embeddings, for /v1/embeddings", "model")
    return None


def _at_fault(
    error: client.InvalidArgument | client.Unsupported,
    fields: Container[str],
    names: Mapping[str, str],
    of_form: Callable[[str], tuple[str, str]],
) -> ApiError:
    """The same for an error about a field of the request, or about the length of its prompt."""
    make = invalid if isinstance(error, client.InvalidArgument) else unsupported
    if found := _FORM.match(str(error)):
        param, message = of_form(str(error).removeprefix(found["kind"] or ""))
        return make(f"{param}: {message}", param)
    if "tokens" in fields:
        names = {"input_ids": "tokens", **names}
    told = {**_NAMES, **names}
    known = {name: names.get(other, other) for name, other in told.items()}
    words = re.compile(rf"\b(?:{'|'.join(known)})\b")
    message = words.sub(lambda found: known[found[0]], str(error))
    word = re.split(r"\W", message, maxsplit=1)[0]
    if word == "prompt" and word not in fields:
        word = "messages"
    param_at_fault = word if word in fields else None
    if too := _TOO_LONG.match(str(error)):
        sentence = _too_long_sentence(too, fields, names)
        return too_long(sentence, param_at_fault, _too_long_for_anthropic(too, sentence))
    return make(message, param_at_fault)


def is_lost(error: client.MinisglError) -> bool:
    """Whether the engine says that a request was lost with one of its processes."""
    return str(error) in _LOST


_FORM: Final = re.compile(
    r"(?P<kind>(?:json_schema|json_object|regex|choice|grammar|structural_tag): )"
    r"|structured_outputs\b|(?:a|the) (?:grammar|JSON schema|choice|structural tag) "
)
"""How the engine's sentences about the form of an answer begin."""
_LOST: Final = frozenset(
    {
        "the detokenizer does not answer",
        "the detokenizer has gone",
        "the detokenizer was restarted and lost this request",
        "the engine is down",
        "the engine stopped after an internal error",
        "the replica that served the request has ended",
    }
)
"""How the engine's sentences say that a request was lost with a process that is restarted."""
_NO_MODEL: Final = re.compile(r"Request for unknown model: '.*' is not found$")
"""How Triton says that it has no such model."""
_DEAD: Final = re.compile(r"Stub process '.*' is not healthy")
"""How Triton says that the process of a model has died."""
_STOPPING: Final = "Server is stopping"
"""How Triton refuses a request after it has got SIGTERM."""
_NO_ADAPTER: Final = re.compile(r"LoRA (.*) is not supported, we currently support ", re.DOTALL)
"""How the engine says that it has no such adapter; callers know adapters as models."""
_ONLY_EMBEDS: Final = frozenset(
    {
        "embed must be true: the checkpoint has no output head",
        "num_prompt_logprobs needs an output head: the checkpoint has none",
    }
)
"""How the engine says that the model makes no answers; callers know no ``embed``."""
_TOO_LONG: Final = re.compile(
    r"(?:max_tokens (?P<max_tokens>\d+) with a )?prompt of (?P<length>(?:more than )?\d+ \w+) "
    r"(?:does not fit the context of|exceeds the context of|needs \d+ pages of) (?P<context>\d+)"
    r"(?: tokens, the KV cache has (?P<num_pages>\d+))?"
)
"""How the engine says that a prompt is too long; at this code OpenAI's clients shorten the chat."""


def _too_long_sentence(
    found: re.Match[str], fields: Container[str], names: Mapping[str, str]
) -> str:
    """The same in OpenAI's words, for which clients look."""
    prompt = "messages" if "messages" in fields else names.get("prompt", "prompt")
    context = _context(found)
    sentence = f"This model's maximum context length is {context} tokens. However, "
    if found["max_tokens"] is None:
        fills = found["length"] == f"{context} tokens"
        answer = ", and the answer needs one more token at least" if fills else ""
        return (
            f"{sentence}your {prompt} resulted in {found['length']}{answer}. "
            f"Please reduce the length of the {prompt}."
        )
    num_prompt, num_answer = int(found["length"].split()[0]), int(found["max_tokens"])
    return (
        f"{sentence}you requested {num_prompt + num_answer} tokens ({num_prompt} in the {prompt}, "
        f"{num_answer} in the completion). Please reduce the length of the {prompt} or completion."
    )


def _too_long_for_anthropic(found: re.Match[str], sentence: str) -> str:
    """The same in Anthropic's words. From these numbers Claude Code learns how many tokens it may
    ask for, and asks again."""
    if found["max_tokens"] is None:
        return f"prompt is too long: {sentence}"
    num_prompt, num_answer = found["length"].split()[0], found["max_tokens"]
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_answer} > "
        f"{_context(found)}, decrease input length or `max_tokens` and try again"
    )


def _context(found: re.Match[str]) -> int:
    """The most tokens of a prompt and its answer."""
    context = int(found["context"])
    if found["num_pages"] is None:
        return context
    return context * int(found["num_pages"]) + 1  # the last token needs no place in the pages


_NAMES: Final = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "num_logprobs": "logprobs",
    "priority_level": "priority",
}
"""The engine's names that differ from OpenAI's, and OpenAI's names for them."""


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
        state = scope["state"]
        body = error.anthropic_body(state["callers_id"] or state["request_id"])
    return JSONResponse(body, status_code=error.status, headers=headers)
