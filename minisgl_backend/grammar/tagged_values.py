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
from dataclasses import dataclass
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar import schemas
from minisgl_backend.grammar.checks import check, count
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


@dataclass(frozen=True, slots=True)
class Style:
    """What stands before a name, between it and the value, and after that; and what stands before a
    value that is a string, or JSON."""

    before: str
    between: str
    after: str
    string: str = ""
    json: str = ""


STYLES: Final[Mapping[str, Style]] = {
    "qwen_xml": Style("<parameter=", ">", "</parameter>"),
    "minimax_xml": Style('<parameter name="', '">', "</parameter>"),
    "glm_xml": Style("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    "deepseek_xml": Style(
        '<｜DSML｜parameter name="', '" string="', "</｜DSML｜parameter>", 'true">', 'false">'
    ),
    "deepseek_v4_1_xml": Style(
        '<｜DSML｜ parameter name="', '" string="', "</｜DSML｜ parameter>", 'true">', 'false">'
    ),
}
_BLANK: Final = r"/[ \t]?|\n[ ]{0,40}/"
_NAME: Final = "/[a-zA-Z_][a-zA-Z0-9_]*/"
_KNOWN: Final = ("properties", "required", "additionalProperties")


def members(schema: dict[str, Any] | bool, style: str, place: str) -> Piece:
    """The members of an object of this schema. Raises ``InvalidRequest`` and ``Unsupported``."""
    root = schemas.plain(schema) if isinstance(schema, dict) else {}
    return _Members(root, style, place).all_of_them()


class _Members:
    def __init__(self, root: dict[str, Any], style: str, place: str) -> None:
        self._root = root
        self._style = STYLES[style]
        self._place = place

    def all_of_them(self) -> Piece:
        known = schemas.without_notes(self._root)
        check(known.get("type", "object") == "object", self._place, "the schema of an object")
        self._check(known, _KNOWN, self._place)
        named, required = known.get("properties", {}), known.get("required", [])
        check(isinstance(named, dict), f"{self._place}.properties", "an object")
        is_right = isinstance(required, list) and all(name in [*named] for name in required)
        check(is_right, f"{self._place}.required", "a list of properties")
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
        style = self._style
        begin = [self._blank(), fixed(style.before, place), name, fixed(style.between, place)]
        value = one_of(self._values(schema, place))
        return row_of([*begin, value, fixed(style.after, place)])

    def _values(self, schema: Any, place: str) -> list[Piece]:
        """What may stand between the tags of a member."""
        known = self._resolved(schema, place)
        if (parts := known.get("anyOf")) is not None:
            self._check(known, ("anyOf",), place)
            check(parts and isinstance(parts, list), f"{place}.anyOf", "a list, not empty")
            several = [self._values(one, f"{place}.anyOf[{at}]") for at, one in enumerate(parts)]
            return [one for values in several for one in values]
        literals = schemas.literals(known)
        if literals is not None and all(isinstance(one, str) for one in literals):
            self._check(known, ("enum", "const"), place)
            check(literals, f"{place}.enum", "a list, not empty")
            return [self._string(self._one_of(literals, place), place)]
        kind = known.get("type")
        if kind is None and not known.keys() - schemas.ANYWHERE:
            text = self._string(any_text(place, [self._style.after]), place)
            # if nothing tells JSON from a string, it is a string as well
            return [text, self._json(known, place)] if self._style.json else [text]
        if kind == "string":
            self._check(known, ("minLength", "maxLength"), place)
            least, most = count(known, "minLength", place) or 0, count(known, "maxLength", place)
            text = any_text(place, [self._style.after], most, least)
            return [self._string(text, place)]
        if not isinstance(kind, str):
            raise Unsupported(f"{place} must have one type, or be anyOf schemas that have one")
        return [self._json(known, place)]

    def _string(self, text: Piece, place: str) -> Piece:
        return row_of([fixed(self._style.string, place), text])

    def _json(self, known: dict[str, Any], place: str) -> Piece:
        whole = {key: self._root[key] for key in schemas.DEFINITIONS if key in self._root} | known
        value = Value(whole, place)
        return row_of([fixed(self._style.json, place), self._blank(), value, self._blank()])

    def _one_of(self, literals: list[str], place: str) -> Piece:
        for text in literals:
            if self._style.after in text:
                raise Unsupported(f"{place} must not list a text with {self._style.after}")
        piece = one_of([fixed(text, place) for text in literals])
        return piece if self._style.string else row_of([self._blank(), piece, self._blank()])

    def _resolved(self, schema: Any, place: str) -> dict[str, Any]:
        """The schema, or that to which it refers, without what only describes its values."""
        for _ in range(schemas.MOST_STEPS):
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
        if unknown := known.keys() - schemas.ANYWHERE - set(keys):
            raise Unsupported(
                f"{min(unknown)} of a member between tags is not supported, at {place}"
            )

    def _blank(self) -> Text:
        """White space."""
        return Text(_BLANK, self._place, without=("<",), is_blank=True)
