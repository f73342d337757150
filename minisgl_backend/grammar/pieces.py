"""The pieces of a form, and how they are joined -> Lark.

llguidance divides an answer into lexemes, each of which takes as many characters as it can. So
where a piece ends must be clear without a look at what follows. Pieces that are regular languages
(``Text``) become one lexeme with their neighbours, as far as their ends are open. An open text
before something that is not regular, a JSON value or a grammar, is refused if it can go on with
what may begin there. The exception is a text that ends with a fixed one: then it ends where that
occurs first. Special tokens are no text, so they end anything.

Must not know what a form is for, or how a client writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from itertools import pairwise
from typing import Any, Final, TypeAlias

from llguidance import LLMatcher, LLTokenizer

from minisgl_backend.errors import Unsupported
from minisgl_backend.grammar import value_types
from minisgl_backend.grammar.lark import any_of, quoted, spaced
from minisgl_backend.grammar.special_tokens import SpecialTokens
from minisgl_backend.request import TokenId

ANY: Final = r"/(.|\n)*/"
_ANY_CHARACTER: Final = r"\s\S"


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A regular language: ``lark`` is the body of a terminal. Errors name its ``place``.

    ``texts`` are its texts, if they are known. In the any text at its end the texts ``without`` do
    not occur. It ``is_closed`` if its end is clear: no text of it begins another one, or the
    shortest match is meant (``_ended``), for which its rule asks by ``[lazy]``. It ``is_blank`` if
    its texts can go on with white space alone. ``mark`` is a fixed text at its end.
    """

    lark: str
    place: str
    texts: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    is_closed: bool = False
    is_blank: bool = False
    mark: str = ""

    def then(self, other: Text) -> Text:
        """This text, and then another one."""
        if self.texts == ("",):
            return other
        if other.texts == ("",):
            return self
        if self.texts and other.texts and len(self.texts) == len(other.texts) == 1:
            return fixed(self.texts[0] + other.texts[0], self.place)
        ended = bool(self.without and other.texts) and all(
            any(one in text for one in self.without) for text in other.texts or ()
        )
        return Text(
            f"{self.lark} {other.lark}",
            other.place if other.mark == "" else self.place,
            without=other.without if self.is_closed else (),
            is_closed=other.is_closed and (self.is_closed or ended),
            is_blank=other.is_blank,
            mark=other.mark,
        )

    def goes_on(self, first: str = _ANY_CHARACTER) -> bool:
        """Whether it has a text that begins another one of its texts, which goes on with one of
        these characters."""
        if self.is_closed:
            return False
        if first == _ANY_CHARACTER and (self.without or self.is_blank):
            return True
        return _has_texts(f"({self.lark} /[{first}]/ {ANY}) & ({self.lark})")


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A special token."""

    token_id: TokenId


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A JSON value of a schema."""

    schema: dict[str, Any] | bool
    place: str


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """What a grammar in Lark allows."""

    lark: str


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A piece, and what follows it."""

    first: Piece
    rest: Piece


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of several pieces."""

    pieces: list[Piece]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A piece at least and at most so many times; without ``most``, any number of times."""

    piece: Piece
    least: int
    most: int | None


Piece: TypeAlias = Text | Token | Value | Grammar | Row | Choice | Repeated


def fixed(text: str, place: str) -> Text:
    """This text alone."""
    return Text(quoted(text), place, texts=(text,), is_closed=True, mark=text)


def any_text(
    place: str, without: Iterable[str] = (), most: int | None = None, least: int = 0
) -> Text:
    """Any text of at least and at most so many characters in which these texts do not occur."""
    is_any = least == 0 and most is None
    body = ANY if is_any else rf"/(.|\n){{{least},{'' if most is None else most}}}/"
    excluded = tuple(dict.fromkeys(filter(None, without)))
    if excluded:
        body = f"({body} & ~({ANY} ({any_of(map(quoted, excluded))}) {ANY}))"
    return Text(body, place, without=excluded)


def one_of(pieces: Iterable[Piece]) -> Piece:
    """One of these pieces; those that are regular become one."""
    flat = [one for piece in pieces for one in _alternatives(piece)]
    texts = [piece for piece in flat if isinstance(piece, Text)]
    others = [piece for piece in flat if not isinstance(piece, Text)]
    if len(texts) > 1:
        known: tuple[str, ...] | None = None
        if all(text.texts is not None for text in texts):
            known = tuple(dict.fromkeys(one for text in texts for one in text.texts or ()))
        ordered = sorted(known or ())  # a text stands right before those that it begins
        is_closed = known is not None and not any(b.startswith(a) for a, b in pairwise(ordered))
        body = f"({any_of(text.lark for text in texts)})"
        texts = [Text(body, texts[0].place, texts=known, is_closed=is_closed)]
    found = [*others, *texts]
    return found[0] if len(found) == 1 else Choice(found)


def _alternatives(piece: Piece) -> list[Piece]:
    return piece.pieces if isinstance(piece, Choice) else [piece]


def repeated(piece: Piece, least: int, most: int | None, place: str) -> Piece:
    """The piece at least and at most so many times. Raises ``Unsupported``."""
    if most == 0:
        return fixed("", place)
    if isinstance(piece, Text):
        return Text(f"({piece.lark}){{{least},{'' if most is None else most}}}", place)
    if most != 1 and _is_open(piece):
        raise _unclear(place, "what it repeats ends")
    return Repeated(piece, least, most)


def row_of(pieces: Iterable[Piece]) -> Piece:
    """These pieces, one after the other. Raises ``Unsupported``."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(last, Text) and isinstance(piece, Text):
            merged[-1] = last.then(piece)
        else:
            merged.append(piece)
    return reduce(lambda then, first: _joined(first, then), reversed(merged))


def _joined(first: Piece, then: Piece) -> Piece:
    """A piece, and then another one, so that it is clear where the first one ends."""
    if isinstance(first, Text):
        return _before(first, then)
    if isinstance(first, Row):
        return _joined(first.first, _joined(first.rest, then))
    if isinstance(then, Text) and then.texts == ("",):
        return first
    if isinstance(first, Choice) and _is_open(first):
        return one_of([_joined(one, then) for one in first.pieces])
    if isinstance(first, Repeated) and _is_open(first):  # at most once
        return _joined(Choice([fixed("", ""), first.piece]), then)
    more = value_types.more(first.schema) if isinstance(first, Value) else ""
    if isinstance(first, Value) and more and _begins_with(then, more):
        raise Unsupported(
            f"{first.place} may be a number, and what follows it begins like the rest of one: "
            "where it ends cannot be told"
        )
    return Row(first, then)


def _before(text: Text, then: Piece) -> Piece:
    """A text, and then a piece."""
    if text.texts == ("",):
        return then
    if isinstance(then, Text):
        return text.then(then)
    first, rest = (then.first, then.rest) if isinstance(then, Row) else (then, None)
    if isinstance(first, Text):
        before: Piece = text.then(first)
    elif isinstance(first, Choice) and text.goes_on():
        before = one_of([_before(text, one) for one in first.pieces])
    elif isinstance(first, Repeated) and text.goes_on():
        before = _before_repeated(text, first)
    else:
        return Row(_ended(text, first), then)
    return before if rest is None else _joined(before, rest)


def _ended(text: Text, then: Piece) -> Text:
    """The text, so that it is clear where it ends, or ``Unsupported``."""
    if isinstance(then, Token) or not text.goes_on():
        return text
    if isinstance(then, Value) and (
        text.is_blank or not text.goes_on(value_types.first(then.schema))
    ):
        return text
    if text.mark:
        return replace(text, is_closed=True)
    raise _unclear(text.place, "it ends")


def _before_repeated(text: Text, again: Repeated) -> Piece:
    """A text, and then a repetition: the text stands alone, if that is allowed, or before the first
    one."""
    once = _before(text, again.piece)
    if again.most != 1:
        if _is_open(once):
            raise _unclear(text.place, "it ends")
        most = None if again.most is None else again.most - 1
        once = _joined(once, Repeated(again.piece, max(again.least - 1, 0), most))
    return once if again.least else one_of([text, once])


def _unclear(place: str, what: str) -> Unsupported:
    return Unsupported(f"{place} can go on with what may follow it: where {what} cannot be told")


def _is_open(piece: Piece) -> bool:
    """Whether what follows could be taken for a part of it."""
    if isinstance(piece, Text):
        return piece.goes_on()
    if isinstance(piece, Row):
        return _is_open(piece.rest)
    if isinstance(piece, Choice):
        return any(_is_open(one) for one in piece.pieces)
    return isinstance(piece, Repeated) and _is_open(piece.piece)


def _begins_with(piece: Piece, first: str) -> bool:
    """Whether all that it may be begins with one of these characters."""
    if isinstance(piece, Text):
        if piece.texts is not None:
            return all(re.match(f"[{first}]", text) for text in piece.texts)
        return not _has_texts(f"({piece.lark}) & ~(/[{first}]/ {ANY})")
    if isinstance(piece, Value):
        return value_types.is_number(piece.schema)
    if isinstance(piece, Row):
        return _begins_with(piece.first, first)
    if isinstance(piece, Choice):
        return all(_begins_with(one, first) for one in piece.pieces)
    return isinstance(piece, Repeated) and bool(piece.least) and _begins_with(piece.piece, first)


@cache
def _bytes() -> LLTokenizer:
    """A tokenizer whose tokens are bytes."""
    return LLTokenizer("byte")


@lru_cache(maxsize=1024)
def _has_texts(lark: str) -> bool:
    """Whether a terminal matches any text; also if it is wrong, which llguidance will explain."""
    matcher = LLMatcher(
        _bytes(), LLMatcher.grammar_from_lark(f"start: ANY\nANY: {lark}"), log_level=0
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not (matcher.is_error() and matcher.get_error().startswith("NoExtension"))


class Writer:
    """Writes pieces in Lark. ``lines`` are the rules that they need, and ``grammars`` further
    grammars, which rules refer to by name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._by_body: dict[str, str] = {}
        self._written: dict[int, str] = {}

    def written(self, piece: Piece) -> str:
        """A piece in the body of a rule."""
        if id(piece) not in self._written:
            self._written[id(piece)] = self._of(piece)
        return self._written[id(piece)]

    def source(self, *lines: str) -> str:
        """llguidance's own form of a grammar with these further rules, and what they need."""
        lark = "\n".join(["%llguidance {}", *self.lines, *lines])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.grammars]})

    def _of(self, piece: Piece) -> str:
        if isinstance(piece, Text):
            if piece.texts == (piece.mark,):
                return quoted(piece.mark)
            terminal = self._named("T", piece.lark)
            return self._named("lazy_", terminal, "[lazy]") if piece.is_closed else terminal
        if isinstance(piece, Token):
            return f"<[{piece.token_id}]>"
        if isinstance(piece, Value):
            return self._named("value_", f"%json {spaced(piece.schema)}")
        if isinstance(piece, Grammar):
            name = f"grammar_{len(self.grammars)}"
            self.grammars.append({"name": name, "lark_grammar": piece.lark})
            return f"@{name}"
        if isinstance(piece, Choice):
            return self._named("choice_", " | ".join(self.written(one) for one in piece.pieces))
        if isinstance(piece, Repeated):
            most = "" if piece.most is None else piece.most
            return f"({self.written(piece.piece)}){{{piece.least},{most}}}"
        parts = []
        rest: Piece = piece
        while isinstance(rest, Row):
            parts.append(self.written(rest.first))
            rest = rest.rest
        return self._named("row_", " ".join([*parts, self.written(rest)]))

    def _named(self, prefix: str, body: str, attributes: str = "") -> str:
        """The name of a rule or terminal with this body."""
        if body not in self._by_body:
            self._by_body[body] = f"{prefix}{len(self._by_body)}"
            self.lines.append(f"{self._by_body[body]}{attributes}: {body}")
        return self._by_body[body]


def pieces_of(text: str, special_tokens: SpecialTokens, place: str) -> Piece:
    """A text in which special tokens are tokens."""
    parts = special_tokens.parts_of(text) or [""]
    return row_of(fixed(part, place) if isinstance(part, str) else Token(part) for part in parts)
