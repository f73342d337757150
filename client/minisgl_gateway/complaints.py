"""Pydantic's complaints about a request -> one sentence about what is wrong with it.

Must not know any request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from minisgl_gateway.errors import ApiError, invalid, shown


def explained(error: ValidationError, fields: Mapping[str, Any]) -> ApiError:
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
