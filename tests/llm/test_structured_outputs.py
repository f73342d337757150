"""Structured outputs in process, with thoughts before them; special tokens in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.text.tokenizer_files import load_vocabulary
from tests.fakes import chat_templates

CHAT = [{"role": "user", "content": "Think of a letter."}]
MARKS = ("</think>", "<think>")
FORM = {"regex": "[a-f]{3}"}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "name": {"enum": ["é", "b"]}},
    "required": ["size", "name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "is_valid"),
    [
        ({"json": SCHEMA}, lambda text: json.loads(text)["name"] in ("é", "b")),
        ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["name"] in ("é", "b")),
        ({"regex": "[a-f]{3}"}, lambda text: re.fullmatch("[a-f]{3}", text)),
        ({"choice": ["Ja", "Nein"]}, lambda text: text in ("Ja", "Nein")),
        ({"choice": '["Ja", "Nein"]'}, lambda text: text in ("Ja", "Nein")),
        ({"grammar": 'start: "x" "y"+\n'}, lambda text: re.fullmatch("xy+", text)),
        ({"grammar": 'root ::= "x" [yz]'}, lambda text: re.fullmatch("x[yz]", text)),
    ],
)
def test_answers_have_the_form(llm: LLM, form: dict[str, Any], is_valid: Any) -> None:
    asked = {"structured_outputs": form, "max_tokens": 400, "temperature": 1}
    outputs = [
        *llm.generate(["Hello", "Hello"], [{**asked, "seed": seed} for seed in (1, 2)]),
        *llm.generate("Hello", {**asked, "structured_outputs": json.dumps(form)}),
    ]
    finished = [output for output in outputs if output.finish_reason == "stop"]
    assert finished
    assert all(is_valid(output.text) for output in finished)


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        ({"json": {"contains": 1}}, "json_schema: .*contains.*#/contains"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "a", "choice": ["a"]}, "must hold one of .*, got regex and choice"),
    ],
)
def test_what_is_wrong_with_a_grammar(llm: LLM, form: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        llm.generate("Hello", {"structured_outputs": form})
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: .*" + complaint):
        llm.generate(["Hello", "Hello"], [{}, {"structured_outputs": form}])


def test_special_tokens_in_the_text(llm: LLM) -> None:
    start = load_vocabulary(llm._options.model).names.index("<|im_start|>")
    asked = {"logit_bias": {start: 100}, "temperature": 0, "max_tokens": 3}
    (told,) = llm.generate("Hello", {**asked, "skip_special_tokens": False})
    assert told.text == "<|im_start|>" * 3
    (untold,) = llm.generate("Hello", {**asked, "return_logprobs": True})
    assert untold.text == ""
    assert untold.token_ids == told.token_ids == [start] * 3


# --- models that think ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["QWEN3", "QWEN3_THINKING"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[str, LLM]]:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    template = getattr(chat_templates, request.param)
    with LLM(chat_templates.demo_model(folder, template, MARKS), seed=3) as llm:
        yield request.param, llm


def test_the_grammar_begins_after_thoughts(thinker: tuple[str, LLM]) -> None:
    family, llm = thinker
    names = load_vocabulary(llm._options.model).names
    end, begin = (names.index(mark) for mark in MARKS)
    asked: dict[str, Any] = {"structured_outputs": FORM, "max_tokens": 40}
    # the end is likelier than anything else, but no answer may begin with it
    (output,) = llm.generate(CHAT, {**asked, "logit_bias": {begin: 60, end: 100}})
    begins = "" if family == "QWEN3_THINKING" else "<think>"
    assert re.fullmatch(rf"{begins}</think>[a-f]{{3}}", output.text)
    assert output.finish_reason == "stop"
    # without the end mark nothing ends, whatever the grammar would accept
    (output,) = llm.generate(CHAT, {**asked, "logit_bias": {begin: 60, end: -100}})
    assert output.text == "<think>" * 40
    assert output.finish_reason == "length"


def test_an_answer_without_thoughts_has_the_form_from_its_start(thinker: tuple[str, LLM]) -> None:
    """Unless the prompt has begun a section."""
    family, llm = thinker
    asked: dict[str, Any] = {"structured_outputs": FORM, "max_tokens": 20, "temperature": 0}
    (output,) = llm.generate(CHAT, asked)
    is_open = family == "QWEN3_THINKING"
    assert output.finish_reason == ("length" if is_open else "stop")
    assert bool(re.fullmatch("[a-f]{3}", output.text)) is not is_open
    (text,) = llm.generate("Think of a letter.", asked)
    assert re.fullmatch("[a-f]{3}", text.text), "a text that is no chat has no such section"


def test_a_section_that_the_prompt_has_closed(thinker: tuple[str, LLM]) -> None:
    family, llm = thinker
    begin = load_vocabulary(llm._options.model).names.index("<think>")
    asked = {"structured_outputs": FORM, "max_tokens": 20, "logit_bias": {begin: 100}}
    closed = {**asked, "chat_template_kwargs": {"enable_thinking": False}}
    (output,) = llm.generate(CHAT, closed)
    knows_the_variable = family == "QWEN3"
    assert bool(re.fullmatch("[a-f]{3}", output.text)) is knows_the_variable
    assert output.text.startswith("<think>") is not knows_the_variable


def test_an_end_of_thoughts_that_is_no_token(tmp_path: Any) -> None:
    folder = chat_templates.demo_model(tmp_path / "model", chat_templates.QWEN3_THINKING, ())
    with LLM(folder) as llm:
        with pytest.raises(Unsupported, match="</think> to be one token"):
            llm.generate([CHAT, CHAT], [{}, {"structured_outputs": FORM}])
        assert llm.generate(CHAT, {"max_tokens": 2})[0].num_output_tokens == 2
