"""The form that an answer must have, as OpenAI, vLLM, SGLang and llama.cpp ask for it.

A request may give one of these fields; ``form_of`` turns it into the engine's
``structured_outputs``. The engine decides whether a schema or a grammar is valid. Must not know
what the form is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from minisgl_client import parameters
from pydantic import Field

from minisgl_gateway.errors import invalid
from minisgl_gateway.shared_fields import label
from minisgl_gateway.strict_schema import Body, Strict

Schema: TypeAlias = dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]


class TextForm(Strict):
    """Free text, as without a form."""

    type: Literal["text"]


class JsonObjectForm(Strict):
    """A JSON object; with ``schema``, as llama.cpp has it, what the schema allows, which is an
    object unless it names another type."""

    type: Literal["json_object"]
    json_schema: Schema | None = Field(None, alias="schema")


class NamedSchema(Strict):
    """A JSON schema; it is enforced, ``strict`` or not."""

    name: str
    description: str | None = None
    json_schema: Schema = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaForm(Strict):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagForm(Strict):
    """Structures in free text, as vLLM and SGLang have it: ``structures`` and ``triggers``, or
    XGrammar's newer ``format``."""

    type: Literal["structural_tag"]
    structures: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    triggers: list[str] | None = Field(None, fail_fast=True)
    at_least_one: bool | None = None
    stop_after_first: bool | None = None
    separator: str | list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Strict):
    """vLLM's object; one of its forms is given."""

    json_schema: str | Schema | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    backend: Literal["auto", "guidance"] | None = None


class FormFields(Body):
    """The fields that ask for a form: one of them at most."""

    response_format: (
        Annotated[
            TextForm | JsonObjectForm | JsonSchemaForm | StructuralTagForm,
            Field(discriminator="type"),
        ]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | bool | None = Field(None, description="a JSON schema")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="Lark, or the EBNF of llama.cpp")
    guided_decoding_backend: str | None = label("there is one; no effect")
    regex: str | None = Field(None, description="as SGLang has it")
    ebnf: str | None = Field(None, description="as SGLang has it: the EBNF of llama.cpp")
    json_schema: str | Schema | None = Field(None, description="as SGLang and llama.cpp have it")
    grammar: str | None = Field(None, description="as llama.cpp has it")


def form_of(request: FormFields) -> tuple[Mapping[str, Any] | None, str]:
    """The form and the name of the field that asked for it; raises ``ApiError``."""
    found: dict[str, Mapping[str, Any]] = {}
    if request.response_format and not isinstance(request.response_format, TextForm):
        found["response_format"] = _of_format(request.response_format)
    if request.structured_outputs is not None:
        found["structured_outputs"] = _of_object(request.structured_outputs)
    for name, form in _OTHERS.items():
        if (value := getattr(request, name)) is not None:
            found[name] = {form: value}
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{second} does not go with {first}", second)
    if not found:
        return None, "response_format"
    ((name, source),) = found.items()
    return source, name


_OTHERS: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


def _of_format(given: JsonObjectForm | JsonSchemaForm | StructuralTagForm) -> Mapping[str, Any]:
    if isinstance(given, StructuralTagForm):
        return {"structural_tag": given.model_dump(exclude_none=True)}
    if isinstance(given, JsonSchemaForm):
        return {"json": given.json_schema.json_schema}
    if given.json_schema is None:
        return {"json_object": True}
    return {"json": {"type": "object", **given.json_schema}}


def _of_object(given: StructuredOutputs) -> Mapping[str, Any]:
    values = given.model_dump(by_alias=True, exclude_none=True)
    found = {name: values[name] for name in _FORMS if name in values}
    if found.get("json_object") is False:
        del found["json_object"]
    if len(found) != 1:
        got = " and ".join(found) or "none of them"
        raise invalid(
            f"structured_outputs must hold one of {', '.join(_FORMS)}, got {got}",
            "structured_outputs",
        )
    return found


_FORMS: Final = tuple(parameters.StructuredOutputs.__annotations__)
