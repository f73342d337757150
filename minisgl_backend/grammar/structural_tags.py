"""Structural tags: texts with structures, each a beginning, a value of a JSON schema and an end.

    {"structures": [{"begin": "<call=f>", "schema": {...}, "end": "</call>"}, ...],
     "triggers": ["<call="], "at_least_one": false, "stop_after_first": false}

Text is free, but a trigger must continue as one of the structures that begin with it. With
``stop_after_first`` the answer ends after its first structure. With ``at_least_one`` there is no
free text: the answer is one or more structures, with the text ``separator`` (empty by default), or
one of a list of texts, between them. If ``otherwise``, a JSON schema, is given, the answer may be a
value of it instead. Keywords of a schema that cannot be enforced are errors; a structure with
``"lenient": true`` ignores them.

In place of a schema a structure may have ``members``, texts that come one after the other:
``[{"begin": "<city>", "end": "</city>", "optional": true}, ...]``. Between its ``begin`` and
``end`` a member is a value of its ``schema``, or one of its ``choices``, or, without both, any text
in which the ``end`` does not occur.

A structure with a ``quote`` has its value in the notation of ``bare_values``, with that text around
strings.

XGrammar's newer form is ``{"type": "structural_tag", "format": {...}}`` (``formats``). Must not
know how a model writes tool calls, or which ids tokens have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from minisgl_backend.grammar.bare_values import BareValue
from minisgl_backend.grammar.checks import (
    FLAGS,
    check,
    check_keys,
    check_schema,
    flag,
    items,
    texts,
)
from minisgl_backend.grammar.formats import Reader
from minisgl_backend.grammar.lark import (
    TEXT,
    any_of,
    name_of_up_to,
    spaced,
    spelled,
    up_to,
)
from minisgl_backend.grammar.pieces import Piece, Value, Writer
from minisgl_backend.grammar.special_tokens import SpecialTokens


def read(given: Any, special_tokens: SpecialTokens) -> StructuralTag | FormattedTag:
    """The structural tag of a parsed JSON value. Raises ``InvalidRequest`` with the place of the
    mistake, and ``Unsupported``."""
    check(isinstance(given, dict), "a structural tag", "an object")
    check(given.get("type", "structural_tag") == "structural_tag", "type", "structural_tag")
    if "format" not in given:
        return _of_structures(given)
    check_keys(given, "", ("type", "format"))
    return FormattedTag(given["format"], Reader(special_tokens).read(given["format"], "format"))


@dataclass(frozen=True, slots=True)
class Member:
    """A text, what stands in it, and a text. ``content`` is a value, texts to choose from, or None
    for any text without ``end``."""

    begin: str
    content: Value | list[str] | None
    end: str
    is_optional: bool

    def lark(self, special_tokens: SpecialTokens, *, is_lenient: bool) -> str:
        begin, end = (spelled(text, special_tokens) for text in (self.begin, self.end))
        if self.content is None:
            parts = [begin, name_of_up_to(self.end)]
        elif isinstance(self.content, Value):
            parts = [begin, _json(self.content, is_lenient=is_lenient), end]
        else:
            choices = any_of(spelled(one, SpecialTokens()) for one in self.content)
            parts = [begin, f"({choices})", end]
        body = " ".join(filter(None, parts))
        return f"({body})?" if self.is_optional else body


@dataclass(frozen=True, slots=True)
class Structure:
    """A text, a value or members, and a text."""

    begin: str
    content: Value | BareValue | list[Member]
    end: str
    is_lenient: bool

    def after(self, beginning: str, special_tokens: SpecialTokens) -> str:
        """The structure without ``beginning``, a prefix of its ``begin``, in Lark."""
        rest = spelled(self.begin.removeprefix(beginning), special_tokens)
        end = spelled(self.end, special_tokens)
        if isinstance(self.content, BareValue):
            content = [self.content.name]
        elif isinstance(self.content, Value):
            content = [_json(self.content, is_lenient=self.is_lenient)]
        else:
            content = [m.lark(special_tokens, is_lenient=self.is_lenient) for m in self.content]
        return " ".join(filter(None, [rest, *content, end]))


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Structures, and where they may occur. Without ``triggers`` there is no free text."""

    structures: list[Structure]
    triggers: list[str]
    separators: list[str]
    at_least_one: bool
    stop_after_first: bool
    otherwise: dict[str, Any] | bool | None

    @property
    def beginnings(self) -> list[str]:
        """How the structures begin."""
        return [structure.begin for structure in self.structures]

    def form(self, special_tokens: SpecialTokens) -> str:
        """The tag in llguidance's own form. Raises ``InvalidRequest`` and ``Unsupported`` for its
        schemas."""
        rules = [TEXT, *self._rules_of_contents(special_tokens), *self._rules(special_tokens)]
        return LLMatcher.grammar_from_lark("\n".join(["%llguidance {}", *rules]))

    def written(self, writer: Writer, special_tokens: SpecialTokens) -> list[str]:
        """The structures in the bodies of rules; they need the rule ``TEXT``."""
        writer.lines += self._rules_of_contents(special_tokens)
        return [structure.after("", special_tokens) for structure in self.structures]

    def _rules_of_contents(self, special_tokens: SpecialTokens) -> Iterator[str]:
        """The rules that the contents of structures need."""
        ends: set[str] = set()
        for structure in self.structures:
            if isinstance(structure.content, BareValue):
                ends.add(structure.content.quote)
                yield from structure.content.rules(special_tokens, is_lenient=structure.is_lenient)
            elif isinstance(structure.content, list):
                ends |= {member.end for member in structure.content if member.content is None}
        for end in sorted(ends):
            yield up_to(end, name_of_up_to(end), special_tokens)

    def _rules(self, special_tokens: SpecialTokens) -> Iterator[str]:
        if self.triggers:
            yield from self._rules_of_text(special_tokens)
            return
        yield f"one: {any_of(s.after('', special_tokens) for s in self.structures)}"
        separated = (spelled(separator, special_tokens) for separator in self.separators)
        more = any_of(" ".join(filter(None, [separator, "one"])) for separator in separated)
        all_of_them = "one" if self.stop_after_first else f"one ({more})*"
        if self.otherwise is not None:
            yield f"other: %json {spaced(self.otherwise)}"
            yield f"start: other | {all_of_them}"
        else:
            yield f"start: {all_of_them}" if self.at_least_one else f"start: ({all_of_them})?"

    def _rules_of_text(self, special_tokens: SpecialTokens) -> Iterator[str]:
        names = []
        for index, trigger in enumerate(self.triggers):
            fitting = [s for s in self.structures if s.begin.startswith(trigger)]
            name = f"tag_{index}"
            names.append(name)
            body = any_of(s.after(trigger, special_tokens) for s in fitting)
            yield up_to(trigger, f"{name}_text", special_tokens)
            yield f"{name}: {name}_text ({body})"
        tags = " | ".join(names)
        yield f"start: TEXT | {tags}" if self.stop_after_first else f"start: ({tags})* TEXT"


@dataclass(frozen=True, slots=True)
class FormattedTag:
    """A tag in XGrammar's newer form, as it was given and as it was read."""

    given: Mapping[str, Any]
    piece: Piece

    @property
    def beginnings(self) -> list[str]:
        """How the tags of its format begin, if it has any, and all begin with texts."""
        begins = [tag["begin"] for tag in self.given.get("tags", ())]
        return begins if all(isinstance(begin, str) for begin in begins) else []

    @property
    def at_least_one(self) -> bool:
        """Whether there must be a tag."""
        return flag(self.given, "at_least_one", "format.")

    @property
    def otherwise(self) -> None:
        """There is no other answer."""

    def form(self, special_tokens: SpecialTokens) -> str:
        """The tag in llguidance's own form. Raises ``InvalidRequest`` and ``Unsupported`` for its
        schemas."""
        writer = Writer()
        return writer.source(f"start: {writer.written(self.piece)}")

    def written(self, writer: Writer, special_tokens: SpecialTokens) -> list[str]:
        """The tags in the bodies of rules."""
        tags = Reader(special_tokens).tags(self.given, "format")
        return [writer.written(tag) for tag in tags]


def _json(value: Value, *, is_lenient: bool) -> str:
    """A JSON value in the body of a rule."""
    return f"%json {spaced(value.schema, is_lenient=is_lenient)}"


def _of_structures(given: Mapping[str, Any]) -> StructuralTag:
    check_keys(given, "", ("type", "structures", "triggers", "separator", "otherwise", *FLAGS))
    structures = [
        _structure(item, f"structures[{index}]") for index, item in items(given, "structures", "")
    ]
    at_least_one = flag(given, "at_least_one", "")
    triggers = [] if at_least_one and not given.get("triggers") else items(given, "triggers", "")
    for index, trigger in triggers:
        check(isinstance(trigger, str) and trigger, f"triggers[{index}]", "a string, not empty")
    beginnings = tuple(trigger for _, trigger in triggers)
    for index, structure in enumerate(structures):
        fits = not triggers or structure.begin.startswith(beginnings)
        check(fits, f"structures[{index}].begin", "begun by a trigger")
    for index, trigger in triggers:
        is_one = any(structure.begin.startswith(trigger) for structure in structures)
        check(is_one, f"triggers[{index}]", "the beginning of a structure")
    otherwise = given.get("otherwise")
    if otherwise is not None:
        check_schema(otherwise, "otherwise")
        check(at_least_one, "otherwise", "given with at_least_one")
    separators = texts(given.get("separator", ""), "separator")
    check(at_least_one or separators == [""], "separator", "given with at_least_one")
    return StructuralTag(
        structures,
        [] if at_least_one else [*beginnings],
        separators,
        at_least_one,
        flag(given, "stop_after_first", ""),
        otherwise,
    )


def _structure(item: Any, place: str) -> Structure:
    check(isinstance(item, dict), place, "an object")
    check_keys(item, f"{place}.", ("begin", "schema", "quote", "members", "end", "lenient"))
    if "members" not in item:
        return _structure_of(item, place)
    for key in ("schema", "quote"):
        check(key not in item, place, f"given a {key} or members, not both")
    given = item["members"]
    check(isinstance(given, list), f"{place}.members", "a list")
    members = [_member(one, f"{place}.members[{index}]") for index, one in enumerate(given)]
    begin, end = _ends(item, place)
    return Structure(begin, members, end, flag(item, "lenient", f"{place}."))


def _member(item: Any, place: str) -> Member:
    check(isinstance(item, dict), place, "an object")
    check_keys(item, f"{place}.", ("begin", "schema", "choices", "end", "optional"))
    content: Value | list[str] | None = None
    if (choices := item.get("choices")) is not None:
        check("schema" not in item, place, "given a schema or choices, not both")
        is_right = isinstance(choices, list) and all(isinstance(one, str) for one in choices)
        check(choices and is_right, f"{place}.choices", "a list of strings, not empty")
        content = choices
    elif "schema" in item:
        check_schema(item["schema"], f"{place}.schema")
        content = Value(item["schema"], f"{place}.schema")
    begin, end = _ends(item, place)
    check(content is not None or end, f"{place}.end", "a string, not empty, after any text")
    return Member(begin, content, end, flag(item, "optional", f"{place}."))


def _structure_of(item: Any, place: str) -> Structure:
    """A structure with a value."""
    schema = item.get("schema", True)
    check_schema(schema, f"{place}.schema")
    begin, end = _ends(item, place)
    content: Value | BareValue = Value(schema, f"{place}.schema")
    if (quote := item.get("quote")) is not None:
        check(isinstance(quote, str) and quote, f"{place}.quote", "a string, not empty")
        (index,) = re.findall(r"\d+", place)
        content = BareValue(schema, quote, f"bare_{index}", f"#/structures/{index}/schema")
    return Structure(begin, content, end, flag(item, "lenient", f"{place}."))


def _ends(item: Mapping[str, Any], place: str) -> tuple[str, str]:
    """The texts around what an item holds."""
    begin, end = item.get("begin"), item.get("end", "")
    check(isinstance(begin, str), f"{place}.begin", "a string")
    check(isinstance(end, str), f"{place}.end", "a string")
    return str(begin), str(end)
