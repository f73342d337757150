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
from typing import Any, Final, NoReturn

from llguidance import LLMatcher

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.grammar import channels, ebnf, structural_tags
from minisgl_backend.grammar.complaints import one_line
from minisgl_backend.grammar.lark import quoted, spaced
from minisgl_backend.grammar.schema_places import keywords, shown
from minisgl_backend.grammar.schemas import is_beyond_floats, is_changed
from minisgl_backend.grammar.special_tokens import SpecialTokens
from minisgl_backend.request import Grammar, GrammarKind
from minisgl_backend.wire.values import without_repeats

MAX_SOURCE_BYTES: Final = 256 * 1024
"""The limit on a grammar's source; the largest schemas in public collections have about 100 KiB."""
_LARGE_NUMBER: Final = re.compile(r"[0-9]{16}|[0-9][eE]\+?[0-9]{3}")


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


def to_llguidance(grammar: Grammar, special_tokens: SpecialTokens) -> str:
    """The grammar in llguidance's own form; ``special_tokens`` are those that have no text."""
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        given = _with_schemas(grammar.source, "a structural tag")
        tag = structural_tags.read(given, special_tokens)
        if grammar.channels and channels.are_messages(tag):
            return channels.of_messages(tag, special_tokens)
        form = tag.form(special_tokens)
    else:
        form = _form(grammar.kind, grammar.source)
    return channels.around(form, special_tokens) if grammar.channels else form


def _form(kind: GrammarKind, source: str) -> str:
    """The same of what is no structural tag, without channels."""
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
        # in a terminal, as llguidance takes less than a thousand alternatives in a rule
        choices = " | ".join(map(quoted, _choices(source)))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    return ebnf.to_lark(source)


def _parsed(source: str, what: str) -> Any:
    try:
        return json.loads(source, parse_constant=_no_constant, object_pairs_hook=without_repeats)
    except InvalidRequest as error:
        raise InvalidRequest(f"{what} {error}") from None
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
        for place, key, value in keywords(parsed):
            if is_changed(key, value):
                if not place.startswith(lenient):
                    raise Unsupported(
                        f"integers beyond 2**53 are not supported, at {shown([place])}"
                    )
            elif is_beyond_floats(key, value):
                raise Unsupported(f"numbers beyond 1.8e308 are not supported, at {shown([place])}")
    return parsed


def _choices(source: str) -> list[str]:
    choices = _parsed(source, "a choice")
    if not (choices and isinstance(choices, list) and all(isinstance(c, str) for c in choices)):
        raise InvalidRequest("a choice must be a list of at least one string")
    if "" in choices:
        raise InvalidRequest("a choice must not hold an empty string")
    return choices
