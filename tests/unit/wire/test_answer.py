"""Packets in, answers out: when there is something to say, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.request import Finished, FinishReason, PromptLogprobs, TokenLogprobs
from minisgl_backend.text.answer_stream import AnswerStream
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.acks import Verdict
from minisgl_backend.wire.answer import (
    LEAST_LOGPROB,
    NO_LOGPROBS,
    Answer,
    SampleAnswer,
    answer_arrays,
    logprobs_json,
    most_likely,
    prompt_logprobs_json,
)
from minisgl_backend.wire.generation import Wanted
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart, Times
from minisgl_backend.wire.parameters import OUTPUTS
from tests.fakes.packets import make_packet
from tests.fakes.vocabularies import byte_level, ids_of_bytes, token_text

VOCABULARY = Vocabulary.of(byte_level())
END = next(iter(VOCABULARY.special))
LENGTH = Finished(FinishReason.LENGTH)


def ids(text: str) -> list[int]:
    return ids_of_bytes(VOCABULARY, text)


def opened(**start: Any) -> AnswerStream:
    return AnswerStream(VOCABULARY, StreamStart(num_input_tokens=3, **start))


def packet(token_ids: list[int], **more: Any) -> Packet:
    return make_packet("", 5, 1, token_ids, **more)


def answered(stream: AnswerStream, text: str, **more: Any) -> Answer:
    answer = stream.push(packet(ids(text), **more))
    assert answer is not None
    return answer


def told(stream: AnswerStream, text: str, **more: Any) -> SampleAnswer:
    """What an answer says about its only sample."""
    return only(answered(stream, text, **more))


def only(answer: Answer) -> SampleAnswer:
    (sample,) = answer.samples
    return sample


def test_a_stream_answers_whenever_there_is_text() -> None:
    stream = opened(stream=True)
    assert told(stream, "ab").text == "ab"
    assert stream.push(packet(ids("é")[:1])) is None
    assert stream.push(packet([])) is None  # a probe
    rest = stream.push(packet(ids("é")[1:]))
    assert rest is not None
    later = only(rest)
    assert (later.text, len(later.token_ids), later.finish) == ("é", 2, None)
    last = told(stream, "", finish=LENGTH)
    assert (last.text, len(last.token_ids), last.finish) == ("", 0, FinishReason.LENGTH)
    assert stream.over is Verdict.STOP


def test_without_stream_there_is_one_answer() -> None:
    stream = opened(prompt_text="prompt:")
    assert stream.push(packet(ids("ab"), num_cached_tokens=2)) is None
    answer = answered(stream, "c", finish=LENGTH, times=Times(1, 2, 3, 4))
    assert only(answer).text == "prompt:abc"
    assert len(only(answer).token_ids) == 3
    assert answer.num_input_tokens == 3
    assert answer.num_cached_tokens == 2
    assert answer.times == Times(1, 2, 3, 4)


def test_a_stop_string_ends_the_answer_and_its_counts() -> None:
    stream = opened(stream=True, stop_strings=("xy",))
    assert told(stream, "ax").text == "a"
    logprobs = tuple(TokenLogprobs(-1.0, 1) for _ in range(3))
    answer = told(stream, "ybc", logprobs=logprobs, finish=LENGTH)
    assert (answer.text, answer.finish, answer.stop_reason) == ("", FinishReason.STOP, "xy")
    assert len(answer.token_ids) == 1
    assert len(answer.logprobs) == len(answer.token_ids) == 1
    assert answer.cumulative_logprob == -1.0
    assert stream.over is Verdict.STOP


def test_a_stop_token_counts_but_has_no_text() -> None:
    stream = opened(stream=True)
    finish = Finished(FinishReason.STOP, ids("c")[0])
    answer = told(stream, "abc", finish=finish, logprobs=(TokenLogprobs(-1.0, 1),) * 3)
    assert (answer.text, len(answer.token_ids)) == ("ab", 3)
    assert (answer.finish, answer.stop_reason) == (FinishReason.STOP, ids("c")[0])
    assert len(answer.logprobs) == 3


def test_a_stop_token_has_no_text_even_ahead_of_its_finish() -> None:
    stream = opened(stream=True, stop_token_ids=(ids("c")[0],))
    assert told(stream, "abc").text == "ab"
    answer = told(stream, "", finish=Finished(FinishReason.STOP, ids("c")[0]))
    assert (answer.text, len(answer.token_ids)) == ("", 0)


def test_a_finish_whose_stop_token_came_before_keeps_the_text() -> None:
    stream = opened(stream=True)
    answer = told(stream, "ab", finish=Finished(FinishReason.STOP, END))
    assert answer.text == "ab"


def test_logprobs_wait_for_the_answer_that_tells_them() -> None:
    stream = opened(stream=True)
    one = (TokenLogprobs(-0.5, 2),)
    assert stream.push(packet(ids("é")[:1], logprobs=one)) is None
    whole = stream.push(packet(ids("é")[1:], logprobs=one))
    assert whole is not None
    answer = only(whole)
    assert answer.token_ids == ids("é")
    assert answer.logprobs == [*one, *one]
    assert answer.cumulative_logprob == -1.0
    later = told(stream, "a", logprobs=one, finish=LENGTH)
    assert len(later.logprobs) == 1
    assert later.cumulative_logprob == -1.5


EVERYTHING = Wanted(**dict.fromkeys(Wanted.__slots__, True))


def test_nothing_but_text_unless_asked_for() -> None:
    arrays = answer_arrays(Answer(samples=[SampleAnswer(text="é", finish=FinishReason.STOP)]))
    assert list(arrays) == ["text_output"]
    assert arrays["text_output"].tolist() == ["é".encode()]
    arrays = answer_arrays(Answer(samples=[SampleAnswer(token_ids=[1, 2])]))
    assert list(arrays) == ["output_ids"]
    assert arrays["output_ids"].dtype == np.int32
    assert list(answer_arrays(Answer(samples=[SampleAnswer(text="")]), Wanted(logprobs=False))) == [
        "text_output"
    ]


def scored(text: str, num_alternatives: int = 0) -> PromptLogprobs:
    """Each token is the likeliest, followed by those with the first ids."""
    token_ids = np.array(ids(text), np.int32)
    size = (len(token_ids), num_alternatives)
    return PromptLogprobs(
        token_ids,
        np.full(len(token_ids), -0.25, np.float32),
        np.ones(len(token_ids), np.int32),
        np.tile(np.arange(num_alternatives, dtype=np.int32), (len(token_ids), 1)),
        np.full(size, -np.inf, np.float32),
    )


def test_a_prompts_logprobs_are_those_of_tokens_without_brackets() -> None:
    part = scored("é", 2)
    text = prompt_logprobs_json(part, VOCABULARY.token_bytes)
    assert f"[{text}]" == logprobs_json(ids("é"), part.tokens(), VOCABULARY.token_bytes)
    first, second = json.loads(f"[{text}]")
    assert list(first) == [str(ids("é")[0]), "0", "1"]
    half = {"decoded_token": "\ufffd", "bytes": ["é".encode()[0]]}
    assert first[str(ids("é")[0])] == {"logprob": -0.25, "rank": 1, **half}
    assert second["1"]["logprob"] == LEAST_LOGPROB and second["1"]["rank"] == 2
    broken = replace(part, logprobs=np.array([np.nan, np.inf], np.float32))
    for table in json.loads(f"[{prompt_logprobs_json(broken)}]"):
        assert next(iter(table.values())) == {"logprob": LEAST_LOGPROB, "rank": 1}


def test_a_prompts_logprobs_come_at_once_with_stream_and_at_the_end_without() -> None:
    wanted = Wanted(prompt_logprobs=True)
    stream = opened(stream=True, wanted=wanted)
    parts = [answered(stream, "", prompt_logprobs=scored("ab")), answered(stream, "cd")]
    parts.append(answered(stream, "", finish=LENGTH))
    assert [len(json.loads(prompt_output(answer))) for answer in parts] == [3, 0, 0]
    assert json.loads(prompt_output(parts[0]))[0] is None
    whole = opened(wanted=wanted)
    assert whole.push(packet([], prompt_logprobs=scored("a"))) is None
    assert whole.push(packet(ids("x"), prompt_logprobs=scored("b"))) is None
    answer = answered(whole, "y", finish=LENGTH)
    assert only(answer).text == "xy"
    first, *others = json.loads(prompt_output(answer))
    assert first is None
    assert [next(iter(table)) for table in others] == [str(token) for token in ids("ab")]


def test_a_prompt_of_one_token_has_one_null() -> None:
    answer = answered(opened(wanted=Wanted(prompt_logprobs=True)), "", finish=LENGTH)
    assert prompt_output(answer) == "[null]"


def prompt_output(answer: Answer) -> str:
    array = answer_arrays(answer, Wanted(prompt_logprobs=True))["prompt_logprobs"]
    text: str = array.item().decode()
    return text


def test_all_outputs_have_the_types_of_the_table() -> None:
    sample = SampleAnswer(
        text="ab",
        token_ids=[5, 6],
        finish=FinishReason.STOP,
        stop_reason='a"b',
        logprobs=[TokenLogprobs(-0.5, 1), TokenLogprobs(float("-inf"), 7)],
        cumulative_logprob=-2.5,
    )
    answer = Answer(
        samples=[sample],
        num_input_tokens=1,
        num_cached_tokens=3,
        times=Times(1, 2, 3, 4),
        prompt_logprobs=[NO_LOGPROBS, "{}"],
        embedding=np.array([0.6, 0.8, 0.0], np.float32),
    )
    arrays = answer_arrays(answer, EVERYTHING)
    types = {
        "TYPE_STRING": np.object_,
        "TYPE_UINT32": np.uint32,
        "TYPE_INT64": np.int64,
        "TYPE_FP32": np.float32,
    }
    tensors = [entry.tensor for entry in OUTPUTS]
    assert set(arrays) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        assert arrays[tensor.name].dtype == types[tensor.data_type]
        several = {"embedding": (3,)}
        of_one = (1,) if len(tensor.dims) == 1 else (1, 2)
        assert arrays[tensor.name].shape == several.get(tensor.name, of_one)
    plain = {name: array.tolist() for name, array in arrays.items() if array.shape == (1,)}
    del plain["logprobs"]
    assert plain == {
        "text_output": [b"ab"],
        "finish_reason": [b"stop"],
        "stop_reason": [b'"a\\"b"'],
        "num_input_tokens": [1],
        "num_output_tokens": [2],
        "num_cached_tokens": [3],
        "cumulative_logprob": [-2.5],
        "cum_log_probs": [-2.5],
        "arrival_time_ns": [1],
        "first_scheduled_time_ns": [2],
        "first_token_time_ns": [3],
        "last_token_time_ns": [4],
        "prompt_logprobs": [b"[null,{}]"],
    }
    assert arrays["output_log_probs"].tolist() == [[-0.5, LEAST_LOGPROB]]


def test_a_running_request_has_no_reasons_yet() -> None:
    arrays = answer_arrays(Answer(samples=[SampleAnswer(text="a")]), EVERYTHING)
    assert arrays["finish_reason"].tolist() == [b"None"]
    assert arrays["stop_reason"].tolist() == [b"null"]
    assert arrays["output_log_probs"].shape == (1, 0)
    assert arrays["logprobs"].tolist() == [b"[]"]
    assert "arrival_time_ns" not in arrays


def test_logprobs_as_json() -> None:
    logprobs = [
        TokenLogprobs(-0.5, 1, ((5, -0.5), (6, float("-inf")))),
        TokenLogprobs(-3.0, 4, ((5, -0.25),)),
    ]
    shown = json.loads(logprobs_json([5, END], logprobs, VOCABULARY.token_bytes))
    five = token_text(VOCABULARY, 5)
    assert shown == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": five},
            "6": {"logprob": LEAST_LOGPROB, "rank": 2, "decoded_token": token_text(VOCABULARY, 6)},
        },
        {
            str(END): {"logprob": -3.0, "rank": 4, "decoded_token": VOCABULARY.names[END]},
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": five},
        },
    ]
    without_text = json.loads(logprobs_json([5], [TokenLogprobs(float("nan"), 1)], None))
    assert without_text == [{"5": {"logprob": LEAST_LOGPROB, "rank": 1}}]


def of_samples(*deltas: SampleDelta, **more: Any) -> Packet:
    return Packet("", 5, 1, deltas, **more)


def test_samples_have_their_places_in_each_answer() -> None:
    stream = opened(stream=True, num_samples=3, n=3)
    answer = stream.push(of_samples(SampleDelta(ids("ab"), sample=1)))
    assert answer is not None
    arrays = answer_arrays(answer, Wanted(finish_reason=True, num_output_tokens=True))
    assert arrays["text_output"].tolist() == [b"", b"ab", b""]
    assert arrays["finish_reason"].tolist() == [b"None"] * 3
    assert arrays["num_output_tokens"].tolist() == [0, 2, 0]
    answer = stream.push(of_samples(SampleDelta(finish=LENGTH, sample=1), SampleDelta(ids("c"))))
    assert answer is not None and stream.over is None
    answer = stream.push(of_samples(SampleDelta(ids("d"), finish=LENGTH)))
    assert answer is not None and stream.over is None
    arrays = answer_arrays(answer, Wanted(finish_reason=True))
    assert arrays["text_output"].tolist() == [b"d", b"", b""]
    assert arrays["finish_reason"].tolist() == [b"length", b"length", b"None"], "ends stay"
    answer = stream.push(of_samples(SampleDelta(finish=LENGTH, sample=2), is_last=True))
    assert answer is not None and stream.over is Verdict.STOP


def test_a_stop_string_ends_its_sample() -> None:
    stream = opened(num_samples=2, n=2, stop_strings=("x",))
    assert stream.push(of_samples(SampleDelta(ids("axb")), SampleDelta(ids("c"), sample=1))) is None
    assert (stream.stopped, stream.over) == (0b1, None)
    assert stream.push(of_samples(SampleDelta(ids("bb")), SampleDelta(ids("d"), sample=1))) is None
    answer = stream.push(of_samples(SampleDelta(ids("x"), sample=1)))
    assert answer is not None and stream.over is Verdict.STOP
    assert [(one.text, one.stop_reason) for one in answer.samples] == [("a", "x"), ("cd", "x")]
    assert [len(one.token_ids) for one in answer.samples] == [2, 3]


def test_the_best_samples_come_the_likeliest_first() -> None:
    stream = opened(num_samples=4, n=2, prompt_text="> ")
    deltas = [
        SampleDelta(ids(text), [TokenLogprobs(logprob, 1)], LENGTH, sample)
        for sample, (text, logprob) in enumerate([("a", -3), ("b", -1), ("c", -1), ("d", -2)])
    ]
    answer = stream.push(of_samples(*deltas, is_last=True))
    assert answer is not None
    arrays = answer_arrays(answer, Wanted(log_probs=True, null_logprobs=True))
    assert arrays["text_output"].tolist() == [b"> b", b"> c"]
    assert arrays["cum_log_probs"].tolist() == [-1, -1]
    assert arrays["output_log_probs"].tolist() == [[-1], [-1]]
    assert arrays["logprobs"].tolist() == [b"null"] * 2


def test_a_packet_of_a_sample_that_there_is_not() -> None:
    with pytest.raises(InvalidRequest, match="no sample 1"):
        opened().push(of_samples(SampleDelta(ids("a"), sample=1)))


def test_rows_of_log_probabilities_are_filled_up() -> None:
    samples = [
        SampleAnswer(token_ids=[1] * count, logprobs=[TokenLogprobs(-1.0, 1)] * count)
        for count in (2, 0)
    ]
    arrays = answer_arrays(Answer(samples=samples), Wanted(log_probs=True))
    assert arrays["output_log_probs"].tolist() == [[-1, -1], [0, 0]]
    assert arrays["output_ids"].tolist() == [1, 1]


def test_whole_samples_come_before_those_that_a_deadline_cut() -> None:
    """A sample without tokens has the highest likelihood, but is no use."""

    def sample(finish: FinishReason, *logprobs: float) -> SampleAnswer:
        return SampleAnswer(
            token_ids=[7] * len(logprobs), finish=finish, cumulative_logprob=sum(logprobs)
        )

    none = sample(FinishReason.TIMEOUT)
    cut = sample(FinishReason.TIMEOUT, -0.5)
    shorter = sample(FinishReason.STOP, -3.0)
    longer = sample(FinishReason.LENGTH, -1.0, -1.0)
    assert most_likely([none, cut, shorter, longer], 3) == [longer, shorter, cut]
    assert most_likely([none, cut, cut], 2) == [cut, cut]
    assert most_likely([none, shorter], 2) == [none, shorter]
