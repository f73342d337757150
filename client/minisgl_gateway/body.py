"""The bytes of a request -> a checked request, or one sentence about what is wrong with it.

JSON is read strictly: no NaN, no repeated keys, no excessive nesting, only valid Unicode.
"""

from __future__ import annotations

import difflib
import json
from email.message import Message
from typing import Any, Final, TypeVar

from minisgl_client import strict_json
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from minisgl_gateway.complaints import explained
from minisgl_gateway.errors import ApiError, client_gone, invalid, shown, unsupported
from minisgl_gateway.request_state import state_of
from minisgl_gateway.strict_schema import Body

MAX_DEPTH: Final = 64
_JSON: Final = "application/json"
_UNSAID: Final = "application/x-www-form-urlencoded"
"""The content type that curl sends unless its user names one."""
_Request = TypeVar("_Request", bound=Body)


async def received(kind: type[_Request], http: Request) -> _Request:
    """The request that a caller sends; raises ``ApiError``.

    The names of parameters without effect are left in the state, for a header of the answer.
    """
    said = http.headers.get("content-type", "")
    # a web page must send a content type for which its browser asks for permission
    is_page = "origin" in http.headers
    head = Message()
    head["Content-Type"] = said if said or is_page else _JSON
    kinds = (_JSON,) if is_page else (_JSON, _UNSAID)
    charset = head.get_content_charset("utf-8")
    if head.get_content_type() not in kinds or charset not in ("utf-8", "utf8"):
        raise _media_type("the content type must be application/json in UTF-8")
    if http.headers.get("content-encoding", "identity").lower() != "identity":
        raise _media_type("the body must not be compressed")
    try:
        request = parse(kind, await http.body())
    except ClientDisconnect:
        raise client_gone() from None
    unused = request.without_effect & request.model_fields_set
    state_of(http.scope).without_effect = sorted(unused)
    return request


def _media_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def parse(kind: type[_Request], body: bytes) -> _Request:
    """The request in a body; raises ``ApiError``."""
    fields = _offered(kind, _json_object(body))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise explained(error, fields) from None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig")  # files of Windows begin with a byte order mark
        value = strict_json.loads(text)
        # a lone surrogate can hide in an escape
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise invalid("the body must be valid UTF-8") from None
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise invalid(f"\\u{half:04x} is half of a surrogate pair without the other") from None
    except strict_json.Refused as error:
        raise invalid(str(error)) from None
    except (ValueError, RecursionError):
        raise invalid("the body must be valid JSON") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    if not strict_json.is_shallow(value, MAX_DEPTH):
        raise invalid(f"the body must be at most {MAX_DEPTH} levels deep")
    return value


def _offered(kind: type[Body], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, except those that are null or change nothing; the rest must be known."""
    known = kind.model_fields
    neutral = kind.not_offered
    kept = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name in neutral:
            if not any(_same(value, other) for other in neutral[name]):
                raise unsupported(f"{name} is not supported, got {shown(value)}", name)
        else:
            near = difflib.get_close_matches(name[:60], known, n=1)
            hint = f"; did you mean {shown(near[0])}?" if near else ""
            raise ApiError(
                400,
                f"unknown parameter {shown(name) if len(name) <= 60 else 'of a long name'}{hint}",
                code="unknown_parameter",
                param=name[:60],
            )
    return kept


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)
