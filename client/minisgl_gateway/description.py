"""The OpenAPI description at /openapi.json.

The routes read their bodies themselves, strictly; here the description learns of their models.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from minisgl_gateway.schema import ChatCompletionRequest, CompletionRequest

_REFERENCE = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route adds to its description for a body of this model."""
    reference = {"$ref": _REFERENCE.format(model=model.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


def answer_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route says of its answer: this model, or a stream of events."""
    events = {"schema": {"type": "string"}}
    return {"model": model, "content": {"text/event-stream": events}}


def describe(app: FastAPI) -> None:
    """Make the application describe the models of bodies, and the API key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            whole = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            parts = whole["components"]
            for model in (ChatCompletionRequest, CompletionRequest):
                schema = model.model_json_schema(ref_template=_REFERENCE)
                parts["schemas"].update(schema.pop("$defs", {}))
                parts["schemas"][model.__name__] = schema
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            whole["security"] = [{"key": []}, {}]
            app.openapi_schema = whole
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
