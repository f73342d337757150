"""The members of an object between tags, as models write the arguments of calls.

    <parameter=city>Oslo</parameter>
    <parameter=days>
    [1, 2]
    </parameter>

A member whose schema is that of strings is any text up to the tag that ends it; of its keywords
``enum``, ``const``, ``minLength`` and ``maxLength`` are supported. Other members are JSON, with
white space around it. Members come in the order of the schema. Must not know where they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar import schemas
from minisgl_backend.grammar.pieces import (
    Piece,
    Repeated,
    Text,
    Value,
    any_text,
    fixed,
    one_of,
    row_of,
)

STYLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "qwen_xml": ("<parameter=", ">", "</parameter>"),
    "minimax_xml": ('<parameter name="', '">', "</parameter>"),
    "glm_xml": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
}
"""What stands before a name, between it and the value, and after that."""
_BLANK: Final = r"/[ \t]?|\n[ ]{0,40}/"
_NAME: Final = "/[a-zA-Z_][a-zA-Z0-9_]*/"
_DEFINITIONS: Final[tuple[str, ...]] = schemas.DEFINITIONS
_ANYWHERE: Final = frozenset({"type", "$schema", *_DEFINITIONS})
_KNOWN: Final = ("properties", "required", "additionalProperties")


def members(schema: dict[str, Any] | bool, style: str, place: str) -> Piece:
    """The members of an object of this schema. Raises ``InvalidRequest`` and ``Unsupported``."""
    root = schemas.plain(schema) if isinstance(schema, dict) else {}
    return _Members(root, style, place).all_of_them()


class _Members:
    def __init__(self, root: dict[str, Any], style: str, place: str) -> None:
        self._root = root
        self._before, self._between, self._after = STYLES[style]
        self._place = place

    def all_of_them(self) -> Piece:
        known = schemas.without_notes(self._root)
        if known.get("type", "object") != "object":
            raise InvalidRequest(f"{self._place} must be the schema of an object")
        self._check(known, _KNOWN, self._place)
        named, required = known.get("properties", {}), known.get("required", [])
        if not (isinstance(named, dict) and isinstance(required, list)):
            raise InvalidRequest(f"{self._place} must have an object and a list of names")
        if missing := [name for name in required if name not in named]:
            raise Unsupported(f"{self._place}.required names {missing[0]}, which is no property")
        pieces: list[Piece] = []
        for name, one in named.items():
            place = f"{self._place}.properties.{name}"
            member = self._member(fixed(name, place), one, place)
            pieces.append(member if name in required else Repeated(member, 0, 1))
        others = known.get("additionalProperties", not named)
        if others is not False:
            place = f"{self._place}.additionalProperties"
            name = Text(_NAME, place, without=("<", ">", '"'))
            pieces.append(Repeated(self._member(name, others, place), 0, None))
        return row_of([*pieces, self._blank()])

    def _member(self, name: Text, schema: Any, place: str) -> Piece:
        begin = [self._blank(), fixed(self._before, place), name, fixed(self._between, place)]
        return row_of([*begin, self._value(schema, place), fixed(self._after, place)])

    def _value(self, schema: Any, place: str) -> Piece:
        """What stands between the tags of a member."""
        known = self._resolved(schema, place)
        literals = schemas.literals(known)
        if literals is not None and all(isinstance(one, str) for one in literals):
            self._check(known, ("enum", "const"), place)
            return row_of([self._blank(), self._one_of(literals, place), self._blank()])
        kinds = known.get("type")
        if kinds == "string" or (kinds is None and not known.keys() - _ANYWHERE):
            self._check(known, ("minLength", "maxLength"), place)
            least, most = known.get("minLength", 0), known.get("maxLength")
            return any_text(place, [self._after], most, least)
        if isinstance(parts := known.get("anyOf"), list):
            self._check(known, ("anyOf",), place)
            return one_of(
                [self._value(one, f"{place}.anyOf[{at}]") for at, one in enumerate(parts)]
            )
        if kinds is None or "string" in kinds:
            raise Unsupported(f"{place} must have one type, or be anyOf schemas that have one")
        whole = {key: self._root[key] for key in _DEFINITIONS if key in self._root} | known
        return row_of([self._blank(), Value(whole, place), self._blank()])

    def _one_of(self, literals: list[str], place: str) -> Piece:
        for text in literals:
            if self._after in text:
                raise Unsupported(f"{place} must not list a text with {self._after}")
        return one_of([fixed(text, place) for text in literals])

    def _resolved(self, schema: Any, place: str) -> dict[str, Any]:
        """The schema, or that to which it refers, without what only describes its values."""
        for _ in range(8):
            if not isinstance(schema, dict):
                break
            known = dict(schemas.without_notes(schema))
            if "$ref" not in known:
                return known
            self._check(known, ("$ref",), place)
            schema = schemas.at(known["$ref"], self._root)
        if schema is True:
            return {}
        raise InvalidRequest(f"{place} must be a JSON schema that some value follows")

    @staticmethod
    def _check(known: Mapping[str, Any], keys: tuple[str, ...], place: str) -> None:
        if unknown := known.keys() - _ANYWHERE - set(keys):
            raise Unsupported(
                f"{min(unknown)} of a member between tags is not supported, at {place}"
            )

    def _blank(self) -> Text:
        """White space."""
        return Text(_BLANK, self._place, without=("<",), is_blank=True)
