"""JSON schemas -> rules for values in a notation with fewer quotes than JSON's.

    {city:<|"|>Oslo<|"|>,days:[1,2],at:{hour:5,late:false}}

A string is any text between two marks, in which the mark does not occur; the names of properties
stand alone; there is no white space. Of strings ``enum``, ``const`` and limits of their length are
supported, no patterns. Properties come in the order of the schema, and an object whose properties
are named has no others. Must not know where such a value stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, TypeAlias

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.grammar import schemas
from minisgl_backend.grammar.checks import MOST_COUNT
from minisgl_backend.grammar.lark import (
    any_of,
    name_of_up_to,
    quoted,
    spaced,
    spelled,
    text_of_length,
)
from minisgl_backend.grammar.schema_places import escaped
from minisgl_backend.grammar.special_tokens import SpecialTokens
from minisgl_backend.grammar.value_types import is_of

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS: Final[Mapping[str, Sequence[str]]] = {
    "string": ("minLength", "maxLength"),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": (),
    "null": (),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""The types, and the keywords that limit their values."""
_TYPES: Final = [kind for kind in _KEYWORDS if kind != "integer"]
"""Those of which each value has one."""
_NO_NAME: Final = r'\x00-\x1f\x7f:{}\[\],<"'
"""The characters that a name which is written as it is does not have; nor has it the first one of
the mark. Other names are strings."""
_Schema: TypeAlias = "dict[str, Any] | bool"


@dataclass(frozen=True, slots=True)
class BareValue:
    """A value of a schema; ``quote`` is the mark around strings. ``name`` is that of its rule, and
    its other rules' names begin with it. ``place`` is where the schema is, for errors."""

    schema: _Schema
    quote: str
    name: str
    place: str

    def rules(self, special_tokens: SpecialTokens, *, is_lenient: bool) -> Iterator[str]:
        """The rules, except that for the text up to ``quote``. Keywords that are not supported are
        ignored if it ``is_lenient``. Raises ``InvalidRequest``."""
        root = schemas.plain(self.schema) if isinstance(self.schema, dict) else {}
        rules = _Rules(self, root, special_tokens, is_lenient)
        body = rules.value(root, self.place)
        yield from rules.lines
        yield f"{self.name}: {body}"


class _Rules:
    def __init__(
        self,
        value: BareValue,
        root: dict[str, Any],
        special_tokens: SpecialTokens,
        is_lenient: bool,
    ) -> None:
        self.lines: list[str] = []
        self._whole = value
        self._root = root
        self._quote = spelled(value.quote, special_tokens)
        self._special_tokens = special_tokens
        self._is_lenient = is_lenient
        self._by_body: dict[str, str] = {}
        self._referred: dict[str, str] = {}
        self._any: str | None = None
        self._names = _name_of(rf"{_NO_NAME}\x{{{ord(value.quote[0]):x}}}")

    def value(self, schema: Any, place: str) -> str:
        """A value of a schema in Lark."""
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"schema must be an object or boolean, at {place}")
        if schema is False:
            raise InvalidRequest(f"Unsatisfiable schema, at {place}")
        known = {} if schema is True else schemas.without_notes(schema)
        if "$ref" in known:
            self._check(known, ("$ref",), place)
            return self._of_reference(known["$ref"], place)
        if isinstance(parts := known.get("anyOf"), list):
            self._check(known, ("anyOf",), place)
            if not parts:
                raise InvalidRequest(f"Unsatisfiable schema, at {place}/anyOf")
            return _one_of(self.value(one, f"{place}/anyOf/{at}") for at, one in enumerate(parts))
        if (literals := schemas.literals(known)) is not None:
            self._check(known, ("enum", "const"), place)
            kinds = self._kinds({"type": known.get("type")}, place)
            fitting = [one for one in literals if any(is_of(kind, one) for kind in kinds)]
            if not fitting:
                raise InvalidRequest(f"Unsatisfiable schema, at {place}")
            return _one_of(map(self._literal, fitting))
        kinds = self._kinds(known, place)
        self._check(known, [key for keys in _KEYWORDS.values() for key in keys], place)
        if kinds == _TYPES and not known.keys() - schemas.ANYWHERE:
            return self._any_value()
        return _one_of(self._of_kind(kind, known, place) for kind in kinds)

    def _kinds(self, known: Mapping[str, Any], place: str) -> list[str]:
        """The types that a schema allows; without ``type`` those that other keywords are for."""
        given = known.get("type")
        if given is None:
            return [k for k in _TYPES if known.keys() & set(_KEYWORDS[k])] or _TYPES
        named = given if isinstance(given, list) else [given]
        wrong = [kind for kind in named if not (isinstance(kind, str) and kind in _KEYWORDS)]
        if wrong or not named:
            raise InvalidRequest(f"Invalid type: {wrong[0] if wrong else '[]'}, at {place}/type")
        return named

    def _check(self, known: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
        """Refuse all other keywords."""
        unknown = known.keys() - schemas.ANYWHERE - set(keys)
        if unknown and not self._is_lenient:
            key = min(unknown)
            raise InvalidRequest(f"{key} is not supported, at {place}/{key}")

    def _of_kind(self, kind: str, known: Mapping[str, Any], place: str) -> str:
        if kind == "string":
            return f"{self._quote} {self._text(known, place)}"
        if kind == "array":
            return self._list(known, place)
        if kind == "object":
            return self._object(known, place)
        limits = {key: known[key] for key in _KEYWORDS[kind] if key in known}
        return self._rule(f"%json {spaced({'type': kind, **limits}, is_lenient=self._is_lenient)}")

    def _text(self, known: Mapping[str, Any], place: str) -> str:
        """The name of the rule for a text and the mark behind it."""
        least, most = self._counts(known, "minLength", "maxLength", place)
        if least == 0 and most is None:
            return name_of_up_to(self._whole.quote)
        base = f"{self._whole.name}_text_{least}_{'' if most is None else most}"
        name, line = text_of_length(base, least, most, self._whole.quote, self._special_tokens)
        if line not in self.lines:
            self.lines.append(line)
        return name

    def _list(self, known: Mapping[str, Any], place: str) -> str:
        least, most = self._counts(known, "minItems", "maxItems", place)
        if most == 0:
            return quoted("[]")
        item = self._rule(self.value(known.get("items", True), f"{place}/items"))
        more = f"{max(0, least - 1)},{'' if most is None else most - 1}"
        items = item if most == 1 else f'{item} ("," {item}){{{more}}}'
        return f'"[" {items if least else f"({items})?"} "]"'

    def _counts(
        self, known: Mapping[str, Any], lower: str, upper: str, place: str
    ) -> tuple[int, int | None]:
        """The least and the greatest number that two keywords allow."""
        least = self._count(known, lower, place)
        if known.get(upper) is None:
            return least, None
        most = self._count(known, upper, place)
        if most < least:
            raise InvalidRequest(f"Unsatisfiable schema, at {place}/{upper}")
        return least, most

    def _count(self, known: Mapping[str, Any], key: str, place: str) -> int:
        count = known.get(key, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_COUNT:
            told = f"{key} must be an integer from 0 to {MOST_COUNT}"
            raise InvalidRequest(f"{told}, at {place}/{key}")
        return count

    def _object(self, known: Mapping[str, Any], place: str) -> str:
        named, required = known.get("properties", {}), known.get("required", [])
        others = known.get("additionalProperties", True)
        if not isinstance(named, dict):
            raise InvalidRequest(f"properties must be an object, at {place}/properties")
        if not isinstance(required, list):
            raise InvalidRequest(f"required must be an array, at {place}/required")
        missing = [name for name in required if not isinstance(name, str) or name not in named]
        if missing and not self._is_lenient:
            raise InvalidRequest(
                f"required lists {missing[0]}, which is not among the properties, "
                f"at {place}/required"
            )
        if named:
            return self._members(named, required, place)
        if others is False:
            return quoted("{}")
        value = self._rule(self.value(others, f"{place}/additionalProperties"))
        member = self._rule(f"/{self._names}/ {quoted(':')} {value}")
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _members(self, named: Mapping[str, Any], required: Sequence[str], place: str) -> str:
        """An object with these members; behind the first one that is there, each has a comma before
        it. Made from the last member on:

            a and b, b not required    "{" (a ("," b)?) "}"
            the same, a neither        "{" (a ("," b)? | b)? "}"
        """
        behind = ""
        firsts = [""]  # what the object may be from here on
        for name, schema in reversed([*named.items()]):
            at = f"{place}/properties/{escaped(name)}"
            member = f"{self._name(name, at)} {quoted(':')} {self.value(schema, at)}"
            member = self._rule(member)
            whole = f"{member} {behind}".strip()
            firsts = [whole] if name in required else [whole, *firsts]
            more = f'"," {member}' if name in required else f'("," {member})?'
            behind = self._rule(f"{more} {behind}".strip())
        if "" not in firsts:
            return f'"{{" ({any_of(firsts)}) "}}"'
        return f'"{{" ({any_of(takewhile(bool, firsts))})? "}}"'

    def _name(self, name: str, place: str) -> str:
        is_bare = re.fullmatch(_name_of(_NO_NAME), name) and self._whole.quote[0] not in name
        return quoted(name) if is_bare else self._string(name, place)

    def _literal(self, value: Any) -> str:
        """This value in Lark."""
        if isinstance(value, str):
            return self._string(value, self._whole.place)
        if isinstance(value, list):
            return self._joined("[", [self._literal(one) for one in value], "]")
        if isinstance(value, dict):
            place = self._whole.place
            pairs = [(self._name(name, place), self._literal(one)) for name, one in value.items()]
            return self._joined("{", [f'{name} ":" {one}' for name, one in pairs], "}")
        return quoted(json.dumps(value))

    @staticmethod
    def _joined(begin: str, parts: Sequence[str], end: str) -> str:
        return " ".join([quoted(begin), ' "," '.join(parts), quoted(end)])

    def _string(self, text: str, place: str) -> str:
        if (text + self._whole.quote).index(self._whole.quote) < len(text):
            raise InvalidRequest(f"a text with {self._whole.quote} is not supported, at {place}")
        return " ".join(filter(None, [self._quote, text and quoted(text), self._quote]))

    def _of_reference(self, reference: Any, place: str) -> str:
        """The name of the rule for what a reference refers to; each has one."""
        inner = str(reference).removeprefix("#")
        name = self._referred.get(inner)
        if name is None:
            name = self._referred[inner] = f"{self._whole.name}_ref_{len(self._referred)}"
            found = schemas.at(reference, self._root)
            if found is None:
                raise InvalidRequest(f"Pointer '{inner}' does not exist, at {place}/$ref")
            self.lines.append(f"{name}: {self.value(found, self._whole.place + inner)}")
        return name

    def _any_value(self) -> str:
        """Any value."""
        if self._any is None:
            self._any = f"{self._whole.name}_any"
            bodies = [self._of_kind(kind, {}, self._whole.place) for kind in _TYPES]
            self.lines.append(f"{self._any}: {any_of(bodies)}")
        return self._any

    def _rule(self, body: str) -> str:
        """The name of a rule with this body; one that is a name already stays."""
        if re.fullmatch(r"\w+", body):
            return body
        if body not in self._by_body:
            name = self._by_body[body] = f"{self._whole.name}_{len(self._by_body)}"
            self.lines.append(f"{name}: {body}")
        return self._by_body[body]


def _name_of(excluded: str) -> str:
    """A regular expression for a name without these characters, or blanks around it."""
    return rf"[^\s{excluded}]([^{excluded}]{{0,100}}[^\s{excluded}])?"


def _one_of(bodies: Iterable[str]) -> str:
    """Alternatives that may stand beside other things."""
    return f"({' | '.join(bodies)})"
