"""The bytes of a request -> a checked request, or one sentence about what is wrong with it.

JSON is read strictly: no NaN, no repeated keys, no excessive nesting, only valid Unicode.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from typing import Any, Final, TypeVar

from minisgl_client import strict_json
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

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
        raise _explained(error, fields) from None


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


def _explained(error: ValidationError, fields: Mapping[str, Any]) -> ApiError:
    """The first complaint in one sentence, with OpenAI's code for it."""
    complaints = _about_one_value(error.errors(include_url=False))
    first = complaints[0]
    kind, given = first["type"], first["input"]
    place = _place(first, fields)
    if kind.startswith("union_tag"):
        if not isinstance(given, dict):
            message = f"{place} must be an object, got {shown(given)}"
            return ApiError(400, message, code="invalid_type", param=place)
        tag = "role" if first["ctx"]["discriminator"] == "'role'" else "type"
        place, given = f"{place}.{tag}", given.get(tag)
        kind = "missing" if given is None else kind
    if kind == "missing":
        return ApiError(400, f"{place} is missing", code="missing_required_parameter", param=place)
    if kind == "extra_forbidden":
        return ApiError(
            400, f"unknown parameter {shown(place)}", code="unknown_parameter", param=place
        )
    got = f", got {shown(given)}"
    if "expected_tags" in first.get("ctx", {}):
        expected = first["ctx"]["expected_tags"].removeprefix("'string', ")  # it was not a string
        return invalid(f"{place} must be one of {expected}{got}", place)
    nouns = dict.fromkeys(_TYPES[one["type"]] for one in complaints if one["type"] in _TYPES)
    if nouns:
        message = f"{place} must be {' or '.join(nouns)}{got}"
        return ApiError(400, message, code="invalid_type", param=place)
    bounds = {name: _in_json(bound) for name, bound in first.get("ctx", {}).items()}
    must = _MUST.get(kind, "be valid").format(**bounds)
    return invalid(f"{place} must {must}{got}", place)


def _in_json(bound: Any) -> Any:
    """A bound in pydantic's complaint, as JSON would write it."""
    if isinstance(bound, float) and bound.is_integer():
        return int(bound)
    return {"False": "false", "True": "true"}.get(bound, bound)


_TYPES: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""By pydantic's complaint: what the value must be, in JSON's words."""
_MUST: Final = {
    "literal_error": "be {expected}",
    "finite_number": "be finite",
    "greater_than": "be > {gt}",
    "greater_than_equal": "be >= {ge}",
    "less_than": "be < {lt}",
    "less_than_equal": "be <= {le}",
    "too_short": "not be empty",
    "too_long": "have at most {max_length} items",
    "string_too_short": "not be empty",
    "string_too_long": "have at most {max_length} characters",
    "string_pattern_mismatch": "match {pattern}",
}
"""By pydantic's complaint about a value of the right type: what follows "must"."""


def _about_one_value(errors: Sequence[ErrorDetails], depth: int = 0) -> Sequence[ErrorDetails]:
    """The first error; for a union, whose members each have errors, those that got furthest.

    The schema's unions without a tag begin with ``str``. ``depth`` is how much of the place all
    errors have in common.
    """
    loc = errors[0]["loc"]
    if "str" not in loc[depth:]:
        return errors[:1]
    depth = loc.index("str", depth)
    by_member: dict[int | str, list[ErrorDetails]] = {}
    for error in errors:
        if error["loc"][:depth] == loc[:depth]:
            by_member.setdefault(error["loc"][depth], []).append(error)

    def progress(error: ErrorDetails) -> tuple[bool, list[int]]:
        """Whether at least the type is right, and the place at which it is not."""
        items = [part for part in error["loc"][depth:] if isinstance(part, int)]
        return not error["type"].endswith("_type"), items

    furthest = max(progress(member[0]) for member in by_member.values())
    members = [member for member in by_member.values() if progress(member[0]) == furthest]
    if len(members) > 1:
        return [member[0] for member in members]
    return _about_one_value(members[0], depth + 1)


def _place(error: ErrorDetails, fields: Any) -> str:
    """A place such as ``messages[0].content``, without the members of unions that were tried.

    A member stands before the names in it, and may be called like one of them: of a part
    ``{"type": "text", "text": ...}`` it is ``text``. So what is found at the place decides which
    is meant.
    """
    readings = list(_readings(error["loc"], fields, error["type"]))
    given = error["input"]
    fitting = (place for place, found in readings if given in (found, _without_nulls(found)))
    return next(fitting, readings[0][0]).removeprefix(".")


def _readings(loc: tuple[int | str, ...], value: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """The places that ``loc`` may be in ``value``, each with the input of an error of this kind
    there: the value itself, or the object that lacks it."""
    if not loc:
        yield "", value
        return
    part, rest = loc[0], loc[1:]
    if isinstance(part, int):
        item = value[part] if isinstance(value, list) and part < len(value) else None
        for place, found in _readings(rest, item, kind):
            yield f"[{part}]{place}", found
        return
    if kind == "missing" and not rest:
        yield f".{part}", value
        return
    if isinstance(value, dict) and part in value:
        for place, found in _readings(rest, value[part], kind):
            yield f".{part}{place}", found
    if rest or kind != "extra_forbidden":  # which ends with a name
        yield from _readings(rest, value, kind)  # a member of a union


def _without_nulls(value: Any) -> Any:
    """An object as schemas see it."""
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if member is not None}
