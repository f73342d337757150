"""Records and packets: what goes out comes back, and what is forged or broken is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from minisgl_backend.errors import EngineFailure, InvalidRequest, Overloaded, RequestError
from minisgl_backend.limits import Limits
from minisgl_backend.request import (
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.wire.generation import (
    NOTHING,
    Generation,
    Stopped,
    StopRequest,
    TextPrompt,
    TokenPrompt,
    Wanted,
)
from minisgl_backend.wire.packets import (
    Packet,
    SampleDelta,
    StreamStart,
    Times,
    decode_packet,
    encode_packet,
)
from minisgl_backend.wire.record import decode_record, encode_record
from tests.fakes.packets import comparable, make_packet

LIMITS = Limits()
IDS = np.array([3, 4], dtype=np.int32)
PLAIN = Generation(prompt=TextPrompt("hi"), arrival_time_ns=5)
FULL = Generation(
    prompt=TextPrompt("hi"),
    arrival_time_ns=7,
    sampling=SamplingParams(
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        seed=7,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logit_bias=((3, -1.5),),
        num_logprobs=3,
        num_prompt_logprobs=2,
    ),
    fit_max_tokens=True,
    seed=7,
    stop_strings=("\n", "日"),
    exclude_input_in_output=False,
    skip_special_tokens=False,
    priority=2,
    timeout_ms=100,
    cache_salt="s",
    min_chunk_interval_ms=0,
    wanted=Wanted(finish_reason=True, perf_metrics=True, logprobs=True, prompt_logprobs=True),
    prompt_text="hi",
)


GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}', begins_after=7),
    Grammar(GrammarKind.JSON_OBJECT, "", begins_after=0, opened_by=2**31 - 1),
    Grammar(GrammarKind.REGEX, "a", channels=True),
    Grammar(GrammarKind.REGEX, "日+"),
    Grammar(GrammarKind.CHOICE, '["a", "\\u65e5"]'),
    Grammar(GrammarKind.GRAMMAR, 'start: "a"'),
    Grammar(GrammarKind.STRUCTURAL_TAG, '{"structures": [], "triggers": []}'),
]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_record_carries_the_grammar(grammar: Grammar) -> None:
    asked = replace(PLAIN, sampling=SamplingParams(grammar=grammar))
    decoded = decode_record(encode_record(asked), IDS, LIMITS)
    assert isinstance(decoded, Generation)
    found = decoded.sampling.grammar
    assert found is not None
    if grammar.kind is GrammarKind.CHOICE:
        assert json.loads(found.source) == json.loads(grammar.source)
        found = replace(found, source=grammar.source)
    assert found == grammar


SEVERAL = replace(PLAIN, n=2, best_of=5, sampling=SamplingParams(num_logprobs=0))


@pytest.mark.parametrize("generation", [PLAIN, FULL, replace(PLAIN, stream=True), SEVERAL])
def test_a_record_carries_the_generation(generation: Generation) -> None:
    decoded = decode_record(encode_record(generation), IDS, LIMITS)
    assert isinstance(decoded, Generation)
    assert isinstance(decoded.prompt, TokenPrompt)
    assert decoded.prompt.ids.tolist() == [3, 4]
    # Generations hold arrays and are not compared as such.
    for name in Generation.__slots__:
        if name != "prompt":
            assert getattr(decoded, name) == getattr(generation, name), name


def test_defaults_do_not_travel() -> None:
    text = encode_record(PLAIN)
    assert text == '{"v":1,"arrival":5,"given":{}}'
    decoded = decode_record(text, IDS, LIMITS)
    assert isinstance(decoded, Generation)
    assert decoded.prompt_text is None


@pytest.mark.parametrize(
    ("wanted", "num_logprobs"),
    [
        (Wanted(cumulative_logprob=True), 0),
        (Wanted(log_probs=True), 0),
        (Wanted(logprobs=True), 2),
        (Wanted(null_logprobs=True), None),
        (Wanted(null_logprobs=True, log_probs=True), 0),
    ],
)
def test_log_probabilities_stay_what_was_asked_for(
    wanted: Wanted, num_logprobs: int | None
) -> None:
    sampling = SamplingParams(num_logprobs=num_logprobs)
    asked = replace(PLAIN, sampling=sampling, wanted=wanted)
    decoded = decode_record(encode_record(asked), IDS, LIMITS)
    assert isinstance(decoded, Generation)
    assert decoded.wanted == asked.wanted
    assert decoded.sampling == asked.sampling


def test_a_stop_request_has_a_record_too() -> None:
    request = StopRequest(wanted=Wanted(finish_reason=True))
    text = encode_record(request)
    assert decode_record(text, np.array([], dtype=np.int32), LIMITS) == request


def test_a_stopped_request_has_a_record_too() -> None:
    request = Stopped(wanted=Wanted(finish_reason=True, null_logprobs=True), n=3)
    text = encode_record(request)
    assert decode_record(text, np.array([], dtype=np.int32), LIMITS) == request


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{}",
        '{"v": 2, "arrival": 5, "given": {}}',
        '{"v": 1, "arrival": 5.5, "given": {}}',
        '{"v": 1, "arrival": -5, "given": {}}',
        '{"v": 1, "arrival": 9223372036854775808, "given": {}}',
        '{"v": 1, "arrival": 5, "given": []}',
        '{"v": 1, "arrival": 5, "given": {}, "prompt": 5}',
        '{"v": 1, "arrival": 5, "given": {}, "stopped": 1}',
        '{"v": 1, "arrival": 5, "given": {"temperature": NaN}}',
        '{"v": 1, "arrival": 5, "given": {"temperature": -1}}',
        '{"v": 1, "arrival": 5, "given": {"max_tokens": 0}}',
        '{"v": 1, "arrival": 5, "given": {"max_new_tokens": 5}}',
        '{"v": 1, "arrival": 5, "given": {"text_input": "x"}}',
        '{"v": 1, "arrival": 5, "given": {"unheard": 1}}',
        '{"v": 1, "arrival": 5, "given": {"num_logprobs": 21}}',
        '{"v": 1, "arrival": 5, "given": {"structured_outputs": "{}"}}',
        *(
            '{"v": 1, "arrival": 5, "given": {"structured_outputs": {"regex": "a"}}, "thinking": '
            f"{thinking}}}"
            for thinking in ("5", "[]", "[null, 5]", "[5, true]", "[5, 6, 7]", "[-1, null]")
        ),
        '{"v": 1, "arrival": 5, "given": {}, "channels": 1}',
    ],
)
def test_a_forged_record_is_refused(record: str) -> None:
    with pytest.raises(RequestError):
        decode_record(record, IDS, LIMITS)


@pytest.mark.parametrize("ids", [np.array([-1], np.int64), np.array([], np.int32)])
def test_a_record_needs_token_ids(ids: npt.NDArray[Any]) -> None:
    with pytest.raises(InvalidRequest):
        decode_record(encode_record(PLAIN), ids, LIMITS)


COMMON = make_packet("/run/x/engine.sock", 2**64 - 1, 7, [5, 6])
FIRST = make_packet(
    "/run/x/engine.sock",
    5,
    0,
    [3, 7],
    start=StreamStart(
        num_input_tokens=9,
        stream=True,
        wanted=Wanted(finish_reason=True, logprobs=True),
        stop_strings=("\n", "日本"),
        min_tokens=2,
        stop_token_ids=(5, 6),
        prompt_text="é",
        skip_special_tokens=False,
    ),
    num_cached_tokens=4,
    logprobs=(TokenLogprobs(-0.5, 1, ((3, -0.5), (4, -1.25))), TokenLogprobs(-2.0, 9)),
    times=Times(1, 2, 3, 4),
)
PACKETS = [
    COMMON,
    FIRST,
    replace(COMMON, start=StreamStart(num_input_tokens=1)),
    make_packet("", 5, 7, [5, 6], finish=Finished(FinishReason.LENGTH)),
    make_packet("", 5, 7, [5, 6], finish=Finished(FinishReason.STOP, 11)),
    make_packet("", 5, 7, [5, 6], error=EngineFailure("no")),
    make_packet("", 5, 7, [5, 6], error=Overloaded("later")),
    replace(COMMON, num_cached_tokens=0),
    replace(COMMON, deltas=[]),
    replace(FIRST, deltas=[*FIRST.deltas, SampleDelta([5], sample=2)]),
    replace(FIRST, deltas=[SampleDelta([5], (), Finished(FinishReason.LENGTH), 63)], is_last=True),
    replace(FIRST, start=StreamStart(num_input_tokens=1, num_samples=5, n=2)),
]


@pytest.mark.parametrize("packet", PACKETS)
def test_a_packet_comes_back(packet: Packet) -> None:
    assert comparable(decode_packet(encode_packet(packet))) == comparable(packet)


def test_a_common_packet_is_small() -> None:
    assert (
        encode_packet(COMMON)
        == b'{"r":"/run/x/engine.sock","s":18446744073709551615,"i":7,"o":[5,6]}'
    )


def test_nothing_wanted_is_one_object() -> None:
    """So the code for the most common answer can compare by identity."""
    start = decode_packet(
        encode_packet(replace(FIRST, start=StreamStart(num_input_tokens=1)))
    ).start
    assert start is not None
    assert start.wanted is NOTHING


NO_IDS = np.empty((2, 0), np.int32)
NO_LOGPROBS = np.empty((2, 0), np.float32)
SCORED = PromptLogprobs(
    token_ids=np.array([5, 2**31 - 1], np.int32),
    logprobs=np.array([-0.1, -np.inf], np.float32),
    ranks=np.array([1, 300], np.int32),
    alternative_ids=np.array([[5, 6, 7], [8, 9, 10]], np.int32),
    alternatives=np.array([[-0.1, -2, -3], [-0.5, -1.5, -np.inf]], np.float32),
)


@pytest.mark.parametrize(
    "scored",
    [SCORED, SCORED.part(1, 2), replace(SCORED, alternative_ids=NO_IDS, alternatives=NO_LOGPROBS)],
)
def test_log_probabilities_of_a_prompt_come_back(scored: PromptLogprobs) -> None:
    back = decode_packet(encode_packet(replace(FIRST, prompt_logprobs=scored))).prompt_logprobs
    assert back is not None
    for name in PromptLogprobs.__slots__:
        sent, came = getattr(scored, name), getattr(back, name)
        assert came.dtype == sent.dtype
        assert came.shape == sent.shape
        assert np.array_equal(came, sent)


def test_an_embedding_comes_back_bit_by_bit() -> None:
    vector = np.array([0.6, -0.8, 1e-30], np.float32)
    back = decode_packet(encode_packet(replace(FIRST, embedding=vector))).embedding
    assert back is not None
    assert back.dtype == np.float32 and np.array_equal(back, vector)


def broken(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode_packet(FIRST)) | changes).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1,2,3]",
        b'"abc"',
        b"5",
        b"\xff",
        b"[" * 10**5,
        b'{"r":"x","s":5,"i":"0"}',
        b'{"r":"x","s":5,"i":true}',
        b'{"r":"x","s":"5","i":0}',
        b'{"r":"\\ud800","s":5,"i":0}',
        broken(v=[0.5]),
        broken(v="AAA="),
        broken(v="no base64"),
        broken(p=[]),
        broken(p=[0]),
        broken(p=[0, 5]),
        broken(p=[0, "AAAA"]),
        broken(p=[0, "AAAAAA=="]),
        broken(p=[-1, "AAAAAAAAAAAAAAAA"]),
        broken(p=[0, "no base64"]),
        broken(s=-1),
        broken(s=2**64),
        broken(i=-1),
        broken(i=2**32),
        broken(d=[]),
        broken(d={}),
        broken(d={"n": 1, "wanted": ["all"]}),
        broken(d={"n": 1, "stop": [5]}),
        broken(d={"n": -1}),
        broken(d={"n": 2**32}),
        broken(c="4"),
        broken(c=-1),
        broken(c=2**32),
        broken(o=5),
        broken(o=[5, "6"]),
        broken(o=[2**63]),
        b'{"r":"x","s":5,"i":0,"o":[true]}',
        broken(l=[[-0.5, 1, []]]),
        broken(l=[[1]] * 2),
        broken(l=[["x", 1, []]] * 2),
        broken(l=[[10**400, 1, []]] * 2),
        broken(l=[[float("nan"), 1, []]] * 2),
        broken(l=[[-0.5, 1, [[3, float("inf")]]]] * 2),
        broken(f=["bored"]),
        broken(f=[]),
        broken(f=["stop", "5"]),
        broken(e=["INTERNAL"]),
        broken(m=5),
        broken(m=[{}]),
        broken(m=[{"n": 0, "o": [5]}]),
        broken(m=[{"n": 64, "o": [5]}]),
        broken(m=[{"n": 1, "o": [5]}, {"n": 1, "o": [6]}]),
        broken(m=[{"n": 1, "l": [[-0.5, 1, []]]}]),
        broken(d={"n": 1, "samples": [65, 1]}),
        broken(d={"n": 1, "samples": [2, 3]}),
        broken(d={"n": 1, "samples": [1]}),
        broken(t=[1, 2, 3, 4, 5]),
        broken(t=["1"]),
        broken(t=[1, 2, 3, 2**63]),
    ],
)
def test_a_broken_packet_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="chunk is not one that llm_engine sends"):
        decode_packet(text)
