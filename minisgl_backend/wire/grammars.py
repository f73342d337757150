"""The form of an answer, as clients of different backends specify it -> ``Grammar``.

``structured_outputs`` is a JSON object with one of ``FORMS``, as in vllm_backend; its older
``guided_*`` names are converted to that object (``respelled``). The TensorRT-LLM backend uses two
values, ``guided_decoding_guide_type`` and ``guided_decoding_guide``. Must not know what a grammar
means, or whether it is valid.

Raises ``InvalidRequest``, or ``Unsupported`` for options that are known but not offered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.request import Grammar, GrammarKind
from minisgl_backend.wire.values import as_json, parse_json, quoted, to_text

FORMS: Final[Mapping[str, GrammarKind]] = MappingProxyType(
    {
        "json": GrammarKind.JSON_SCHEMA,
        "json_object": GrammarKind.JSON_OBJECT,
        "regex": GrammarKind.REGEX,
        "choice": GrammarKind.CHOICE,
        "grammar": GrammarKind.GRAMMAR,
        "structural_tag": GrammarKind.STRUCTURAL_TAG,
    }
)
_KEYS: Final[Mapping[GrammarKind, str]] = MappingProxyType({v: k for k, v in FORMS.items()})
_TYPES: Final[Mapping[GrammarKind, str]] = MappingProxyType(
    {
        GrammarKind.JSON_SCHEMA: "a JSON schema",
        GrammarKind.JSON_OBJECT: "true",
        GrammarKind.REGEX: "a string",
        GrammarKind.CHOICE: "a list of strings",
        GrammarKind.GRAMMAR: "a string",
        GrammarKind.STRUCTURAL_TAG: "an object",
    }
)
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "disable_any_whitespace": (False,),
        "disable_fallback": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "backend": ("auto", "guidance"),
        "_backend": ("auto", "guidance"),
        "backend_was_auto": (False, True),
        "_backend_was_auto": (False, True),
    }
)
"""Other fields of vLLM's object, which Triton's OpenAI frontend sends too, with the values besides
null that are accepted because they change nothing."""
_GUIDED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    }
)
_ANY_JSON: Final = Grammar(GrammarKind.JSON_SCHEMA, '{"type": ["object", "array"]}')
"""The meaning of the guide type json in the TensorRT-LLM backend."""
_GUIDE_TYPES: Final[Mapping[str, GrammarKind]] = MappingProxyType(
    {
        "json_schema": GrammarKind.JSON_SCHEMA,
        "regex": GrammarKind.REGEX,
        "ebnf_grammar": GrammarKind.GRAMMAR,
    }
)


SPELLINGS: Final = (*_GUIDED, "guided_decoding")
"""Other names of the parameter ``structured_outputs``."""


def respelled(name: str, value: Any) -> tuple[str, Any]:
    """A ``guided_*`` parameter as ``structured_outputs``; others as they are."""
    if name in _GUIDED:
        return "structured_outputs", None if value is None else {_GUIDED[name]: value}
    return ("structured_outputs", value) if name == "guided_decoding" else (name, value)


def grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a request's values specify, if any."""
    text, guide_type = given["structured_outputs"], given["guided_decoding_guide_type"]
    guide = given["guided_decoding_guide"]
    if text is not None and guide_type is not None:
        raise InvalidRequest("give one of structured_outputs and guided_decoding_guide_type")
    if guide is not None and guide_type is None:
        raise InvalidRequest("guided_decoding_guide goes with guided_decoding_guide_type")
    if guide_type is not None:
        return _of_guide(guide_type, guide)
    return None if text is None else _of_object(parse_json("structured_outputs", text))


def object_of(grammar: Grammar) -> str:
    """The value of ``structured_outputs`` that specifies the grammar."""
    value: Any = grammar.source
    if grammar.kind is GrammarKind.JSON_OBJECT:
        value = True
    elif grammar.kind is GrammarKind.CHOICE:
        value = json.loads(grammar.source)
    return json.dumps({_KEYS[grammar.kind]: value}, separators=(",", ":"))


def _of_guide(guide_type: str, guide: str | None) -> Grammar:
    if guide_type == "json":
        if guide:
            raise InvalidRequest("guided_decoding_guide_type json takes no guided_decoding_guide")
        return _ANY_JSON
    kind = _GUIDE_TYPES.get(guide_type)
    if kind is None:
        raise Unsupported(
            f"guided_decoding_guide_type must be one of json, {', '.join(_GUIDE_TYPES)}, got "
            f"{quoted(guide_type)}"
        )
    if not guide:
        raise InvalidRequest(
            f"guided_decoding_guide_type {guide_type} goes with guided_decoding_guide"
        )
    return Grammar(kind, guide)


def _of_object(fields: Any) -> Grammar | None:
    if not isinstance(fields, dict):
        raise InvalidRequest(f"structured_outputs must be a JSON object, got {quoted(fields)}")
    for name, value in fields.items():
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise Unsupported(f"structured_outputs.{name} is not supported, got {quoted(value)}")
        if name not in FORMS and name not in _NEUTRAL:
            raise InvalidRequest(
                f"structured_outputs has an unknown field {quoted(name)}: give one of "
                f"{', '.join(FORMS)}"
            )
    asked = {k: v for k, v in fields.items() if k in FORMS and v is not None}
    if asked.get("json_object") is False:
        del asked["json_object"]
    if len(asked) != 1:
        got = " and ".join(asked) or "none of them"
        raise InvalidRequest(f"structured_outputs must hold one of {', '.join(FORMS)}, got {got}")
    ((name, value),) = asked.items()
    return Grammar(FORMS[name], _source(name, value))


def _source(name: str, value: Any) -> str:
    """The grammar's text, from a string or from plain JSON."""
    kind, place = FORMS[name], f"structured_outputs.{name}"
    if kind is GrammarKind.JSON_OBJECT and value is True:
        return ""
    if kind in (GrammarKind.REGEX, GrammarKind.GRAMMAR) and isinstance(value, str):
        return to_text(place, value)
    if kind is GrammarKind.CHOICE:
        choices = parse_json(place, value) if isinstance(value, str) else value
        if isinstance(choices, list):
            return as_json(place, choices)
    if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG):
        if isinstance(value, str):
            return to_text(place, value)
        if isinstance(value, dict | bool):
            return as_json(place, value)
    raise InvalidRequest(f"{place} must be {_TYPES[kind]}, got {quoted(value)}")
