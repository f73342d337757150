"""Instructor: its default mode, its schema mode, and the mode that only asks for JSON."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI

from tests.gateway.sdks.cases import MODEL, QUESTION, Report, addresses, run

AGENT, DEMO = addresses()


def _asked(url: str, **options: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=url, api_key="any", max_retries=0), **options)
    return client.chat.completions


def _messages() -> list[Any]:
    return [{"role": "user", "content": QUESTION}]


def tools() -> Any:
    return _asked(DEMO).create(
        model=MODEL, messages=_messages(), response_model=Report, max_retries=0
    )


def tools_streamed() -> Any:
    pieces = _asked(DEMO).create_partial(
        model=MODEL, messages=_messages(), response_model=Report, max_retries=0
    )
    return list(pieces)[-1]


def json_schema() -> Any:
    return _asked(DEMO, mode=instructor.Mode.JSON_SCHEMA).create(
        model=MODEL, messages=_messages(), response_model=Report, max_retries=0
    )


def json_mode() -> Any:
    return _asked(AGENT, mode=instructor.Mode.JSON).create(
        model=MODEL, messages=_messages(), response_model=Report, max_retries=0
    )


run(tools, tools_streamed, json_schema, json_mode)
