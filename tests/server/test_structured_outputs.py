"""Structured outputs from a real server: each way in, each form, thinking, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from minisgl_client import Client
from tritonclient.utils import InferenceServerException

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.server.process import TritonServer
from minisgl_backend.text.tokenizer_files import load_vocabulary
from tests.fakes import chat_templates
from tests.server.client import Call, Refused, generate, generate_stream, tensors, text_of
from tests.server.conftest import running

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["é", "日本"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
"""Without whitespace: otherwise a small model tends to write nothing else."""


def follows_schema(text: str) -> bool:
    found = json.loads(text)
    assert found.keys() == {"name", "size"}
    return found["name"] in ("é", "日本") and found["size"] <= 99


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json": SCHEMA}, follows_schema),
    ({"regex": "[a-f]{3} (日|é)"}, matches("[a-f]{3} (日|é)")),
    ({"choice": ["ja", "nein, 日本"]}, matches("ja|nein, 日本")),
    ({"grammar": 'root ::= "x" [yz] [yz]'}, matches("x[yz][yz]")),
    ({"grammar": 'start: "x" ("y" | "z")'}, matches("x[yz]")),
]
ASKED: dict[str, Any] = {"text_input": "Hello", "max_tokens": 200}


@pytest.mark.parametrize(("form", "is_right"), FORMS, ids=lambda value: str(value)[:20])
def test_each_way_in(
    server: TritonServer, form: dict[str, Any], is_right: Callable[[str], bool]
) -> None:
    asked = {**ASKED, "structured_outputs": json.dumps(form), "seed": 3, "temperature": 0.5}
    texts = {
        "generate": generate(server, **asked)["text_output"],
        "generate, batched": generate(server, "minisgl_batched", **asked)["text_output"],
        "generate_stream": "".join(
            event["text_output"] for event in generate_stream(server, stream=True, **asked)
        ),
    }
    for name, values, parameters in (
        ("as a parameter", {**ASKED, "stream": True}, {"structured_outputs": json.dumps(form)}),
        ("as a tensor", {**ASKED, "stream": True}, {}),
    ):
        inputs = tensors({"seed": 3, "temperature": 0.5})
        if not parameters:
            inputs += tensors({"structured_outputs": json.dumps(form)})
        with Call(server, inputs=inputs, parameters=parameters, **values) as call:
            texts[name] = text_of(call.all())
    assert len(set(texts.values())) == 1, texts
    assert is_right(texts["generate"])


def test_the_engine_alone(server: TritonServer) -> None:
    vocabulary = load_vocabulary(DEMO_MODEL)
    form = json.dumps({"regex": "[a-f]{4}"})
    answer = generate(server, "llm_engine", input_ids=[500], structured_outputs=form)
    ids = answer["output_ids"]
    text = b"".join(vocabulary.pieces[token_id] for token_id in ids).decode()
    assert re.fullmatch("[a-f]{4}", text)


def test_an_answer_that_is_cut_says_so(server: TritonServer) -> None:
    form = json.dumps({"regex": "[a-f]{100}"})
    asked = {**ASKED, "structured_outputs": form, "return_finish_reason": True}
    cut = generate(server, **{**asked, "max_tokens": 5})
    assert cut["finish_reason"] == "length"
    assert re.fullmatch("[a-f]{1,99}", cut["text_output"])
    assert generate(server, **asked)["finish_reason"] == "stop"


def test_stop_strings_and_other_parameters_go_with_it(server: TritonServer) -> None:
    form = json.dumps({"regex": "[a-f]{20}"})
    asked = {**ASKED, "structured_outputs": form, "temperature": 0.0}
    whole = generate(server, **asked)["text_output"]
    stopped = generate(server, **asked, stop=whole[8:11], return_stop_reason=True)
    assert json.loads(stopped["stop_reason"]) == whole[8:11]
    assert whole.startswith(stopped["text_output"]) and len(stopped["text_output"]) <= 8
    penalized = generate(server, **asked, frequency_penalty=2.0, min_tokens=3)["text_output"]
    assert re.fullmatch("[a-f]{20}", penalized)
    assert len(set(penalized)) > len(set(whole))


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"structured_outputs": '{"json": {"items": {"contains": 5}}}'},
        r"INVALID_ARG: json_schema: .*contains.* at #/items/contains",
    ),
    ({"guided_json": '{"type": "nope"}'}, r"INVALID_ARG: json_schema: .*nope"),
    ({"guided_json": "{"}, r"INVALID_ARG: json_schema: .*must be JSON"),
    ({"guided_regex": "((("}, r"INVALID_ARG: regex: .*unclosed group"),
    ({"guided_grammar": "start: missing"}, r"INVALID_ARG: grammar: .*missing"),
    ({"guided_choice": "[]"}, r"INVALID_ARG: choice: .*at least one string"),
    ({"structured_outputs": "{}"}, r"INVALID_ARG: structured_outputs must hold one of"),
    ({"structured_outputs": '{"xml": 1}'}, r"INVALID_ARG: .*unknown field 'xml': give one of"),
    (
        {"guided_decoding_guide_type": "regex"},
        r"INVALID_ARG: guided_decoding_guide_type regex goes with guided_decoding_guide",
    ),
    (
        {"structured_outputs": '{"regex": "a", "whitespace_pattern": " "}'},
        r"UNSUPPORTED: structured_outputs.whitespace_pattern is not supported",
    ),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said_with_its_place(
    server: TritonServer, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused) as caught:
        generate(server, **ASKED, **values)
    assert re.match(f"in ensemble 'minisgl', {message}", caught.value.message)
    assert caught.value.status == 400
    assert "Traceback" not in caught.value.message and "\n" not in caught.value.message
    asked = {**ASKED, "stream": True}
    with Call(server, parameters=values, **asked) as call, pytest.raises(Refused, match=message):
        call.all()


def test_a_wrong_grammar_as_grpc_status(server: TritonServer) -> None:
    caught: list[InferenceServerException] = []
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    client.start_stream(
        lambda result, error: caught.append(error), headers={"triton_grpc_error": "true"}
    )
    values = tensors({"text_input": "x"})
    client.async_stream_infer("minisgl", values, parameters={"guided_regex": "((("})
    client.stop_stream()
    client.close()
    assert caught[0].status() == "StatusCode.INVALID_ARGUMENT"


def test_many_at_once_with_and_without(server: TritonServer) -> None:
    """Requests without a form are not changed by those with one."""
    plain = {"text_input": "Count from 1 to 5.", "temperature": 0.0, "max_tokens": 20}
    alone = generate(server, **plain)["text_output"]
    formed = [
        ({**ASKED, "structured_outputs": json.dumps(form), "seed": seed}, is_right)
        for seed in range(3)
        for form, is_right in FORMS
    ]
    with ThreadPoolExecutor(24) as threads:
        others = [threads.submit(generate, server, **plain) for _ in range(8)]
        answers = [(threads.submit(generate, server, **asked), ok) for asked, ok in formed]
        assert all(other.result()["text_output"] == alone for other in others)
        assert all(is_right(answer.result()["text_output"]) for answer, is_right in answers)


# --- a model that thinks --------------------------------------------------------------------------

MARKS = ("</think>", "<think>")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Path]]:
    """A server whose model has Qwen3's template, and the model's folder."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    chat_templates.demo_model(folder, chat_templates.QWEN3, MARKS)
    with running(options={"model": str(folder)}) as server:
        yield server, folder


def test_the_form_begins_after_thoughts(thinker: tuple[TritonServer, Path]) -> None:
    server, folder = thinker
    names = load_vocabulary(folder).names
    end, begin = (names.index(mark) for mark in MARKS)
    messages = [{"role": "user", "content": "Hello"}]
    with Client(f"127.0.0.1:{server.grpc_port}") as client:
        told = client.tokenize(messages=messages).chat_format
        assert told is not None
        assert (told.tool_dialect, told.thinking) == ("hermes", ("<think>", "</think>"))
        assert not told.begins_thinking and "enable_thinking" in told.variables
        # the end is likelier than anything else, but no answer may begin with it
        asked: dict[str, Any] = {
            "structured_outputs": {"regex": "[a-f]{3}"},
            "logit_bias": {begin: 60, end: 100},
        }
        assert re.fullmatch(
            "<think></think>[a-f]{3}", client.generate(messages=messages, **asked).text
        )
        without: dict[str, Any] = {**asked, "logit_bias": {begin: -100}}
        assert re.fullmatch("[a-f]{3}", client.generate(messages=messages, **without).text)
        closed: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        told = client.tokenize(messages=messages, **closed).chat_format
        assert told is not None and told.thinking is None
        result = client.generate(messages=messages, **asked, **closed)
        assert re.fullmatch("[a-f]{3}", result.text)


def test_the_text_of_special_tokens(thinker: tuple[TritonServer, Path]) -> None:
    server, folder = thinker
    start = load_vocabulary(folder).names.index("<|im_start|>")
    asked: dict[str, Any] = {"logit_bias": {start: 100}, "max_tokens": 2, "temperature": 0}
    with Client(f"127.0.0.1:{server.grpc_port}") as client:
        assert client.generate("x", **asked).text == ""
        with client.stream("x", **asked, skip_special_tokens=False, num_logprobs=0) as stream:
            deltas = list(stream)
        assert "".join(delta.text for delta in deltas) == "<|im_start|>" * 2
        stopped = client.generate("x", **asked, skip_special_tokens=False, stop="start|><|")
        assert (stopped.text, stopped.stop_reason) == ("<|im_", "start|><|")
