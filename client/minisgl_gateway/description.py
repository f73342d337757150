"""The OpenAPI description at /openapi.json, and the same as a page to read at /docs.

The routes read their bodies themselves, strictly; this module adds their models to the description.
The page is plain HTML: it runs no scripts, and loads nothing from other sites.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

_REFERENCE: Final = "#/components/schemas/{model}"


class BodyOf(dict[str, Any]):
    """What a route adds to its description for a body of this ``model``."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model
        reference = {"$ref": _REFERENCE.format(model=model.__name__)}
        content = {"application/json": {"schema": reference}}
        super().__init__(requestBody={"required": True, "content": content})


def answer_of(model: type[BaseModel], *, named_events: bool = False) -> dict[str, Any]:
    """What a route says about its answer: this model, or a stream of events, which have only data,
    or names, too."""
    named = {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["event", "data"],
    }
    events = {"schema": named if named_events else {"type": "string"}}
    return {"model": model, "content": {"text/event-stream": events}}


def describe(app: FastAPI) -> None:
    """Have the application describe the models of bodies, and the API key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            whole = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            parts = whole["components"]
            extras = [route.openapi_extra for route in app.routes if isinstance(route, APIRoute)]
            for model in [extra.model for extra in extras if isinstance(extra, BodyOf)]:
                schema = model.model_json_schema(ref_template=_REFERENCE)
                parts["schemas"].update(schema.pop("$defs", {}))
                parts["schemas"][model.__name__] = schema
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            whole["security"] = [{"key": []}, {}]
            app.openapi_schema = whole
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def page_of(description: Mapping[str, Any]) -> str:
    """A page that shows an OpenAPI description: the routes, and each object with its fields."""
    title = escape(description["info"]["title"])
    lines = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<h1>{title}</h1>",
        f"<p>{escape(description['info']['description'])} The same for programs: ",
        '<a href="openapi.json">openapi.json</a>.',
        "<table><tr><th>route<th>body<th>answer",
    ]
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            body = _content(route.get("requestBody", {}))
            answer = _content(route["responses"].get("200", {}))
            lines.append(f"<tr><td>{method.upper()} {escape(path)}<td>{body}<td>{answer}")
    lines.append("</table>")
    for name, schema in sorted(description["components"]["schemas"].items()):
        lines.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>')
        lines.append(f"<p>{escape(schema.get('description', ''))}")
        lines.append("<table><tr><th>field<th>type<th>default<th>meaning")
        for field, spec in schema.get("properties", {}).items():
            default = "required" if field in schema.get("required", ()) else ""
            if spec.get("default") is not None:
                default = escape(json.dumps(spec["default"]))
            meaning = escape(spec.get("description", ""))
            lines.append(f"<tr><td>{escape(field)}<td>{_type(spec)}<td>{default}<td>{meaning}")
        lines.append("</table>")
    return "\n".join(lines)


def _content(message: Mapping[str, Any]) -> str:
    """What a body or an answer may be, as HTML."""
    schemas = [one["schema"] for one in message.get("content", {}).values() if "schema" in one]
    return " or ".join(map(_type, schemas))


def _type(schema: Mapping[str, Any]) -> str:
    """The type that a JSON schema describes, in words, as HTML."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(one) for one in either if one.get("type") != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum") or [schema["const"]]
        return escape(" or ".join(map(json.dumps, values)))
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return escape(schema.get("type", "any"))
