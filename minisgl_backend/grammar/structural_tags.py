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

XGrammar's newer form, which vLLM and SGLang accept, is supported if its contents are JSON schemas:
``{"type": "structural_tag", "format": {"type": "triggered_tags" or "tags_with_separator", "tags":
[{"begin", "content": {"type": "json_schema", "json_schema"}, "end"}], ...}}``. Tags with a
separator have no triggers and no free text. Must not know how a model writes tool calls, or which
ids tokens have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar.bare_values import BareValue
from minisgl_backend.grammar.lark import (
    TEXT,
    any_of,
    name_of_up_to,
    spaced,
    spelled,
    up_to,
)
from minisgl_backend.request import TokenId


def read(given: Any) -> StructuralTag:
    """The structural tag of a parsed JSON value. Raises ``InvalidRequest`` with the place of the
    mistake, and ``Unsupported``."""
    _check(isinstance(given, dict), "a structural tag", "an object")
    _check(given.get("type", "structural_tag") == "structural_tag", "type", "structural_tag")
    return _of_format(given) if "format" in given else _of_structures(given)


@dataclass(frozen=True, slots=True)
class Value:
    """A JSON value of a schema."""

    schema: dict[str, Any] | bool

    def lark(self, *, is_lenient: bool) -> str:
        return f"%json {spaced(self.schema, is_lenient=is_lenient)}"


@dataclass(frozen=True, slots=True)
class Member:
    """A text, what stands in it, and a text. ``content`` is a value, texts to choose from, or None
    for any text without ``end``."""

    begin: str
    content: Value | list[str] | None
    end: str
    is_optional: bool

    def lark(self, special_tokens: Mapping[str, TokenId], *, is_lenient: bool) -> str:
        begin, end = (spelled(text, special_tokens) for text in (self.begin, self.end))
        if self.content is None:
            parts = [begin, name_of_up_to(self.end)]
        elif isinstance(self.content, Value):
            parts = [begin, self.content.lark(is_lenient=is_lenient), end]
        else:
            parts = [begin, f"({any_of(spelled(one, {}) for one in self.content)})", end]
        body = " ".join(filter(None, parts))
        return f"({body})?" if self.is_optional else body


@dataclass(frozen=True, slots=True)
class Structure:
    """A text, a value or members, and a text."""

    begin: str
    content: Value | BareValue | list[Member]
    end: str
    is_lenient: bool

    def after(self, beginning: str, special_tokens: Mapping[str, TokenId]) -> str:
        """The structure without ``beginning``, a prefix of its ``begin``, in Lark."""
        rest = spelled(self.begin.removeprefix(beginning), special_tokens)
        end = spelled(self.end, special_tokens)
        if isinstance(self.content, BareValue):
            content = [self.content.name]
        elif isinstance(self.content, Value):
            content = [self.content.lark(is_lenient=self.is_lenient)]
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

    def lark(self, special_tokens: Mapping[str, TokenId]) -> str:
        """The tag in Lark. Raises ``InvalidRequest`` and ``Unsupported`` for its schemas."""
        rules = [TEXT, *self.rules_of_contents(special_tokens), *self._rules(special_tokens)]
        return "\n".join(["%llguidance {}", *rules])

    def rules_of_contents(self, special_tokens: Mapping[str, TokenId]) -> Iterator[str]:
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

    def _rules(self, special_tokens: Mapping[str, TokenId]) -> Iterator[str]:
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

    def _rules_of_text(self, special_tokens: Mapping[str, TokenId]) -> Iterator[str]:
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


def _of_structures(given: Mapping[str, Any]) -> StructuralTag:
    _check_keys(given, "", ("type", "structures", "triggers", "separator", "otherwise", *_FLAGS))
    structures = [
        _structure(item, f"structures[{index}]") for index, item in _items(given, "structures", "")
    ]
    is_needed = _flag(given, "at_least_one", "")
    if is_needed and not given.get("triggers"):
        return _checked(structures, "structures", [], given, "")
    triggers = [trigger for _, trigger in _items(given, "triggers", "")]
    return _checked(structures, "structures", triggers, given, "")


def _of_format(given: Mapping[str, Any]) -> StructuralTag:
    _check_keys(given, "", ("type", "format"))
    form = given["format"]
    _check(isinstance(form, dict), "format", "an object")
    kind = form.get("type")
    if kind not in ("triggered_tags", "tags_with_separator"):
        raise Unsupported(
            f"format.type must be triggered_tags or tags_with_separator, got {json.dumps(kind)}"
        )
    own = "triggers" if kind == "triggered_tags" else "separator"
    _check_keys(form, "format.", ("type", "tags", own, *_FLAGS))
    structures = []
    for index, item in _items(form, "tags", "format."):
        structures.append(_tag_of_format(item, f"format.tags[{index}]"))
    triggers = [t for _, t in _items(form, own, "format.")] if own == "triggers" else []
    return _checked(structures, "format.tags", triggers, form, "format.")


def _checked(
    structures: list[Structure],
    place: str,
    triggers: list[Any],
    given: Mapping[str, Any],
    prefix: str,
) -> StructuralTag:
    for index, trigger in enumerate(triggers):
        at = f"{prefix}triggers[{index}]"
        _check(isinstance(trigger, str) and trigger, at, "a string, not empty")
    for index, structure in enumerate(structures):
        fits = not triggers or structure.begin.startswith(tuple(triggers))
        _check(fits, f"{place}[{index}].begin", "begun by a trigger")
    for index, trigger in enumerate(triggers):
        is_one = any(structure.begin.startswith(trigger) for structure in structures)
        _check(is_one, f"{prefix}triggers[{index}]", "the beginning of a structure")
    separator = given.get("separator", "")
    separators = separator if isinstance(separator, list) else [separator]
    is_right = separators and all(isinstance(one, str) for one in separators)
    _check(is_right, f"{prefix}separator", "a string, or a list of strings, not empty")
    at_least_one = _flag(given, "at_least_one", prefix)
    otherwise = given.get("otherwise")
    if otherwise is not None:
        _check_schema(otherwise, "otherwise")
        _check(at_least_one, "otherwise", "given with at_least_one")
    return StructuralTag(
        structures,
        [] if at_least_one else triggers,
        separators,
        at_least_one,
        _flag(given, "stop_after_first", prefix),
        otherwise,
    )


_FLAGS: Final = ("at_least_one", "stop_after_first")


def _structure(item: Any, place: str) -> Structure:
    _check(isinstance(item, dict), place, "an object")
    _check_keys(item, f"{place}.", ("begin", "schema", "quote", "members", "end", "lenient"))
    if "members" not in item:
        return _structure_of(item, place, item, "schema")
    for key in ("schema", "quote"):
        _check(key not in item, place, f"given a {key} or members, not both")
    given = item["members"]
    _check(isinstance(given, list), f"{place}.members", "a list")
    members = [_member(one, f"{place}.members[{index}]") for index, one in enumerate(given)]
    begin, end = _ends(item, place)
    return Structure(begin, members, end, _flag(item, "lenient", f"{place}."))


def _member(item: Any, place: str) -> Member:
    _check(isinstance(item, dict), place, "an object")
    _check_keys(item, f"{place}.", ("begin", "schema", "choices", "end", "optional"))
    content: Value | list[str] | None = None
    if (choices := item.get("choices")) is not None:
        _check("schema" not in item, place, "given a schema or choices, not both")
        is_right = isinstance(choices, list) and all(isinstance(one, str) for one in choices)
        _check(choices and is_right, f"{place}.choices", "a list of strings, not empty")
        content = choices
    elif "schema" in item:
        _check_schema(item["schema"], f"{place}.schema")
        content = Value(item["schema"])
    begin, end = _ends(item, place)
    _check(content is not None or end, f"{place}.end", "a string, not empty, after any text")
    return Member(begin, content, end, _flag(item, "optional", f"{place}."))


def _tag_of_format(item: Any, place: str) -> Structure:
    """``_structure`` in the newer form."""
    _check(isinstance(item, dict), place, "an object")
    content = item.get("content")
    _check(isinstance(content, dict), f"{place}.content", "an object")
    if content.get("type") != "json_schema":
        raise Unsupported(
            f"{place}.content.type must be json_schema, got {json.dumps(content.get('type'))}"
        )
    _check_keys(item, f"{place}.", ("type", "begin", "content", "end"))
    _check_keys(content, f"{place}.content.", ("type", "json_schema"))
    return _structure_of(item, place, content, "json_schema")


def _structure_of(item: Any, place: str, holder: Any, key: str) -> Structure:
    """The structure of a tag; its schema is ``holder[key]``."""
    schema = holder.get(key, True)
    _check_schema(schema, f"{place}.{key}")
    begin, end = _ends(item, place)
    content: Value | BareValue = Value(schema)
    if (quote := item.get("quote")) is not None:
        _check(isinstance(quote, str) and quote, f"{place}.quote", "a string, not empty")
        (index,) = re.findall(r"\d+", place)
        content = BareValue(schema, quote, f"bare_{index}", f"#/structures/{index}/schema")
    return Structure(begin, content, end, _flag(item, "lenient", f"{place}."))


def _ends(item: Mapping[str, Any], place: str) -> tuple[str, str]:
    """The texts around what an item holds."""
    begin, end = item.get("begin"), item.get("end", "")
    _check(isinstance(begin, str), f"{place}.begin", "a string")
    _check(isinstance(end, str), f"{place}.end", "a string")
    return str(begin), str(end)


def _items(given: Mapping[str, Any], key: str, prefix: str) -> list[tuple[int, Any]]:
    items = given.get(key)
    _check(isinstance(items, list) and items, f"{prefix}{key}", "a list, not empty")
    return list(enumerate(items or ()))


def _flag(given: Mapping[str, Any], key: str, prefix: str) -> bool:
    value = given.get(key, False)
    _check(isinstance(value, bool), f"{prefix}{key}", "true or false")
    return value is True


def _check_keys(given: Mapping[str, Any], prefix: str, known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise Unsupported(f"{prefix}{key} of a structural tag is not supported")


def _check_schema(schema: object, place: str) -> None:
    _check(isinstance(schema, dict | bool), place, "a JSON schema")
    _check(schema is not False, place, "a JSON schema that some value follows, got false")


def _check(is_right: object, place: str, expected: str) -> None:
    if not is_right:
        raise InvalidRequest(f"{place} must be {expected}")
