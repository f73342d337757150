"""XGrammar's structural tags, which vLLM and SGLang accept: a format that may hold further ones.

    {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "json_schema", "json_schema": {...}}]}

``read`` turns a format into pieces (``pieces``). A text in which special tokens occur is those
tokens; any text has none. Any text in a tag holds none of the tag's ends, and any text before a
trigger none of the triggers, even if they are special tokens, spelled out. Errors name the place of
the format, as in ``format.elements[0].content``. Must not know how pieces are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar import ebnf, tagged_values
from minisgl_backend.grammar.checks import (
    FLAGS,
    check,
    check_keys,
    check_schema,
    count,
    flag,
    items,
    texts,
)
from minisgl_backend.grammar.pieces import (
    Grammar,
    Piece,
    Text,
    Value,
    any_text,
    fixed,
    one_of,
    pieces_of,
    repeated,
    row_of,
)
from minisgl_backend.grammar.special_tokens import SpecialTokens


@dataclass(frozen=True, slots=True)
class _Tag:
    """``pieces`` are its content and its end, without ``begin``."""

    begin: str
    pieces: list[Piece]


class Reader:
    """Reads formats for a tokenizer with these special tokens."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self._special_tokens = special_tokens

    def read(self, given: Any, place: str, ends: Sequence[str] = ()) -> Piece:
        """A format. Any text at its end holds none of the texts ``ends``. Raises ``InvalidRequest``
        with the place of the mistake, and ``Unsupported``."""
        check(isinstance(given, dict), place, "an object")
        kind = given.get("type")
        read = FORMATS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise Unsupported(
                f"{place}.type must be one of {', '.join(FORMATS)}, got {json.dumps(kind)}"
            )
        return read(self, given, place, ends)

    def tags(self, given: Mapping[str, Any], place: str) -> list[Piece]:
        """The tags of a format that has ``tags``."""
        return [self._whole(tag, place) for tag in self._tags(given, place)]

    # --- formats without others in them ----------------------------------------------------------

    def _const_string(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "value"))
        check(isinstance(given.get("value"), str), f"{place}.value", "a string")
        return self._text(given["value"], place)

    def _any_text(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "excludes", "max_tokens", "max_chars"))
        _check_unset(given, place, ("max_tokens",))
        most = count(given, "max_chars", place)
        return any_text(place, [*_excludes(given, place), *ends], most)

    def _any_tokens(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "exclude_tokens", "max_tokens"))
        _check_unset(given, place, ("max_tokens",))
        self._check_excluded(given, place)
        return any_text(place, ends)

    def _regex(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "pattern"))
        pattern = given.get("pattern")
        is_right = isinstance(pattern, str) and not re.search(r"(?<!\\)(\\\\)*\\\Z", pattern)
        check(is_right, f"{place}.pattern", "a regular expression")
        if not pattern:
            return fixed("", place)
        escapes = {"/": r"\/", "\n": r"\n"}
        body = re.sub(r"(?s)\\.|/|\n", lambda found: escapes.get(found[0], found[0]), str(pattern))
        return Text(f"/{body}/", place)

    def _grammar(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "grammar", "syntax"))
        syntax = given.get("syntax", "ebnf")
        source = _not_empty(given.get("grammar"), f"{place}.grammar")
        check(syntax in ("ebnf", "lark"), f"{place}.syntax", "ebnf or lark")
        if syntax == "lark":
            return Grammar(source)
        check("::=" in source, f"{place}.grammar", "a grammar with a rule root ::= ...")
        try:
            lark = ebnf.to_lark(source)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error}, at {place}.grammar") from None
        body = ebnf.to_terminal(source)
        return Grammar(lark) if body is None else Text(body, place)

    def _json_schema(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        known = ("style", "any_order", "max_whitespace_cnt", "excludes")
        check_keys(given, f"{place}.", ("type", "json_schema", *known))
        _check_unset(given, place, known[1:])
        return self._value(given, place, given.get("style", "json"))

    def _qwen_xml(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "json_schema"))
        return self._value(given, place, "qwen_xml")

    def _value(self, given: Mapping[str, Any], place: str, style: Any) -> Piece:
        styles = ("json", *tagged_values.STYLES)
        if style not in styles:
            raise Unsupported(f"{place}.style must be one of {', '.join(styles)}, got {style}")
        schema, at = given.get("json_schema"), f"{place}.json_schema"
        check_schema(schema, at)
        assert isinstance(schema, dict | bool)
        return Value(schema, place) if style == "json" else tagged_values.members(schema, style, at)

    def _token(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "token"))
        return self._text(self._name_of(given.get("token"), f"{place}.token"), place)

    # --- formats of formats ----------------------------------------------------------------------

    def _sequence(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "elements"))
        found = items(given, "elements", f"{place}.")
        return row_of(
            self.read(one, f"{place}.elements[{at}]", ends if at == len(found) - 1 else ())
            for at, one in found
        )

    def _or(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "elements"))
        found = items(given, "elements", f"{place}.")
        return one_of(self.read(one, f"{place}.elements[{at}]", ends) for at, one in found)

    def _repeat(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        if given["type"] == "repeat":
            check_keys(given, f"{place}.", ("type", "content", "min", "max"))
            for key in ("min", "max"):
                check(given.get(key) is not None, f"{place}.{key}", "given")
            least = count(given, "min", place) or 0
            most = None if given["max"] == -1 else count(given, "max", place)
            check(most is None or most >= least, f"{place}.max", "at least min, or -1")
        else:
            check_keys(given, f"{place}.", ("type", "content"))
            least, most = _COUNTS[given["type"]]
        content = self.read(given.get("content"), f"{place}.content", ends)
        return repeated(content, least, most, place)

    def _single_tag(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        return self._whole(self._tag(given, place), place)

    def _triggered_tags(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        known = ("triggers", "tags", "excludes", *FLAGS)
        check_keys(given, f"{place}.", ("type", *known))
        triggers = [
            _not_empty(one, f"{place}.triggers[{at}]")
            for at, one in items(given, "triggers", f"{place}.")
        ]
        return self._triggered(given, triggers, place, [*_excludes(given, place), *ends])

    def _token_triggered(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        known = ("trigger_tokens", "tags", "exclude_tokens", *FLAGS)
        check_keys(given, f"{place}.", ("type", *known))
        self._check_excluded(given, place)
        triggers = [
            self._name_of(one, f"{place}.trigger_tokens[{at}]")
            for at, one in items(given, "trigger_tokens", f"{place}.")
        ]
        return self._triggered(given, triggers, place, ends)

    def _triggered(
        self, given: Mapping[str, Any], triggers: list[str], place: str, excluded: Sequence[str]
    ) -> Piece:
        tags = self._tags(given, place)
        for at, tag in enumerate(tags):
            is_begun = tag.begin.startswith(tuple(triggers))
            check(is_begun, f"{place}.tags[{at}].begin", "begun by a trigger")
        begun = []
        for at, trigger in enumerate(triggers):
            fitting = [tag for tag in tags if tag.begin.startswith(trigger)]
            check(fitting, f"{place}.triggers[{at}]", "the beginning of a tag")
            bodies = (self._whole(tag, place, trigger) for tag in fitting)
            begun.append(row_of([self._text(trigger, place), one_of(bodies)]))
        once = flag(given, "stop_after_first", f"{place}.")
        needed = flag(given, "at_least_one", f"{place}.")
        return self._among_text(begun, place, [*triggers, *excluded], once=once, needed=needed)

    def _dispatch(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "rules", "loop", "excludes"))
        excluded = [*_excludes(given, place), *ends]
        return self._dispatched(given, place, excluded, _not_empty)

    def _token_dispatch(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "rules", "loop", "exclude_tokens"))
        self._check_excluded(given, place)
        return self._dispatched(given, place, ends, self._name_of)

    def _dispatched(
        self,
        given: Mapping[str, Any],
        place: str,
        excluded: Sequence[str],
        name_of: Callable[[Any, str], str],
    ) -> Piece:
        begun, patterns = [], []
        for at, rule in items(given, "rules", f"{place}."):
            inside = f"{place}.rules[{at}]"
            check(isinstance(rule, list) and len(rule) == 2, inside, "a pattern and a format")
            patterns.append(name_of(rule[0], f"{inside}[0]"))
            content = self.read(rule[1], f"{inside}[1]")
            begun.append(row_of([self._text(patterns[-1], inside), content]))
        once = not flag({"loop": True, **given}, "loop", f"{place}.")
        return self._among_text(begun, place, [*patterns, *excluded], once=once, needed=False)

    def _among_text(
        self, begun: list[Piece], place: str, excluded: Sequence[str], *, once: bool, needed: bool
    ) -> Piece:
        """Free text without the texts ``excluded``, among which are these pieces: any number of
        them, or if ``once`` one at most. If one is ``needed``, the first one begins the answer."""
        text = any_text(place, excluded)
        alone = one_of(begun)
        after_text = one_of(row_of([text, one]) for one in begun)
        if once:
            return alone if needed else one_of([text, after_text])
        more = row_of([repeated(after_text, 0, None, place), text])
        return row_of([alone, more]) if needed else more

    def _separated(self, given: Mapping[str, Any], place: str, ends: Sequence[str]) -> Piece:
        check_keys(given, f"{place}.", ("type", "tags", "separator", *FLAGS))
        one = one_of(self._whole(tag, place) for tag in self._tags(given, place))
        found = texts(given.get("separator", ""), f"{place}.separator")
        separator = one_of(self._text(text, f"{place}.separator") for text in found)
        if not flag(given, "stop_after_first", f"{place}."):
            more = repeated(row_of([separator, one]), 0, None, place)
            one = row_of([one, more])
        is_needed = flag(given, "at_least_one", f"{place}.")
        return one if is_needed else repeated(one, 0, 1, place)

    # --- parts of formats ------------------------------------------------------------------------

    def _tags(self, given: Mapping[str, Any], place: str) -> list[_Tag]:
        return [
            self._tag(one, f"{place}.tags[{at}]") for at, one in items(given, "tags", f"{place}.")
        ]

    def _tag(self, given: Any, place: str) -> _Tag:
        check(isinstance(given, dict), place, "an object")
        check(given.get("type", "tag") == "tag", f"{place}.type", "tag")
        check_keys(given, f"{place}.", ("type", "begin", "content", "end"))
        begin = self._mark(given.get("begin"), f"{place}.begin")
        end = given.get("end", "")
        if isinstance(end, dict):
            end = self._mark(end, f"{place}.end")
        ends = texts(end, f"{place}.end")
        content = self.read(given.get("content"), f"{place}.content", ends)
        return _Tag(begin, [content, one_of(self._text(one, f"{place}.end") for one in ends)])

    def _whole(self, tag: _Tag, place: str, before: str = "") -> Piece:
        """A tag behind ``before``, a beginning of its ``begin``."""
        return row_of([self._text(tag.begin.removeprefix(before), place), *tag.pieces])

    def _mark(self, given: Any, place: str) -> str:
        """A text, which may be given as a token."""
        if not isinstance(given, dict):
            check(isinstance(given, str), place, "a string, or a token")
            return str(given)
        check(given.get("type") == "token", f"{place}.type", "token")
        check_keys(given, f"{place}.", ("type", "token"))
        return self._name_of(given.get("token"), f"{place}.token")

    def _text(self, text: str, place: str) -> Piece:
        return pieces_of(text, self._special_tokens, place)

    def _name_of(self, token: Any, place: str) -> str:
        """The text of a special token, which is given by that or by its id."""
        for name, token_id in self._special_tokens.items():
            if token in (name, token_id) and not isinstance(token, bool):
                return name
        raise Unsupported(f"{place} must be a special token, got {json.dumps(token)}")

    def _check_excluded(self, given: Mapping[str, Any], place: str) -> None:
        """Any text has no special tokens; no others can be excluded."""
        excluded = given.get("exclude_tokens", [])
        check(isinstance(excluded, list), f"{place}.exclude_tokens", "a list")
        for at, token in enumerate(excluded):
            self._name_of(token, f"{place}.exclude_tokens[{at}]")


_COUNTS: Final = {"optional": (0, 1), "star": (0, None), "plus": (1, None)}
FORMATS: Final[Mapping[str, Callable[[Reader, Mapping[str, Any], str, Sequence[str]], Piece]]] = {
    "const_string": Reader._const_string,
    "json_schema": Reader._json_schema,
    "any_text": Reader._any_text,
    "regex": Reader._regex,
    "grammar": Reader._grammar,
    "sequence": Reader._sequence,
    "or": Reader._or,
    "optional": Reader._repeat,
    "star": Reader._repeat,
    "plus": Reader._repeat,
    "repeat": Reader._repeat,
    "tag": Reader._single_tag,
    "triggered_tags": Reader._triggered_tags,
    "tags_with_separator": Reader._separated,
    "dispatch": Reader._dispatch,
    "token": Reader._token,
    "any_tokens": Reader._any_tokens,
    "token_triggered_tags": Reader._token_triggered,
    "token_dispatch": Reader._token_dispatch,
    "qwen_xml_parameter": Reader._qwen_xml,
}


def _excludes(given: Mapping[str, Any], place: str) -> Iterator[str]:
    excluded = given.get("excludes", [])
    check(isinstance(excluded, list), f"{place}.excludes", "a list")
    return (_not_empty(one, f"{place}.excludes[{at}]") for at, one in enumerate(excluded))


def _not_empty(text: Any, place: str) -> str:
    check(isinstance(text, str) and text, place, "a string, not empty")
    return str(text)


def _check_unset(given: Mapping[str, Any], place: str, keys: Sequence[str]) -> None:
    """Refuse options that are not followed, unless they ask for nothing."""
    for key in keys:
        value = given.get(key)
        if value is not None and value is not False and value != []:
            raise Unsupported(f"{place}.{key} is not supported")
