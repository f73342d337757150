"""Objects of requests, read strictly: the base of all schemas of the gateway's APIs.

Null means "not given", at any depth, whether or not the name is known here; only in what goes
unchanged to the chat template or the engine (variables, schemas) does it stand for itself.

Lists are read up to the first item that is wrong (``fail_fast``): a body of a megabyte can have
hundreds of thousands, and a complaint about each would take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, model_validator


def _take_nulls(schema: dict[str, Any]) -> None:
    """Let a JSON schema say that null means "not given", for names known and unknown."""
    schema["additionalProperties"] = _NULL
    properties = schema.get("properties", {})
    for name, spec in properties.items():
        if name not in schema.get("required", ()) and _NULL not in spec.get("anyOf", ()):
            about = {key: spec[key] for key in ("default", "description", "title") if key in spec}
            itself = {key: value for key, value in spec.items() if key not in about}
            properties[name] = {"anyOf": [*spec.get("anyOf", [itself]), _NULL], **about}


_NULL: Final[dict[str, Any]] = {"type": "null"}


class Strict(BaseModel):
    """An object of a request: known names of the right types, and null for what is not given."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_take_nulls
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and None in fields.values():
            return {name: value for name, value in fields.items() if value is not None}
        return fields


def by_type(
    default: str | None = None, of_string: str | None = None
) -> Callable[[Any], str | None]:
    """A ``Discriminator`` of a union whose members have a ``type``.

    ``default`` is the type of an object without one, ``of_string`` the tag of a string.
    """

    def tag(value: Any) -> str | None:
        if isinstance(value, str):
            return of_string
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None and isinstance(value, dict):
            return default
        return kind if isinstance(kind, str) else None

    return tag


class Body(Strict):
    """A whole request."""

    model: str | None = None
    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    """What is refused by name, unless it has one of these values, which change nothing."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted with any value, and named in a header of the answer."""

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the fields of these names that the caller gives."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}
