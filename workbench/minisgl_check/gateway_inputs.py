"""The catalogues of bad inputs, translated for the gateway, and requests with bad keys.

Knows the names of Triton's inputs in OpenAI's API, and what the gateway treats differently. The
mistakes themselves are in ``bad_inputs`` and ``bad_wire``.

A field without a name in OpenAI's API is unknown to the gateway, and refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl_check.bad_inputs import Bad, Expected
from minisgl_check.bad_wire import BODIES

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
_JSON: Final = {"Content-Type": "application/json"}
_NAMES: Final = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "priority_level": "priority",
}
_IS_JSON: Final = frozenset({"messages", "tools", "logit_bias"})
"""Triton gets these as JSON in a string."""
_ANSWERED: Final = frozenset(
    {
        "prompt a list",
        "token id '7'",
        "temperature None",
        "seed -1",
        "inside: seed -1",
        "not offered: echo",
    }
)
"""Requests that OpenAI's API allows."""

_OK: Final = frozenset({200})
_REFUSED: Final = frozenset({400, 413})
_CLOSED: Final = frozenset({400, 431, None})
_TOO_LARGE: Final = frozenset({413, None})
_MOST_BYTES: Final = 4 * 2**20
_EXPECTED: Final = {
    Expected.ANSWER: _OK,
    Expected.INVALID: _REFUSED,
    Expected.UNSUPPORTED: _REFUSED,
    Expected.REFUSED: _REFUSED,
    Expected.TRITON: _REFUSED,
    Expected.SURVIVED: _OK | _REFUSED,
}


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """A request to the gateway, byte by byte; among ``statuses``, None is a closed connection."""

    name: str
    content: bytes | Iterable[bytes]
    statuses: frozenset[int | None] = _REFUSED
    path: str = COMPLETIONS
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: _JSON)


def translated(requests: Iterable[Bad]) -> Iterator[GatewayRequest]:
    """The catalogue of values in OpenAI's words."""
    for bad in requests:
        statuses: frozenset[int | None] = _EXPECTED[bad.expected]
        if bad.name in _ANSWERED:
            statuses = _OK
        elif bad.name.startswith("odd: "):  # OpenAI has other ranges
            statuses = _OK | _REFUSED
        body = _body(bad.values)
        if len(body) > _MOST_BYTES:
            statuses = _TOO_LARGE
        path = CHAT if "messages" in bad.values else COMPLETIONS
        yield GatewayRequest(bad.name, body, statuses, path)


def _body(values: Mapping[str, Any]) -> bytes:
    """The JSON of a body, put together by hand so that broken and repeated members stay as is."""
    members = ['"model": "minisgl"']
    for name, value in values.items():
        if name == "sampling_parameters" and value.startswith("{"):
            members.append(value[1:].rstrip("}") if value.endswith("}") else value)
            continue
        text = value if name in _IS_JSON else json.dumps(value)
        members.append(f"{json.dumps(_NAMES.get(name, name))}: {text}")
    return ("{" + ", ".join(members) + "}").encode()


def own_inputs() -> Iterator[GatewayRequest]:
    """Mistakes that only HTTP, or OpenAI's API, allows."""
    for name, content in BODIES.items():
        prompt = content.replace(b'"text_input"', b'"model": "minisgl", "prompt"')
        yield GatewayRequest(name, prompt, _REFUSED)
    for name, fields in _FIELDS.items():
        yield GatewayRequest(f"fields: {name}", _body({"text_input": "Hello", **fields}))
    for name, fields in _CHAT_FIELDS.items():
        messages = json.dumps([{"role": "user", "content": "Hello"}])
        yield GatewayRequest(f"chat: {name}", _body({"messages": messages, **fields}), path=CHAT)
    for name, fields in _RESPONSES_FIELDS.items():
        body = json.dumps({"model": "minisgl", "input": "Hello", **fields}).encode()
        statuses = frozenset({404}) if "unknown" in name else _REFUSED
        yield GatewayRequest(f"responses: {name}", body, statuses, path=RESPONSES)
    for name, fields in _MESSAGES_FIELDS.items():
        chat = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
        body = json.dumps({"model": "minisgl", **chat, **fields}).encode()
        yield GatewayRequest(f"messages: {name}", body, path=MESSAGES)
    good = _body({"text_input": "Hello", "max_tokens": 2})
    for id in ("resp_unknown", "..", "%00", "x" * 4000):
        path = f"{RESPONSES}/{id}"
        for method in ("GET", "DELETE"):
            yield GatewayRequest(
                f"{method} {path[:32]}", b"", frozenset({404}), path=path, method=method
            )
    for model in ("other", "", "../x", "llm_engine", "x" * 1000, "minisgl\n"):
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        yield GatewayRequest(f"the model {model[:16]!r}", body, frozenset({404}))
    yield GatewayRequest("two megabytes", b" " * 2**21, _TOO_LARGE)
    yield GatewayRequest("200,000 chunks of one byte", [good, *[b" "] * 200_000], _OK | _REFUSED)
    yield GatewayRequest("a megabyte of header", good, _CLOSED, headers={**_JSON, "x": "y" * 2**20})
    for length in ("-1", "x"):
        headers = {**_JSON, "Content-Length": length}
        yield GatewayRequest(f"a length of {length}", good, _CLOSED, headers=headers)
    yield GatewayRequest("gzip that is none", good, _OK | {415} | _REFUSED, headers=_packed("gzip"))
    yield GatewayRequest("a form", good, frozenset({415}), headers={"Content-Type": "text/plain"})
    yield GatewayRequest("a wrong method", b"", frozenset({405}), method="PUT")
    for path in ("/v1/nothing", "/v1/../../etc/passwd", "/v2/repository/index", "/stats"):
        yield GatewayRequest(f"the path {path}", good, frozenset({404}), path=path)


def _packed(how: str) -> dict[str, str]:
    return {**_JSON, "Content-Encoding": how}


def without_a_key(key: str) -> Iterator[GatewayRequest]:
    """Attempts without a valid key, if one is needed."""
    keys = {
        "no key": {},
        "an empty key": {"Authorization": ""},
        "a wrong key": {"Authorization": "Bearer wrong"},
        "half a key": {"Authorization": f"Bearer {key[:-1]}"},
        "a key and more": {"Authorization": f"Bearer {key}x"},
        "two keys": {"Authorization": "Bearer wrong", "authorization": f"Bearer {key}"},
        "two keys in one": {"Authorization": f"Bearer wrong, Bearer {key}"},
        "a key of another scheme": {"Authorization": f"Basic {key}"},
        "a key elsewhere": {"Api-Key": key},
        "a wrong key in Anthropic's header": {"X-Api-Key": "wrong"},
        "two keys in Anthropic's header": {"X-Api-Key": "wrong", "x-api-key": key},
        "a wrong key, and one in Anthropic's header": {
            "Authorization": "Bearer wrong",
            "X-Api-Key": key,
        },
        "a key in other letters": {"Authorization": "Bearer clé"},
    }
    good = _body({"text_input": "Hello", "max_tokens": 2})
    for name, headers in keys.items():
        yield GatewayRequest(name, good, frozenset({401}), headers={**_JSON, **headers})
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing", CHAT, RESPONSES, MESSAGES):
        yield GatewayRequest(f"no key for {path}", b"", frozenset({401}), path=path, method="GET")


_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "n of 0": {"n": 0},
    "n of -1": {"n": -1},
    "n of 10^9": {"n": 10**9},
    "best_of below n": {"n": 5, "best_of": 2},
    "logprobs of -1": {"logprobs": -1},
    "logprobs of 10^6": {"logprobs": 10**6},
    "max_tokens a string": {"max_tokens": "16"},
    "stream a string": {"stream": "yes"},
    "stream options without a stream": {"stream_options": {"include_usage": "yes"}},
    "a suffix": {"suffix": "x"},
    "echo a number": {"echo": 7},
    "user a number": {"user": 7},
    "metadata a list": {"metadata": ["x"]},
    "prompt_logprobs of -1": {"prompt_logprobs": -1},
    "an expression that is none": {"guided_regex": "(a"},
    "a grammar that is none": {"guided_grammar": "start: nothing"},
    "no choices": {"guided_choice": []},
    "no schema": {"response_format": {"type": "json_schema"}},
    "a schema of a type that is none": {"guided_json": {"type": "thing"}},
    "a schema that is no JSON": {"guided_json": "{"},
    "a tag without structures": {"response_format": {"type": "structural_tag"}},
    "a form of another type": {"response_format": {"type": "xml"}},
    "two forms": {"guided_regex": "a", "response_format": {"type": "json_object"}},
    "none of vLLM's forms": {"structured_outputs": {}},
    "a template": {"chat_template": "{{ 7 * 7 }}"},
}
_CHAT_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "top_logprobs of 21": {"logprobs": True, "top_logprobs": 21},
    "logprobs a number": {"logprobs": 5},
    "top_logprobs without logprobs": {"top_logprobs": 3},
    "tool_choice of no tool": {"tool_choice": {"type": "function"}},
    "tool_choice without tools": {"tool_choice": "required"},
    "function_call without functions": {"function_call": {"name": "f"}},
    "a strict tool with a wrong schema": {
        "tools": json.dumps(
            [
                {
                    "type": "function",
                    "function": {"name": "f", "strict": True, "parameters": {"type": 7}},
                }
            ]
        )
    },
    "an effort of another kind": {"reasoning_effort": "all"},
    "a tool without a name": {"tools": '[{"type": "function", "function": {}}]'},
    "a tool of another type": {"tools": '[{"type": "file_search"}]'},
    "a thousand tools": {"tools": "[" + ", ".join(["{}"] * 1000) + "]"},
    "a prompt, too": {"text_input": "x"},
    "a template": {"chat_template": "{{ 7 * 7 }}"},
    "variables of a template as a list": {"chat_template_kwargs": ["x"]},
    "a variable of ours": {"chat_template_kwargs": {"messages": []}},
    "an audio": {"modalities": ["audio"]},
}
_RESPONSES_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "no items": {"input": []},
    "an item that is none": {"input": [7]},
    "an item of another type": {"input": [{"type": "computer_call_output"}]},
    "an image": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "a call without a name": {"input": [{"type": "function_call", "call_id": "x"}]},
    "an unknown item": {"input": [{"type": "item_reference", "id": "msg_unknown"}]},
    "an unknown response": {"previous_response_id": "resp_unknown"},
    "a tool of another type": {"tools": [{"type": "web_search"}]},
    "a thousand tools": {"tools": [{}] * 1000},
    "a choice of no tool": {"tool_choice": {"type": "function", "name": "x"}},
    "a choice of nothing": {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    "a form of another type": {"text": {"format": {"type": "xml"}}},
    "an effort of another kind": {"reasoning": {"effort": "all"}},
    "in the background": {"background": True},
    "a conversation": {"conversation": {"id": "x"}},
    "metadata a list": {"metadata": ["x"]},
    "no tokens": {"max_output_tokens": 0},
}
_MESSAGES_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "no messages": {"messages": []},
    "a role of another name": {"messages": [{"role": "tool", "content": "x"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "a result without a call": {
        "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]
    },
    "a call of the user": {
        "messages": [
            {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": {}}]}
        ]
    },
    "a tool of the server": {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    "a choice of no tool": {"tool_choice": {"type": "tool", "name": "x"}},
    "a choice without tools": {"tool_choice": {"type": "any"}},
    "thinking a flag": {"thinking": True},
    "a form of another type": {"output_format": {"type": "text"}},
    "two forms": {
        "output_format": {"type": "json_schema", "schema": {}},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    },
    "a container": {"container": "x"},
    "a field of another API": {"max_completion_tokens": 2},
}
