"""What a request brings -> a grammar as llguidance reads it.

``GrammarKind`` names the languages of ``Grammar.source``:

    json_schema     a JSON schema
    json_object     empty: any JSON object
    regex           a regular expression in the syntax of Rust's regex, matched as a whole
    choice          a JSON list of strings
    grammar         llguidance's Lark, or the EBNF of llama.cpp (GBNF)
    structural_tag  free text that holds structures (``structural_tags``)

If the answer is in ``channels``, that is the form of its last message.

Errors are ``InvalidRequest``, with the place if there is one. Whether llguidance accepts the result
is not known here (``vetting``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NoReturn

from llguidance import LLMatcher, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar import channels, structural_tags
from minisgl_backend.grammar.schemas import (
    DATA,
    NAMES,
    NOT_NUL,
    is_beyond_floats,
    is_changed,
    says_nothing,
)
from minisgl_backend.grammar.structural_tags import quoted, spaced
from minisgl_backend.request import Grammar, GrammarKind, TokenId

MAX_SOURCE_BYTES: Final = 256 * 1024
"""The limit on a grammar's source; the largest schemas in public collections have about 100 KiB."""
TOO_DEEP: Final = "it is nested too deeply"
_WITH_SCHEMAS: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
_MOST_CHARACTERS: Final = 230
_MOST_PLACES: Final = 5
_MOST_OF_PLACES: Final = 100
_CODE: Final = re.compile(r"\\(?:\\|u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8}))")
"""Of a character in GBNF; or a backslash, which begins none."""
_LARGE_NUMBER: Final = re.compile(r"[0-9]{16}|[0-9][eE]\+?[0-9]{3}")
_LARK_AROUND: Final = re.compile(r"^at \d+\(\d+\): |\n\s*\d+ \|.*", re.DOTALL)
_SCHEMAS: Final = ("items", "schema", "json_schema")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose values are a schema, or lists of them; two are those of structural tags."""
_COMPLAINTS: Final[Mapping[re.Pattern[str], tuple[str, ...]]] = MappingProxyType(
    {
        re.compile(r".*?Unknown format: (\S+)"): ("format",),
        re.compile(r".*?Invalid type: (\S+)"): ("type",),
        re.compile(r".*?oneOf is supported only"): ("oneOf",),
        re.compile(r".*?minProperties and maxProperties are"): ("minProperties", "maxProperties"),
        re.compile(r".*?regex parse error: (\S+)"): ("pattern",),
        re.compile(r".*?in regex /(\S+)/"): ("pattern",),
        re.compile(r".*?Pointer '(\S+)' does not exist"): ("$ref",),
    }
)
"""llguidance's errors, some of which name a value, and the keywords that may have that value."""
_OWN_WORDS: Final[Mapping[re.Pattern[str], str]] = MappingProxyType(
    {
        # llguidance's own text names an option that is not offered here
        re.compile(r"oneOf constraints are not supported.*"): (
            "oneOf is supported only if its alternatives exclude each other"
        ),
        re.compile(r"min/maxProperties only supported when .*"): (
            "minProperties and maxProperties are supported only if all properties are required"
        ),
    }
)
"""llguidance's errors, and the texts that replace them."""
_UNSATISFIABLE: Final = re.compile(r".*?Unsatisfiable schema")
_UNKNOWN_KEYS: Final = re.compile(r".*?Unimplemented keys: (\[[^\]]*\])")


def check_source(grammar: Grammar) -> None:
    """Raise ``InvalidRequest`` if the source is too large, or not valid text. Cheap."""
    source = grammar.source
    try:  # a longer one is too large in any encoding
        num_bytes = len(source[: MAX_SOURCE_BYTES + 1].encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{grammar.kind.value} must be UTF-8") from None
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidRequest(
            f"a grammar must have at most {MAX_SOURCE_BYTES} bytes, this {grammar.kind.value} has "
            "more"
        )


def to_llguidance(grammar: Grammar, special_tokens: Mapping[str, TokenId]) -> str:
    """The grammar in llguidance's own form; ``special_tokens`` are those that have no text."""
    kind, source = grammar.kind, grammar.source
    if grammar.channels:
        if kind is GrammarKind.STRUCTURAL_TAG:
            tag = structural_tags.read(_with_schemas(source, "a structural tag"))
            if channels.are_messages(tag):
                return LLMatcher.grammar_from_lark(channels.lark_of_messages(tag, special_tokens))
        form = to_llguidance(replace(grammar, channels=False), special_tokens)
        return channels.around(form, special_tokens)
    if kind is GrammarKind.JSON_OBJECT:
        return LLMatcher.grammar_from_json_schema(spaced({"type": "object"}))
    if kind is GrammarKind.JSON_SCHEMA:
        schema = _with_schemas(source, "a JSON schema")
        if not isinstance(schema, dict | bool):
            raise InvalidRequest("a JSON schema must be an object, true or false")
        return LLMatcher.grammar_from_json_schema(spaced(schema))
    if kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, _choices(source))))
    if kind is GrammarKind.STRUCTURAL_TAG:
        return LLMatcher.grammar_from_lark(
            structural_tags.read(_with_schemas(source, "a structural tag")).lark(special_tokens)
        )
    try:
        return grammar_from(
            "grammar", source if is_lark_syntax(source) else _with_characters(source)
        )
    except ValueError as error:
        raise InvalidRequest(f"the grammar is wrong: {one_line(str(error))}") from error


def complaint(error: str, grammar: Grammar) -> str:
    """An error of llguidance in one line, with the places in the schema of what the error names."""
    if grammar.kind is GrammarKind.STRUCTURAL_TAG or grammar.channels:
        # the Lark around it is not from the client
        error = _LARK_AROUND.sub("", error)
    line = one_line(error).replace(NOT_NUL, "[^")
    if "recursion limit exceeded" in line:
        return TOO_DEEP
    if line.startswith("NoExtension"):
        return "it allows no answer"
    if grammar.kind not in _WITH_SCHEMAS:
        return line
    for pattern, words in _OWN_WORDS.items():
        line = pattern.sub(words, line)
    schema = json.loads(grammar.source)
    if _UNSATISFIABLE.match(line):
        places = list(_false_schemas(schema))
        return f"{line}, at {_shown(places)}" if places else line
    keywords = list(_keywords(schema))
    if named := _UNKNOWN_KEYS.match(line):
        unknown = json.loads(named[1])
        places = [place for place, key, _ in keywords if key in unknown]
        verb = "is" if len(unknown) == 1 else "are"
        return f"{' and '.join(unknown)} {verb} not supported, at {_shown(places)}"
    for pattern, keys in _COMPLAINTS.items():
        if named := pattern.match(line):
            value = named[1] if named.groups() else None
            places = [
                place
                for place, found, given in keywords
                if found in keys and (value is None or value in str(given))
            ]
            return f"{line}, at {_shown(places)}" if places else line
    return line


def _false_schemas(schema: Any) -> Iterator[str]:
    """The places of the schemas ``false``, except those that only forbid further properties or
    items."""
    for place, key, value in _keywords(schema):
        if key in NAMES and isinstance(value, dict):
            yield from (f"{place}/{_escaped(name)}" for name, one in value.items() if one is False)
        elif key in _SCHEMAS and value is False:
            yield place
        elif key in _LISTS and isinstance(value, list):
            yield from (f"{place}/{at}" for at, one in enumerate(value) if one is False)


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """The keywords of a schema with their places, as JSON pointers, and their values."""
    waiting: list[tuple[str, Any, bool]] = [("#", schema, True)]
    while waiting:
        place, value, has_keywords = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{place}/{at}", one, True) for at, one in enumerate(value)]
        elif isinstance(value, dict):
            for key, inner in value.items():
                at = f"{place}/{_escaped(key)}"
                if has_keywords and not says_nothing(key, value):
                    yield at, key, inner
                if not (has_keywords and key in DATA):
                    waiting.append((at, inner, not has_keywords or key not in NAMES))


def _shown(places: list[str]) -> str:
    """The first few places, short enough that the error fits next to them."""
    text = ", ".join(places[:_MOST_PLACES])
    return text if len(text) <= _MOST_OF_PLACES else text[:_MOST_OF_PLACES] + "…"


def _escaped(key: str) -> str:
    """A step of a JSON pointer, in one line."""
    return quoted(key.replace("~", "~0").replace("/", "~1"))[1:-1]


def one_line(text: str) -> str:
    """An error's text without line breaks, shortened at a word."""
    words: list[str] = []
    length = 0
    for word in text.replace("<non-verbose/>", "").split():
        length += len(word) + 1
        if length > _MOST_CHARACTERS:
            return " ".join([*words, "…"])
        words.append(word)
    return " ".join(words)


def _parsed(source: str, what: str) -> Any:
    try:
        return json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        told = one_line(str(error))
        if "integer string conversion" in told:  # Python's words are about an option of Python
            told = "an integer has thousands of digits"
        raise InvalidRequest(f"{what} must be JSON: {told}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _with_schemas(source: str, what: str) -> Any:
    """The JSON of one or several schemas. Raises ``Unsupported`` if one of them has a number that
    is too large for a float or, unless a structure is lenient, lists an integer that would be
    changed."""
    parsed = _parsed(source, what)
    if _LARGE_NUMBER.search(source):
        structures = parsed.get("structures") if isinstance(parsed, dict) else None
        lenient = tuple(
            f"#/structures/{at}/"
            for at, one in enumerate(structures if isinstance(structures, list) else ())
            if isinstance(one, dict) and one.get("lenient") is True
        )
        for place, key, value in _keywords(parsed):
            if is_changed(key, value):
                if not place.startswith(lenient):
                    raise Unsupported(
                        f"integers beyond 2**53 are not supported, at {_shown([place])}"
                    )
            elif is_beyond_floats(key, value):
                raise Unsupported(f"numbers beyond 1.8e308 are not supported, at {_shown([place])}")
    return parsed


def _with_characters(gbnf: str) -> str:
    """The grammar with its character codes spelled so that llguidance reads them all: it drops
    their leading zeros."""

    def spelled(found: re.Match[str]) -> str:
        code = int(found["four"] or found["eight"] or "-1", 16)
        if 0 <= code < 256:
            return f"\\x{code:02x}"
        is_character = code in range(256, 0xD800) or code in range(0xE000, 0x110000)
        return chr(code) if is_character else found[0]

    return _CODE.sub(spelled, gbnf)


def _choices(source: str) -> list[str]:
    choices = _parsed(source, "a choice")
    if not (choices and isinstance(choices, list) and all(isinstance(c, str) for c in choices)):
        raise InvalidRequest("a choice must be a list of at least one string")
    if "" in choices:
        raise InvalidRequest("a choice must not hold an empty string")
    return choices
