"""Whatever comes over the wire is parsed or refused in a short sentence; nothing else escapes."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import InvalidRequest, RequestError
from minisgl_backend.limits import Limits
from minisgl_backend.text.answer_stream import AnswerStream
from minisgl_backend.text.template import ChatTemplate
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire import grammars
from minisgl_backend.wire.answer import answer_arrays
from minisgl_backend.wire.generation import Generation, MessagesPrompt, Wanted
from minisgl_backend.wire.packets import decode_packet, encode_packet
from minisgl_backend.wire.parameters import BY_NAME, NEUTRAL
from minisgl_backend.wire.parse import parse_generation, parse_token_generation
from minisgl_backend.wire.record import decode_record, encode_record
from tests.fakes.packets import comparable
from tests.fakes.vocabularies import byte_level
from tests.properties.corpus import kept

LIMITS = Limits(prompt_bytes=2000)
NAMES = st.one_of(st.sampled_from([*BY_NAME, *NEUTRAL, *grammars.SPELLINGS]), st.text(max_size=12))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "nan", "-1", "1e999", "0.5", "true", "[1, 2]", '{"5": 1}', "\ud800"]),
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)
ARRAYS = st.one_of(
    st.lists(st.binary(max_size=8), max_size=3).map(lambda x: np.array(x, dtype=np.object_)),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(lambda x: np.array(x, np.int32)),
    st.lists(st.integers(0, 2**64 - 1), max_size=2).map(lambda x: np.array(x, np.uint64)),
    st.lists(st.floats(width=32), max_size=2).map(lambda x: np.array(x, np.float32)),
    st.lists(st.booleans(), max_size=2).map(lambda x: np.array([x])),
    JSON.map(lambda x: np.array([json.dumps(x).encode()], dtype=np.object_)),
)
PROMPT = {"text_input": np.array([b"hi"], dtype=np.object_)}
ENCODER = PromptEncoder(
    byte_level(),
    templates={
        "default": ChatTemplate(
            "{% for m in messages %}{{ m.role }}{{ m.content + '' }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
            "{% endfor %}",
            {},
            max_chars=2000,
        )
    },
    limits=LIMITS,
)
DEMO = PromptEncoder.load(DEMO_MODEL, LIMITS)


def check_sentence(error: RequestError) -> None:
    assert 0 < len(str(error)) < 400
    assert "Traceback" not in str(error)
    str(error).encode()


@kept("inputs", "parameters", "prompt")
@given(
    st.dictionaries(NAMES, ARRAYS, max_size=4),
    st.dictionaries(NAMES, SCALARS, max_size=4),
    st.booleans(),
)
def test_requests(inputs: dict[str, Any], parameters: dict[str, Any], prompt: bool) -> None:
    given_inputs = PROMPT | inputs if prompt else inputs
    for parse in (parse_generation, parse_token_generation):
        try:
            request = parse(given_inputs, parameters, arrival_time_ns=1, limits=LIMITS)
        except RequestError as error:
            check_sentence(error)
        else:
            check_record(request)


@kept("parameters")
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_sampling_parameters(parameters: dict[str, Any]) -> None:
    check_sampling_parameters(parameters)


FORMS = st.dictionaries(
    st.sampled_from([*grammars.FORMS, "whitespace_pattern", "_backend", "disable_fallback"])
    | st.text(max_size=8),
    JSON | st.just(True),
    min_size=1,
    max_size=2,
)
SPELLINGS = st.sampled_from(
    [*grammars.SPELLINGS, "structured_outputs", "guided_decoding_guide_type"]
)


@kept("name", "form")
@given(SPELLINGS, FORMS | FORMS.map(json.dumps) | JSON)
def test_structured_outputs(name: str, form: Any) -> None:
    """A grammar that is accepted reaches the engine unchanged; the wire does not judge it."""
    given = {name: form, "guided_decoding_guide": "x" if name.endswith("type") else None}
    check_sampling_parameters(given)


def check_sampling_parameters(parameters: dict[str, Any]) -> None:
    """They are refused in a sentence, or what they became is accepted again."""
    text = np.array([json.dumps(parameters).encode()], dtype=np.object_)
    try:
        request = parse_generation(
            PROMPT | {"sampling_parameters": text}, {}, arrival_time_ns=1, limits=LIMITS
        )
    except RequestError as error:
        check_sentence(error)
    else:
        check_record(request)


def check_record(request: Any) -> None:
    """What was accepted once is accepted again, and means the same."""
    ids = np.array([1], dtype=np.int32)
    decoded = decode_record(encode_record(request), ids, LIMITS)
    if isinstance(request, Generation):
        assert isinstance(decoded, Generation)
        assert decoded.arrival_time_ns == request.arrival_time_ns
        assert decoded.sampling == request.sampling
        assert decoded.wanted == request.wanted
        assert decoded.stop_strings == request.stop_strings
    else:
        assert decoded == request


@kept("text")
@given(st.one_of(JSON.map(json.dumps), st.text(max_size=20)))
def test_records(text: str) -> None:
    try:
        decode_record(text, np.array([1], dtype=np.int32), LIMITS)
    except RequestError as error:
        check_sentence(error)


COUNTS = st.integers(-2, 3) | st.sampled_from([2**31, 2**32, 2**63 - 1])
LOGPROBS = st.tuples(st.floats(), COUNTS, st.lists(st.tuples(COUNTS, st.floats()), max_size=2))
DELTA: Final[dict[str, st.SearchStrategy[Any]]] = {
    "o": st.lists(COUNTS, max_size=3),
    "l": st.lists(LOGPROBS, max_size=3),
    "f": st.sampled_from([["length"], ["stop", 1]]),
}
PACKETS = st.fixed_dictionaries(
    {
        "r": st.just("/run/acks"),
        "s": st.just(5),
        "i": st.just(0),
        "d": st.fixed_dictionaries(
            {"n": COUNTS},
            optional={"min": COUNTS, "ids": st.just([1]), "samples": st.tuples(COUNTS, COUNTS)},
        ),
    },
    optional={
        **DELTA,
        "m": st.lists(st.fixed_dictionaries({"n": COUNTS}, optional=DELTA), max_size=2),
        "z": st.just(1),
        "c": COUNTS,
        "t": st.lists(COUNTS, max_size=5),
    },
)
PACKET_KEYS = st.sampled_from(list("rsiodclfetmz"))
ALL_WANTED = Wanted(**{spec.name: True for spec in fields(Wanted)})


@kept("text")
@given(
    (PACKETS | st.dictionaries(PACKET_KEYS, JSON)).map(json.dumps) | st.text(max_size=20),
)
def test_chunks(text: str) -> None:
    """A packet that is accepted, even from a client, can be answered."""
    try:
        packet = decode_packet(text.encode())
    except RequestError as error:
        check_sentence(error)
    else:
        assert comparable(decode_packet(encode_packet(packet))) == comparable(packet)
        if packet.start is not None and packet.error is None:
            try:
                answer = AnswerStream(ENCODER.vocabulary, packet.start).push(packet)
            except InvalidRequest as error:
                check_sentence(error)
                return
            if answer is not None:
                answer_arrays(answer, ALL_WANTED, ENCODER.vocabulary.token_bytes)


MESSAGE_KEYS = st.sampled_from(
    ["role", "content", "tool_calls", "type", "text", "function", "name"]
)
MESSAGES = st.recursive(
    SCALARS | st.just("text"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MESSAGE_KEYS, inner, max_size=4),
)


@pytest.mark.parametrize("encoder", [ENCODER, DEMO], ids=["any value", "demo model"])
@kept("messages", "tools")
@given(
    st.lists(st.dictionaries(MESSAGE_KEYS, MESSAGES, max_size=4), max_size=3) | MESSAGES,
    st.none() | MESSAGES,
)
def test_messages(encoder: PromptEncoder, messages: Any, tools: Any) -> None:
    """One template reads everything in the messages, the other is the demo model's."""
    prompt = MessagesPrompt(json.dumps(messages), None if tools is None else json.dumps(tools))
    try:
        ids = encoder.encode(encoder.render_chat(prompt))
    except RequestError as error:
        check_sentence(error)
    else:
        assert ids.size
