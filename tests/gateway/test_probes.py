"""What clients, routers and people look at before they ask, and what they are told if they ask in
the wrong place."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.server.process import TritonServer
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire.generation import MessagesPrompt, TextPrompt
from tests.gateway.conftest import KEYS, Gateway, gateway_of
from tests.server.client import PATIENCE_S

pytestmark = pytest.mark.server

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
SHORT: dict[str, Any] = {"model": "minisgl", "prompt": "Hi", "max_tokens": 1}
PAGE = "https://chat.example.org"


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(DEMO_MODEL)


@pytest.fixture(scope="module")
def opened(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that serves web pages of one origin and shortens ``max_tokens``."""
    log = tmp_path_factory.mktemp("opened") / "log"
    options = ("--cors-origin", PAGE, "--shorten-max-tokens")
    with gateway_of(f"127.0.0.1:{server.grpc_port}", log, *options) as started:
        yield started


def refused(answer: httpx.Response, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# --- tokens -------------------------------------------------------------------------------------


def test_a_text_as_tokens_and_back(gateway: Gateway, encoder: PromptEncoder) -> None:
    text = "The capital of Österreich 🎉"
    ids = encoder.encode(TextPrompt(text))
    told = gateway.post("/tokenize", {"model": "minisgl", "prompt": text}).json()
    assert told == {
        "count": len(ids),
        "max_model_len": 8192,
        "tokens": ids.tolist(),
        "token_strs": None,
    }
    told = gateway.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert told["token_strs"] == encoder.names(ids)
    assert gateway.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}


def test_a_chat_as_tokens(gateway: Gateway, encoder: PromptEncoder) -> None:
    for fields, prompt in (
        ({}, MessagesPrompt(json.dumps(MESSAGES))),
        (
            {"add_generation_prompt": False},
            MessagesPrompt(json.dumps(MESSAGES), add_generation_prompt=False),
        ),
    ):
        told = gateway.post("/tokenize", {"messages": MESSAGES, **fields}).json()
        assert told["tokens"] == encoder.encode(encoder.render_chat(prompt)).tolist()


def test_a_chat_has_as_many_tokens_as_its_answer_says(gateway: Gateway) -> None:
    """With tools, too, which this template's dialect describes in a system message."""
    tool = {"type": "function", "function": {"name": "f", "description": "Does it."}}
    counts = []
    for fields in ({}, {"tools": [tool]}):
        usage = gateway.chat(MESSAGES[0]["content"], max_tokens=1, **fields).json()["usage"]
        told = gateway.post("/tokenize", {"messages": MESSAGES, **fields}).json()
        assert usage["prompt_tokens"] == told["count"]
        counts.append(told["count"])
    assert counts[0] < counts[1]


def test_none_and_more_tokens_than_the_context_takes(gateway: Gateway) -> None:
    assert gateway.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert gateway.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert gateway.post("/tokenize", {"prompt": "Some words. " * 5000}).json()["count"] > 8192


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "give one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "give one of prompt and messages"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function"}]}, "tools[0].function is mis"),
        (
            "/tokenize",
            {"messages": MESSAGES, "tools": [TOOL] * 2},
            "tools[1] has the name of another",
        ),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools goes with messages"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs go"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt goe"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message is"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens goe"),
        ("/tokenize", {"prompt": "x", "promt": "y"}, 'unknown parameter "promt"; did you mean "p'),
        ("/detokenize", {"tokens": [2048]}, "tokens must be in 0 .. 2047, got 2048"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0] must be >= 0, got -1"),
        ("/detokenize", {"tokens": "x"}, 'tokens must be an array, got "x"'),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_lookups_that_cannot_be_made(gateway: Gateway, path: str, body: Any, words: str) -> None:
    assert refused(gateway.post(path, body))["message"].startswith(words)


def test_the_model_of_a_lookup_must_exist(gateway: Gateway) -> None:
    for path in ("/tokenize", "/detokenize"):
        body = {"model": "other", "prompt": "x", "tokens": [1]}
        del body["tokens" if path == "/tokenize" else "prompt"]
        assert refused(gateway.post(path, body), 404)["code"] == "model_not_found"


def test_a_completion_without_the_special_tokens_of_a_text(gateway: Gateway) -> None:
    """The demo model's tokenizer has none, so nothing changes; the engine takes the option."""
    answer = gateway.post("/v1/completions", {**SHORT, "add_special_tokens": False})
    assert answer.json()["usage"]["prompt_tokens"] == 1


def test_a_chat_that_does_not_begin_the_answer(gateway: Gateway) -> None:
    counts = [
        gateway.chat("Hi", max_tokens=1, add_generation_prompt=begun).json()["usage"]
        for begun in (True, False)
    ]
    assert counts[0]["prompt_tokens"] > counts[1]["prompt_tokens"]


# --- the model, the version, the pages ------------------------------------------------------------


def test_the_model_says_how_much_it_takes(gateway: Gateway) -> None:
    (model,) = gateway.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("minisgl", 8192)
    assert gateway.get("/v1/models/minisgl").json() == model


def test_models_are_listed_while_the_engine_is_away(tmp_path: Path) -> None:
    with gateway_of("127.0.0.1:1", tmp_path / "log") as lonely:
        (model,) = lonely.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("minisgl", None)
        assert refused(lonely.post("/tokenize", {"prompt": "x"}), 503)["code"] == (
            "engine_unavailable"
        )
        assert lonely.get("/ping").status_code == 503


def test_probes_of_vllm(gateway: Gateway) -> None:
    told = gateway.get("/version").json()
    assert told == {"version": importlib.metadata.version("minisgl-triton")}
    assert gateway.get("/ping").status_code == gateway.post("/ping").status_code == 200


def test_the_description_as_a_page(gateway: Gateway) -> None:
    answer = gateway.get("/docs")
    assert answer.headers["Content-Type"].startswith("text/html")
    page = answer.text
    assert "POST /v1/chat/completions" in page
    for name in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{name}"' in page
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="[a-z]+:', page), "nothing comes from elsewhere"


# --- wrong places ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/v1/models/minisgl"])
def test_a_slash_at_the_end_changes_nothing(gateway: Gateway, path: str) -> None:
    assert gateway.get(path + "/").json() == gateway.get(path).json()


def test_a_slash_at_the_end_of_a_route_that_answers(gateway: Gateway) -> None:
    assert gateway.post("/v1/completions/", SHORT).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "near"),
    [
        ("GET", "/models", "GET /v1/models"),
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/openai/v1/completions", "POST /v1/completions"),
        ("POST", "/v1/chat/completions/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/completions/v1/completions", "POST /v1/completions"),
        ("GET", "/v1/chat/completions/models", "GET /v1/models"),
        ("POST", "//v1/completions", "POST /v1/completions"),
        ("POST", "/v1/chat/completion", "POST /v1/chat/completions"),
        ("POST", "/v1/tokenize", "POST /tokenize"),
        ("POST", "/responses", "POST /v1/responses"),
        ("POST", "/v1/v1/responses", "POST /v1/responses"),
        ("POST", "/messages", "POST /v1/messages"),
        ("POST", "/v1/v1/messages", "POST /v1/messages"),
        ("POST", "/v1/v1/messages/count_tokens", "POST /v1/messages/count_tokens"),
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("POST", "/v2/embed", "POST /v1/embeddings"),
        ("POST", "/v1/v2/rerank", "POST /v1/rerank"),
        ("POST", "/v1/moderations", None),
        ("POST", "/v1/audio/speech", None),
    ],
)
def test_a_wrong_place_is_named_and_so_is_the_right_one(
    gateway: Gateway, method: str, path: str, near: str | None
) -> None:
    answer = gateway.request(method, path)
    hint = f"; did you mean {near}?" if near else ""
    assert refused(answer, 404)["message"] == f"{method} {path} is not offered{hint}"


def test_a_wrong_place_with_a_strange_name(gateway: Gateway) -> None:
    for path in ("/%00%0a%1b", "/" + "x" * 5000, "/%C3%A9"):
        message = refused(gateway.get(path), 404)["message"]
        assert message.isprintable() and len(message) < 200


# --- ids, labels, pages of other origins ----------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}])
def test_a_chat_that_is_refused_has_the_id_of_its_answer(
    gateway: Gateway, fields: dict[str, Any]
) -> None:
    answer = gateway.chat("Hi", chat_template_kwargs={"messages": []}, **fields)
    assert "may not hold 'messages'" in refused(answer, 400)["message"]
    assert answer.headers["X-Request-Id"].startswith("chatcmpl-")


def test_the_id_that_a_caller_gives_is_kept(gateway: Gateway) -> None:
    for path, body in (("/v1/completions", SHORT), ("/v1/completions", {}), ("/nothing", {})):
        answer = gateway.post(path, body, headers={"X-Request-Id": "Root=1-abc/def.7"})
        assert answer.headers["X-Request-Id"] == "Root=1-abc/def.7"
    stream = {**SHORT, "stream": True}
    answer = gateway.post("/v1/completions", stream, headers={"X-Request-Id": "mine"})
    assert answer.headers["X-Request-Id"] == "mine"
    gateway.wait_logged(r"cmpl-\w+ \(mine\): /v1/completions 200")


def test_what_the_gateway_itself_answers_has_an_id(gateway: Gateway) -> None:
    unknown = {**SHORT, "unknown": 1}
    bodies = {"/v1/completions": {}, "/v1/chat/completions": {}, "/v1/responses": unknown}
    for path, body in {**bodies, "/v1/embeddings": {}, "/v1/messages": {}, "/nothing": {}}.items():
        answer = gateway.post(path, body)
        assert answer.status_code in (400, 404)
        assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["X-Request-Id"])
        gateway.wait_logged(f"{answer.headers['X-Request-Id']}: .* {answer.status_code} ")


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "tab\tbed", "é"])
def test_an_id_that_is_not_sane_is_replaced(gateway: Gateway, given: str) -> None:
    headers = {"X-Request-Id": given.encode()}
    answer = httpx.post(
        f"{gateway.url}/v1/completions",
        json=SHORT,
        headers=headers,  # type: ignore[arg-type]
        timeout=PATIENCE_S,
    )
    assert answer.headers["X-Request-Id"] == answer.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_said(gateway: Gateway, stream: bool) -> None:
    labels = {"verbosity": "low", "store": True, "user": "me", "metadata": None}
    answer = gateway.chat("Hi", max_tokens=1, stream=stream, **labels)
    assert answer.headers["X-Minisgl-Without-Effect"] == "store, user, verbosity"
    assert "X-Minisgl-Without-Effect" not in gateway.chat("Hi", max_tokens=1).headers


def test_pages_of_an_origin_that_the_operator_names(opened: Gateway) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
    url = f"{opened.url}/v1/chat/completions"
    answer = httpx.options(url, headers=asked, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert "x-stainless-os" in answer.headers["Access-Control-Allow-Headers"]
    answer = opened.post("/v1/completions", {**SHORT, "user": "me"}, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "X-Minisgl-Without-Effect"} <= set(exposed)
    assert "X-Minisgl-Without-Effect" in answer.headers


def test_pages_of_other_origins(opened: Gateway, gateway: Gateway) -> None:
    other = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    url = f"{opened.url}/v1/completions"
    assert httpx.options(url, headers=other, timeout=PATIENCE_S).status_code == 400
    answer = opened.post("/v1/completions", SHORT, headers={"Origin": other["Origin"]})
    assert answer.status_code == 403
    assert "Access-Control-Allow-Origin" not in answer.headers
    closed = httpx.options(
        f"{gateway.url}/v1/completions", headers={**other, "Origin": PAGE}, timeout=PATIENCE_S
    )
    assert closed.status_code in (403, 405)
    assert "Access-Control-Allow-Origin" not in closed.headers


def test_pages_need_a_key_where_keys_are_in_use(server: TritonServer, tmp_path: Path) -> None:
    options = ("--cors-origin", "*", "--api-key", KEYS[0])
    with gateway_of(f"127.0.0.1:{server.grpc_port}", tmp_path / "log", *options) as keyed:
        headers = {"Origin": "https://any.example", "Authorization": f"Bearer {KEYS[0]}"}
        answer = keyed.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        del headers["Authorization"]
        answer = keyed.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["Access-Control-Allow-Origin"] == "*"


# --- the room that there is -----------------------------------------------------------------------


def test_more_tokens_than_there_is_room_for(gateway: Gateway, opened: Gateway) -> None:
    long = {**SHORT, "prompt": [5] * 8180, "max_tokens": 16384, "ignore_eos": True}
    error = refused(gateway.post("/v1/completions", long))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"] == (
        "This model's maximum context length is 8192 tokens. However, you requested 24564 tokens "
        "(8180 in the prompt, 16384 in the completion). Please reduce the length of the prompt or "
        "completion."
    )
    unbounded = {**long, "max_tokens": -1}
    for asked, body in ((opened, long), (gateway, unbounded)):
        answer = asked.post("/v1/completions", body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 12


def test_a_prompt_that_is_too_long_in_words_that_clients_know(gateway: Gateway) -> None:
    for content in ("a " * 8192, "word " * 50_000):
        error = refused(gateway.chat(content))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert error["message"].startswith("This model's maximum context length is 8192 tokens. Ho")
