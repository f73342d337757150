"""llguidance's errors -> one line for the client, with the places in the schema that they mean.

Knows llguidance's texts, which name values and keywords, but seldom a place. Must not know how a
grammar is translated or tried out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.grammar.schema_places import false_schemas, keywords, no_schemas, shown
from minisgl_backend.grammar.schemas import NOT_NUL
from minisgl_backend.request import Grammar, GrammarKind

TOO_DEEP: Final = "it is nested too deeply"
_WITH_SCHEMAS: Final = (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
_MOST_CHARACTERS: Final = 230
_LARK_AROUND: Final = re.compile(r"^at \d+\(\d+\): |\n\s*\d+ \|.*", re.DOTALL)
_COMPLAINTS: Final[Mapping[re.Pattern[str], tuple[str, ...]]] = MappingProxyType(
    {
        re.compile(r".*?Unknown format: (\S+)"): ("format",),
        re.compile(r".*?Invalid type: (\S+)"): ("type",),
        re.compile(r".*?oneOf is supported only"): ("oneOf",),
        re.compile(r".*?minProperties and maxProperties are"): ("minProperties", "maxProperties"),
        re.compile(r".*?regex parse error: (\S+)"): ("pattern", "patternProperties"),
        re.compile(r".*?in regex /(\S+)/"): ("pattern", "patternProperties"),
        re.compile(r".*?invalid multiple of"): ("multipleOf",),
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
        # its numbers are those that are left after the required ones
        re.compile(r"minProperties \(\d+\) is greater than number of properties.*"): (
            "minProperties is greater than the number of properties"
        ),
        re.compile(r"Expected f64 for"): "Expected number for",
    }
)
"""llguidance's errors, and the texts that replace them."""
_WRONG_KIND: Final = re.compile(
    r"Expected (?P<expected>.+?) for '(?P<key>\S+?)'(?P<item> item)?, got "
    r"|(?P<one>\S+) must be an? (?P<must>\w+)"
)
"""llguidance's errors about a value of the wrong kind, which name its keyword."""
_NO_SCHEMA: Final = re.compile(r".*?schema must be an object or boolean")
_UNSATISFIABLE: Final = re.compile(r".*?Unsatisfiable schema")
_UNKNOWN_KEYS: Final = re.compile(r".*?Unimplemented keys: (\[[^\]]*\])")


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
        return _with_places(line, false_schemas(schema))
    if _NO_SCHEMA.match(line):
        return _with_places(line, no_schemas(schema))
    placed = list(keywords(schema))
    if named := _UNKNOWN_KEYS.match(line):
        unknown = json.loads(named[1])
        places = [place for place, key, _ in placed if key in unknown]
        verb = "is" if len(unknown) == 1 else "are"
        return f"{' and '.join(unknown)} {verb} not supported, at {shown(places)}"
    for pattern, keys in _COMPLAINTS.items():
        if named := pattern.match(line):
            value = named[1] if named.groups() else None
            places = [
                place
                for place, found, given in placed
                if found in keys and (value is None or _names(given, value))
            ]
            return _with_places(line, places)
    if named := _WRONG_KIND.search(line):
        return _with_places(line, _of_the_wrong_kind(placed, named))
    return line


def _with_places(line: str, places: Iterable[str]) -> str:
    found = list(places)
    return f"{line}, at {shown(found)}" if found else line


def _names(given: Any, value: str) -> bool:
    """Whether a keyword has a value; that of ``patternProperties`` is a name in its object."""
    return any(value in text for text in (given if isinstance(given, dict) else [str(given)]))


def _of_the_wrong_kind(placed: list[tuple[str, str, Any]], named: re.Match[str]) -> list[str]:
    keyword = named["key"] or named["one"]
    expected = named["expected"] or named["must"]
    inside = bool(named["item"]) or keyword == "type"
    return [
        place
        for place, key, value in placed
        if key == keyword and not _is(expected, value, inside=inside)
    ]


def _is(expected: str, value: Any, *, inside: bool) -> bool:
    """Whether a value is of the kind that llguidance expects; ``inside`` a list, it looks at all of
    the list's items."""
    if inside and isinstance(value, list):
        return all(_is(expected, one, inside=False) for one in value)
    if expected == "positive integer":
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    if expected == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, {"array": list, "object": dict}.get(expected, str))


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
