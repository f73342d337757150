"""Each failure is an exception of its own kind, whichever way the server is asked."""

from __future__ import annotations

from typing import Any

import pytest
from minisgl_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidArgument,
    MinisglError,
    Result,
    ServerError,
    Timeout,
    Unavailable,
    Unsupported,
    attempts,
)
from minisgl_client.errors import Cancelled, error_from

from minisgl_backend import errors as backend
from minisgl_backend.server.process import TritonServer
from tests.client.ways import Way, all_ways, url_of
from tests.server.client import PATIENCE_S

pytestmark = pytest.mark.server

HERE: list[tuple[dict[str, Any], type[MinisglError], str]] = [
    ({"prompt": "x", "max_tokens": True}, InvalidArgument, "max_tokens must be an integer"),
    ({"prompt": "x", "max_tokens": 2**31}, InvalidArgument, "max_tokens must be an integer"),
    ({"prompt": "x", "max_tokens": "8"}, InvalidArgument, "max_tokens must be an integer"),
    ({"prompt": "x", "max_tokens": 1.5}, InvalidArgument, "max_tokens must be an integer"),
    ({"prompt": "x", "seed": -1}, InvalidArgument, "seed must be an integer in 0"),
    ({"prompt": "x", "temperature": float("nan")}, InvalidArgument, "temperature must be finite"),
    ({"prompt": "x", "temperature": 1e39}, InvalidArgument, "temperature must be a number"),
    ({"prompt": "x", "temperature": None, "top_p": []}, InvalidArgument, "top_p must be a number"),
    ({"prompt": "x", "ignore_eos": 1}, InvalidArgument, "ignore_eos must be True or False"),
    ({"prompt": 5}, InvalidArgument, "text_input must be a string"),
    ({"prompt": "\ud83d"}, InvalidArgument, "text_input must be valid UTF-8"),
    ({"prompt": "x", "stop": [b"x"]}, InvalidArgument, "stop must be a string"),
    ({"input_ids": ["1"]}, InvalidArgument, "input_ids must be an integer"),
    ({"messages": [{"role": object()}]}, InvalidArgument, "messages must be JSON: "),
    ({"prompt": "x", "logit_bias": {5: float("nan")}}, InvalidArgument, "logit_bias must be JSON"),
    ({"prompt": "x", "\ud83d": 1}, InvalidArgument, r"the name '\ud83d' must be valid UTF-8"),
    ({"prompt": "x", "y": "\ud83d"}, InvalidArgument, "y must be valid UTF-8"),
    ({"prompt": "x", "y": ["\ud83d"]}, InvalidArgument, "y must be valid UTF-8"),
    ({"prompt": "x", "y": 2**63}, InvalidArgument, "y must be an integer of 64 bits"),
    ({"prompt": "x", "y": -(10**5000)}, InvalidArgument, "y must be an integer of 64 bits"),
    ({"prompt": "x", "y": float("inf")}, InvalidArgument, "y must be finite, got inf"),
    ({"prompt": "x", "timeout_ms": 0}, InvalidArgument, "timeout_ms must be >= 1, got 0"),
]
"""What the client refuses by itself, because no protocol could carry it."""
THERE: list[tuple[dict[str, Any], type[MinisglError], str]] = [
    ({}, InvalidArgument, "give one of text_input, messages and input_ids, got none of them"),
    ({"prompt": "x", "input_ids": [1]}, InvalidArgument, "give one of"),
    ({"prompt": ""}, InvalidArgument, "text_input must not be empty"),
    ({"input_ids": []}, InvalidArgument, "input_ids must not be empty"),
    (
        {"prompt": "x", "max_tokens": 0},
        InvalidArgument,
        "max_tokens must be >= 1 without num_prompt_logprobs or embed, got 0",
    ),
    ({"prompt": "x", "tempreature": 1.0}, InvalidArgument, "unknown parameter 'tempreature'; did"),
    ({"prompt": "x", "logit_bias": "["}, InvalidArgument, "logit_bias must be valid JSON"),
    ({"prompt": "x", "suffix": "y"}, Unsupported, "suffix is not supported, got 'y'"),
    ({"prompt": "x", "n": 0}, InvalidArgument, "n must be"),
    ({"prompt": "x", "n": 3, "best_of": 2}, InvalidArgument, "best_of must be >= n 3, got 2"),
    ({"prompt": "x", "bad_words": ["a", "b"]}, Unsupported, "bad_words is not supported"),
    ({"prompt": "x", "length_penalty": 0.5}, Unsupported, "length_penalty is not supported"),
]
"""What the server refuses."""


@all_ways
def test_wrong_values(server: TritonServer, way: Way) -> None:
    for values, kind, sentence in (*HERE, *THERE):
        for ask in (way.generate, way.stream):
            with pytest.raises(kind) as caught:
                ask(server, **values)
            assert str(caught.value).startswith(sentence), values
            assert type(caught.value) is kind


@all_ways
def test_neutral_values_of_what_is_not_offered_pass(server: TritonServer, way: Way) -> None:
    neutral: dict[str, Any] = {
        "suffix": "",
        "use_beam_search": False,
        "length_penalty": 1.0,
        "bad_words": [],
    }
    assert way.generate(server, prompt="x", max_tokens=1, temperature=0.0, **neutral).text


@all_ways
def test_another_model(server: TritonServer, way: Way) -> None:
    for model in ("another", "an/other?"):
        with pytest.raises(InvalidArgument, match="unknown model"):
            way.generate(server, {"model": model}, prompt="x")


def test_a_model_that_the_client_does_not_speak_to(server: TritonServer) -> None:
    for model in ("minisgl_batched", "llm_engine"):
        with (
            Client(url_of(server, "grpc"), model=model) as client,
            pytest.raises(ServerError, match=f"{model}.* ensembles without a batch dimension"),
        ):
            client.generate("x")


@all_ways
def test_no_server_at_the_address(way: Way) -> None:
    url = "http://127.0.0.1:1" if way.protocol == "http" else "127.0.0.1:1"
    with pytest.raises(ConnectionFailed, match=r"[Cc]onnect"):
        way.generate(url, {"retries": 1}, prompt="x")
    with pytest.raises(ConnectionFailed):  # a name without a host
        way.generate(url.replace("127.0.0.1", "a b"), {"retries": 0}, prompt="x")


@all_ways
def test_errors_leave_the_client_usable(server: TritonServer, way: Way) -> None:
    with Client(url_of(server, way.protocol)) as client:
        with pytest.raises(InvalidArgument):
            client.generate("x", max_tokens=0)
        with client.stream("x", max_tokens=0) as stream:
            with pytest.raises(InvalidArgument):
                next(stream)
            assert list(stream) == []
            assert stream.result.text == ""
        assert client.generate("x", max_tokens=1).num_output_tokens == 1


def test_settings_that_contradict_each_other() -> None:
    wrong: list[dict[str, Any]] = [
        {"url": "http://here", "protocol": "grpc"},
        {"url": "grpc://here", "protocol": "http"},
        {"url": "ftp://here"},
        {"url": "here", "protocol": "tcp"},
        {"url": ""},
    ]
    for settings in wrong:
        with pytest.raises(InvalidArgument, match="is not an address for"):
            Client(**settings)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 10**400, "3", True])
def test_invalid_timeouts(timeout_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s must be finite and > 0, got"):
        Client(timeout_s=timeout_s)


@pytest.mark.parametrize("retries", [-1, 1.5, "2", None, True])
def test_invalid_numbers_of_retries(retries: Any) -> None:
    with pytest.raises(InvalidArgument, match="retries must be an integer >= 0, got"):
        AsyncClient(retries=retries)


@pytest.mark.parametrize("headers", [{"a b": "c"}, {"a": "\u00e4"}, {"a": "b\n"}, {"": "b"}])
def test_headers_that_no_protocol_can_carry(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="is not valid"):
        Client(headers=headers)


def test_headers_that_are_told_by_name() -> None:
    wrong: list[tuple[Any, str]] = [
        ({"a": 5}, "the header 'a' must be a string, got 5"),
        ({5: "a"}, "the name of a header must be a string, got 5"),
        ({"x-Bin": "5"}, "the header 'x-Bin' would be binary in gRPC"),
    ]
    for headers, message in wrong:
        with pytest.raises(InvalidArgument, match=message):
            Client(headers=headers)
    Client("http://localhost:8000", headers={"x-bin": "5"}).close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:99999", "localhost:99999 is not an address for grpc: Port out of range"),
        ("http://localhost:99999", "is not an address for http: Port out of range"),
        ("localhost:x", "localhost:x is not an address for grpc: Port could not be cast"),
        ("localhost", "localhost is not an address for grpc: it must be HOST:PORT"),
        ("localhost:1/path", "localhost:1/path is not an address for grpc: it must be HOST:PORT"),
        ("http://me:secret@localhost", "the url has a user or a password"),
        ("me@localhost:1", "the url has a user or a password"),
        ("http://a..b", "is not an address for http: no host has such a name"),
        (f"{64 * 'x'}:1", ":1 is not an address for grpc: no host has such a name"),
        ("[::1:5", "is not an address for grpc: Invalid IPv6"),
        ("\ud800:1", "url must be valid UTF-8"),
    ],
)
def test_addresses_that_nothing_could_have(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AsyncClient(url)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "url", ["[::1]:8001", "http://localhost", "http://[::1]:8000/behind/a/proxy"]
)
def test_addresses_with_ipv6_or_a_path_are_accepted(url: str) -> None:
    Client(url).close()


@all_ways
def test_invalid_addresses_are_refused(way: Way) -> None:
    url = "http://here:port" if way.protocol == "http" else ""
    with pytest.raises(InvalidArgument, match="is not an address for"):
        way.generate(url, prompt="x")


@all_ways
@pytest.mark.parametrize(
    ("settings", "values", "sentence"),
    [
        ({}, {"request_id": 3}, "request_id must be a string, got 3"),
        ({}, {"request_id": "\ud83d"}, "request_id must be valid UTF-8"),
        ({"model": 3}, {}, "model must be a string, got 3"),
        ({"model": "\ud83d"}, {}, "model must be valid UTF-8"),
        ({}, {"text_input": "y"}, "text_input is not a parameter"),
        ({}, {"stop_request": True}, "stop_request is not a parameter"),
        (
            {},
            {"max_tokens": 10**5000},
            "max_tokens must be an integer of 32 bits, got a value of int",
        ),
        (
            {},
            {"temperature": 10**5000},
            "temperature must be a number of 32 bits, got a value of int",
        ),
        ({}, {"stop": [[1] * 10**6]}, r"stop must be a string, got \[1, 1, .{50}\.\.\.$"),
        ({"timeout_s": 10**5000}, {}, "timeout_s must be finite and > 0, got a value of int"),
    ],
)
def test_names_that_no_protocol_can_carry(
    way: Way, settings: dict[str, Any], values: dict[str, Any], sentence: str
) -> None:
    url = "http://127.0.0.1:1" if way.protocol == "http" else "127.0.0.1:1"
    with pytest.raises(InvalidArgument, match=sentence):
        way.generate(url, settings, prompt="x", **values)


@all_ways
def test_deadline(paced_server: TritonServer, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends with what it has, or with an error if it has nothing."""

    def ask(timeout_ms: int, *, of_client: bool) -> Result:
        bound: dict[str, Any] = {"timeout_ms": timeout_ms}
        if of_client:
            bound = {"settings": {"timeout_s": timeout_ms / 1000}}
        try:
            return way.generate(paced_server, input_ids=[1, 2], max_tokens=2000, **bound)
        except Timeout:  # a busy machine has nothing yet; the whole answer takes 40 s
            return ask(4 * timeout_ms, of_client=of_client)

    monkeypatch.setattr(attempts, "GRACE_S", PATIENCE_S)  # so that it is the engine that ends it
    for of_client in (False, True):
        result = ask(300, of_client=of_client)
        assert result.finish_reason == "timeout"
        assert result.text
    long_prompt = [1 + number % 500 for number in range(8000)]  # 10 s
    with pytest.raises(Timeout, match="the deadline passed after"):
        way.generate(paced_server, {"timeout_s": 0.3}, input_ids=long_prompt)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (backend.InvalidRequest("no"), InvalidArgument),
        (backend.Unsupported("no"), Unsupported),
        (backend.Overloaded("no"), Unavailable),
        (backend.Cancelled("no"), Cancelled),
        (backend.EngineFailure("no"), ServerError),
    ],
)
def test_kinds_follow_the_codes(error: backend.MiniSGLError, kind: type[MinisglError]) -> None:
    """From within an ensemble, within two, and from a model alone."""
    assert kind.code == error.code
    for place in ("", "in ensemble 'minisgl', ", "in ensemble 'a', in ensemble 'minisgl', "):
        found = error_from(f"{place}{error.code}: two words: and\na line")
        assert type(found) is kind
        assert str(found) == "two words: and\na line"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Request for unknown model: 'minisgl' is not found", InvalidArgument),
        ("Request for unknown model: 'minisgl' has no available versions", Unavailable),
        ("in ensemble 'minisgl', Stub process 'llm_engine_0_0' is not healthy.", Unavailable),
        (
            "in ensemble 'minisgl', [request id: <id_unknown>] Server is stopping, scheduler for"
            " model has stopped accepting new inference requests",
            Unavailable,
        ),
        ("in ensemble 'minisgl', SOMETHING: else", ServerError),
        ("", ServerError),
    ],
)
def test_sentences_of_triton(text: str, kind: type[MinisglError]) -> None:
    found = error_from(text)
    assert type(found) is kind
    assert str(found) == text
