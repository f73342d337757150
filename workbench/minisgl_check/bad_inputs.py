"""The catalogue of requests with wrong or odd values, and the ending that each must have.

Knows names, values and the code with which the refusal begins. Must not know how a request is sent:
each goes as JSON and, if tensors or request parameters can carry it, over gRPC.

A request of ``Expected.ANSWER`` is odd but valid. One of ``Expected.TRITON`` is refused by Triton
itself, with a message of its own, before a model sees it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

INT32: Final = 2**31
UINT64: Final = 2**64
_NAN: Final = float("nan")
_INFINITY: Final = float("inf")
_TEXT: Final = {"text_input": "Hello"}


class Expected(Enum):
    """How a request must end."""

    ANSWER = "an answer"
    INVALID = "INVALID_ARG"
    UNSUPPORTED = "UNSUPPORTED"
    REFUSED = "INVALID_ARG or UNSUPPORTED"
    TRITON = "an error of Triton's"
    SURVIVED = "an answer or an error"
    CLOSED = "an error, or a closed connection"


@dataclass(frozen=True, slots=True)
class Bad:
    """A request by its values: those of the ensemble's inputs, and others as parameters."""

    name: str
    values: Mapping[str, Any]
    expected: Expected = Expected.INVALID


def catalogue(*, vocab_size: int, context: int, num_positions: int) -> list[Bad]:
    """All bad inputs, for a server with this vocabulary, context and number of KV positions."""
    found = [
        *_prompts(),
        *_token_ids(vocab_size, context, num_positions),
        *_messages(),
        *_numbers(vocab_size),
        *_lists(vocab_size),
        *_forms(),
        *_not_offered(),
        *_odd(),
    ]
    names = [one.name for one in found]
    assert len(set(names)) == len(names), "names must be unique"
    return found


def _prompts() -> Iterator[Bad]:
    yield Bad("no prompt", {})
    yield Bad("two prompts", {**_TEXT, "input_ids": [1]})
    yield Bad("empty prompt", {"text_input": ""})
    yield Bad("prompt null", {"text_input": None}, Expected.TRITON)
    yield Bad("prompt a number", {"text_input": 7}, Expected.TRITON)
    yield Bad("prompt a list", {"text_input": ["a", "b"]}, Expected.TRITON)
    yield Bad("prompt of texts and numbers", {"text_input": ["a", 1]}, Expected.TRITON)
    yield Bad("prompt of half a surrogate", {"text_input": "\ud800"}, Expected.TRITON)
    yield Bad("100,000 prompts", {"text_input": ["a"] * 10**5}, Expected.TRITON)
    marks = "a" + "\u0301" * 10_000
    yield Bad("prompt of 10,000 combining marks", {"text_input": marks}, Expected.SURVIVED)
    yield Bad("prompt of a million letters", {"text_input": "a" * 10**6})
    yield Bad("prompt of 26,000 dots", {"text_input": "." * 26_000}, Expected.SURVIVED)
    yield Bad("prompt of 200,000 spaces", {"text_input": " " * 200_000}, Expected.SURVIVED)
    yield Bad("prompt of 100,000 ideographs", {"text_input": "日本" * 50_000})
    yield Bad("prompt over the limit of bytes", {"text_input": "x " * (4 * 2**20 + 1)})


def _token_ids(vocab_size: int, context: int, num_positions: int) -> Iterator[Bad]:
    yield Bad("no token ids", {"input_ids": []}, Expected.SURVIVED)
    for token_id in (-1, vocab_size, INT32 - 1):
        yield Bad(f"token id {token_id}", {"input_ids": [token_id]})
    for other in (INT32, 2**63, 1.5, True, "7"):
        yield Bad(f"token id {other!r}", {"input_ids": [other]}, Expected.TRITON)
    fitting = {"input_ids": [5] * context, "max_tokens": 1}
    yield Bad("a prompt as long as the context", fitting)
    yield Bad("a prompt longer than the context", {"input_ids": [5] * (context + 1)})
    if num_positions + 1 < context:
        values = {"input_ids": [5] * (num_positions + 1), "max_tokens": 1}
        yield Bad("a prompt that fits the context but not the pages", values)


def _messages() -> Iterator[Bad]:
    user = {"role": "user", "content": "Hello"}
    contents: dict[str, Any] = {
        "none": [],
        "null": None,
        "a string": "hello",
        "a number in the list": [7],
        "one without a role": [{"content": "x"}],
        "an unknown role": [{"role": "king", "content": "x"}],
        "no content": [{"role": "user"}],
        "content null": [{"role": "user", "content": None}],
        "content a number": [{"role": "user", "content": 7}],
        "content an object": [{"role": "user", "content": {"a": 1}}],
        "a file as an image": [_image("file:///etc/passwd")],
        "a link as an image": [_image("http://169.254.169.254/latest/meta-data")],
        "10,000 of them": [user] * 10_000,
        "half a surrogate": [{"role": "user", "content": "\ud800"}],
    }
    others = {
        "an unknown role": Expected.SURVIVED,  # the model's template decides
        "a file as an image": Expected.UNSUPPORTED,
        "a link as an image": Expected.UNSUPPORTED,
    }
    for name, messages in contents.items():
        expected = others.get(name, Expected.INVALID)
        yield Bad(f"messages: {name}", {"messages": json.dumps(messages)}, expected)
    yield Bad("messages: no JSON", {"messages": "[{"})
    yield Bad("messages: nested 10,000 deep", {"messages": "[" * 10_000 + "]" * 10_000})
    twice = '[{"role": "user", "role": "user", "content": "Hello"}]'
    yield Bad("messages: a key twice", {"messages": twice})
    tools = {"messages": json.dumps([user]), "tools": '{"a": 1}'}
    yield Bad("tools an object", tools)
    yield Bad("tools without messages", {**_TEXT, "tools": "[]"}, Expected.SURVIVED)


def _image(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


_WRONG_NUMBERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_tokens": (0, -1, INT32 - 1),
    "min_tokens": (-1, 17),
    "temperature": (-1.0, _NAN, _INFINITY, -_INFINITY),
    "top_p": (-0.1, 1.0001, _NAN),
    "top_k": (-2,),
    "min_p": (-1.0, 2.0, _NAN),
    "repetition_penalty": (0.0, -3.0, _NAN),
    "presence_penalty": (_NAN, 2.5),
    "frequency_penalty": (_NAN, -2.5),
    "num_logprobs": (-1, 21, 10**6),
    "num_prompt_logprobs": (-1, 21, 10**6),
    "timeout_ms": (0, -1),
    "min_chunk_interval_ms": (-1,),
}
"""Values of the right type but out of range: tensors can carry them."""

_WRONG_TYPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_tokens": (1.5, True, "many", INT32, 2**63),
    "temperature": ("hot", None),
    "top_k": (1.5, INT32),
    "seed": (-1, UINT64, "x"),
    "stream": ("yes", 7),
    "stop": (7, [7]),
}
"""Values that Triton's JSON, or its data types, cannot carry."""


def _numbers(vocab_size: int) -> Iterator[Bad]:
    for name, numbers in _WRONG_NUMBERS.items():
        for number in numbers:
            yield Bad(f"{name} {number}", {**_TEXT, name: number})
    for name, others in _WRONG_TYPES.items():
        for other in others:
            yield Bad(f"{name} {other!r}", {**_TEXT, name: other}, Expected.TRITON)
    # what a tensor cannot carry, JSON in a string can
    texts = {
        "temperature": ("NaN", "1e999", "1e308", '"hot"', "true", "[]"),
        "max_tokens": (
            "1.5",
            "NaN",
            "true",
            '"sixteen"',
            str(INT32),
            str(2**63),
            "1e308",
            "9" * 5000,
        ),
        "n": ("0", "-1", "65", "1.5", str(2**63)),
        "best_of": ("0", "65", "true"),
        "top_k": ("1.5", str(INT32)),
        "top_p": ('"nan"', "{}"),
        "repetition_penalty": ("1e308", "-Infinity"),
        "seed": ("-1", str(UINT64), '"x"', "1.5"),
        "priority_level": (str(2**70),),
        "tempreature": ("1",),
        "stream": ('"yes"',),
        "ignore_eos": ("2",),
        "text_input": ('"x"',),
    }
    for name, values in texts.items():
        for text in values:
            shown = text if len(text) < 30 else f"of {len(text)} digits"
            inside = '{"' + name + '": ' + text + "}"
            yield Bad(f"inside: {name} {shown}", {**_TEXT, "sampling_parameters": inside})
    for text in ("", "[", "[]", "7", '{"seed": 1, "seed": 2}', "[" * 10_000):
        shown = text[:24] or "empty"
        expected = Expected.SURVIVED if text == "" else Expected.INVALID
        yield Bad(f"sampling_parameters {shown}", {**_TEXT, "sampling_parameters": text}, expected)
    yield Bad("best_of below n", {**_TEXT, "n": 5, "best_of": 2})
    yield Bad("a value given twice", {**_TEXT, "max_tokens": 3, "max_new_tokens": 4})
    yield Bad("an unknown name", {**_TEXT, "tempreature": 1.0})
    yield Bad("a name of 1,000 letters", {**_TEXT, "x" * 1000: 1})
    yield Bad("top_k above the vocabulary", {**_TEXT, "top_k": vocab_size + 1}, Expected.ANSWER)


def _lists(vocab_size: int) -> Iterator[Bad]:
    yield Bad("10,000 stop strings", {**_TEXT, "stop": [str(i) for i in range(10_000)]})
    yield Bad("a stop string of a megabyte", {**_TEXT, "stop": ["x" * 2**20]})
    for token_id in (-1, vocab_size):
        yield Bad(f"stop token id {token_id}", {**_TEXT, "stop_token_ids": [token_id]})
    yield Bad("1,000 stop token ids", {**_TEXT, "stop_token_ids": [1] * 1000})
    biases: dict[str, str] = {
        "no JSON": "{",
        "a list": "[1]",
        "a word as its key": '{"x": 1}',
        "the key -1": '{"-1": 1}',
        "a key beyond the vocabulary": json.dumps({str(vocab_size): 1}),
        "NaN": '{"1": NaN}',
        "1e999": '{"1": 1e999}',
        "1e308": '{"1": 1e308}',
        "a key twice": '{"1": 1, "1": 2}',
        "a text as its value": '{"1": "x"}',
        "300,000 entries": json.dumps({str(i): 1 for i in range(300_000)}),
    }
    for name, text in biases.items():
        yield Bad(f"logit_bias: {name}", {**_TEXT, "logit_bias": text})
    for name, salt in {
        "of a megabyte": "s" * 2**20,
        "of 65 characters": "s" * 65,
        "with @ and /": "@/../",
        "not in ASCII": "日本",
    }.items():
        yield Bad(f"a cache salt {name}", {**_TEXT, "cache_salt": salt})


def _forms() -> Iterator[Bad]:
    """Invalid forms of answers, and a valid one."""
    forms: dict[str, str] = {
        "no JSON": "{",
        "none": "{}",
        "two": '{"regex": "a", "choice": ["a"]}',
        "an unknown field": '{"xml": "a"}',
        "a field twice": '{"regex": "a", "regex": "b"}',
        "a broken expression": '{"regex": "(((("}',
        "half a surrogate": r'{"regex": "\ud800"}',
        "a schema that is a number": '{"json": 7}',
        "a type that there is not": '{"json": {"type": "tensor"}}',
        "a keyword that is not offered": '{"json": {"uniqueItems": true}}',
        "a link to a file": '{"json": {"$ref": "file:///etc/passwd"}}',
        "a link to a host": '{"json": {"$ref": "http://169.254.169.254/"}}',
        "choices that are numbers": '{"choice": [1, 2]}',
        "no choices": '{"choice": []}',
        "a rule that there is not": '{"grammar": "start: missing"}',
        "a structural tag without triggers": '{"structural_tag": {"structures": []}}',
        "half a megabyte": json.dumps({"regex": "a" * 2**19}),
    }
    for name, form in forms.items():
        yield Bad(f"form: {name}", {**_TEXT, "structured_outputs": form})
    yield Bad("form: a guide without a type", {**_TEXT, "guided_decoding_guide": "{}"})
    valid = {**_TEXT, "structured_outputs": '{"regex": "[a-f]{3}"}'}
    yield Bad("form: an expression", valid, Expected.ANSWER)


def _not_offered() -> Iterator[Bad]:
    for name, value in {
        "beam_width": 4,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "echo": True,
        "bad_words": "shoe",
        "guided_whitespace_pattern": " ",
        "guided_decoding_backend": "outlines",
        "chat_template": "{{ 7 * 7 }}",
        "response_format": "json_object",
        "truncate_prompt_tokens": 3,
    }.items():
        yield Bad(f"not offered: {name}", {**_TEXT, name: value}, Expected.UNSUPPORTED)
    # no such adapter, or no adapters at all
    yield Bad("not offered: lora_name", {**_TEXT, "lora_name": "../x"}, Expected.REFUSED)
    best = {**_TEXT, "stream": True, "best_of": 2}
    yield Bad("not offered: the best of a stream", best, Expected.UNSUPPORTED)
    both = {**_TEXT, "stream": True, "exclude_input_in_output": False}
    yield Bad("not offered: the prompt in a stream", both, Expected.UNSUPPORTED)


def _odd() -> Iterator[Bad]:
    texts = {
        "a zero byte": "a\0b",
        "a byte order mark": "\ufeffhello",
        "blanks": "   ",
        "300 combining marks": "a" + "\u0301" * 300,
        "special-token text": "<|im_end|><|im_start|>system",
        "a template's text": "{{ 7 * 7 }}{% for %}",
        "control characters": "\x1b[2J\r\n",
    }
    for name, text in texts.items():
        yield Bad(f"odd prompt: {name}", {"text_input": text}, Expected.ANSWER)
    values = {
        "temperature": (0.0, -0.0, 1e-38, 1e30),
        "seed": (0, UINT64 - 1),
        "cache_salt": ("", "s" * 64),
        "stop": ([""], ["\u0301"]),
        "top_k": (-1, 0),
        "priority_level": (-INT32, INT32 - 1),
    }
    for name, some in values.items():
        for value in some:
            yield Bad(f"odd: {name} {value!r}", {**_TEXT, name: value}, Expected.ANSWER)
