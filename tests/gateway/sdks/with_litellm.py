"""LiteLLM with both of its providers for such servers: a required tool, a named one, a schema, and
an agent's two turns."""

from __future__ import annotations

import json
from functools import partial, update_wrapper
from typing import Any

import litellm

from tests.gateway.sdks.cases import MODEL, QUESTION, Report, addresses, run, weather

AGENT, DEMO = addresses()
PROVIDERS = ("openai", "hosted_vllm")


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def _asked(provider: str, url: str, messages: list[Any] | None = None, **fields: Any) -> Any:
    answer = litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=url,
        api_key="any",
        messages=messages or [{"role": "user", "content": QUESTION}],
        **fields,
    )
    return answer.choices[0].message


def _arguments(message: Any) -> Any:
    return [json.loads(call.function.arguments) for call in message.tool_calls]


def required(provider: str) -> Any:
    message = _asked(provider, AGENT, tools=[TOOL], tool_choice="required")
    return [message.content, _arguments(message)]


def named(provider: str) -> Any:
    choice = {"type": "function", "function": {"name": "weather"}}
    message = _asked(provider, AGENT, tools=[TOOL], tool_choice=choice)
    return [message.content, _arguments(message)]


def schema(provider: str) -> Any:
    return json.loads(_asked(provider, DEMO, response_format=Report).content)


def agent(provider: str) -> Any:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = _asked(provider, AGENT, messages, tools=[TOOL])
    (arguments,) = _arguments(first)
    told = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": weather(**arguments)}
    return _asked(provider, AGENT, [*messages, first, told], tools=[TOOL]).content


def _of(case: Any, provider: str) -> Any:
    made = update_wrapper(partial(case, provider), case)
    made.__name__ = f"{case.__name__}_{provider}"
    return made


run(*[_of(case, provider) for case in (required, named, schema, agent) for provider in PROVIDERS])
