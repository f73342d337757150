"""The stream of one request, without threads."""

from __future__ import annotations

import time

import numpy as np
import pytest

from minisgl_backend.errors import EngineFailure
from minisgl_backend.request import (
    Embedded,
    Failed,
    Finished,
    FinishReason,
    Generated,
    PromptLogprobs,
    RequestId,
)
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.response_stream import Duty, ResponseStream
from minisgl_backend.tritonserver.window import PROBE_AFTER_S, Window
from minisgl_backend.wire.acks import Ack, Verdict
from minisgl_backend.wire.generation import NOTHING, Wanted
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart
from tests.fakes import pb_utils
from tests.fakes.packets import finish_of, token_ids_of


def opened(
    *,
    reply_to: str = "/run/engine.sock",
    stream: bool = False,
    n: int = 1,
    wanted: Wanted = NOTHING,
) -> ResponseStream:
    interval_s = 0.0 if stream else float("inf")
    return ResponseStream(
        key=1,
        sample_ids=[RequestId(1 + sample) for sample in range(n)],
        responder=Responder(pb_utils.InferenceRequest({})),
        start=StreamStart(num_input_tokens=3, stream=stream, wanted=wanted, num_samples=n, n=n),
        reply_to=reply_to,
        encode=lambda packet: None,
        window=Window(now_s=time.monotonic(), interval_s=interval_s),
        arrival_time_ns=0,
    )


def scored(num_tokens: int, num_alternatives: int = 0) -> PromptLogprobs:
    """Scores of the tokens 0, 1, 2, ..."""
    ids = np.arange(num_tokens, dtype=np.int32)
    shape = (num_tokens, num_alternatives)
    logprobs = np.zeros(num_tokens, np.float32)
    return PromptLogprobs(
        ids, logprobs, ids, np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    )


def taken(stream: ResponseStream) -> Packet:
    """The next packet, taken and sent as by a sender."""
    packet = stream.take()
    assert packet is not None
    if not packet.is_last:
        assert not stream.release(packet.index)
    return packet


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_alternatives", [0, 20])
def test_a_long_prompts_logprobs_go_packet_by_packet_before_tokens_and_end(
    is_streamed: bool, num_alternatives: int
) -> None:
    stream = opened(stream=is_streamed)
    assert stream.put(0, scored(10_000, num_alternatives))
    assert not stream.is_urgent
    assert not stream.put(0, Generated(7))
    assert not stream.put(0, Finished(FinishReason.LENGTH))
    found: list[int] = []
    while True:
        packet = taken(stream)
        assert packet.prompt_logprobs is not None
        assert packet.prompt_logprobs.token_ids.size * (1 + num_alternatives) <= 4096
        found += packet.prompt_logprobs.token_ids.tolist()
        if packet.is_last:
            break
        assert token_ids_of(packet) == []
        ready, _ = stream.acknowledge(Ack(1, packet.index, Verdict.CONTINUE))
        assert ready
    assert token_ids_of(packet) == [7]
    assert found == list(range(10_000))


def test_a_probe_overtakes_no_logprobs() -> None:
    stream = opened()
    assert stream.put(0, scored(5000))
    first = taken(stream)
    assert not stream.put(0, Finished(FinishReason.LENGTH))
    probe = taken(stream)
    assert probe.prompt_logprobs is None and not probe.is_last
    stream.acknowledge(Ack(1, probe.index, Verdict.CONTINUE))
    last = taken(stream)
    assert first.prompt_logprobs is not None and last.prompt_logprobs is not None
    assert len(first.prompt_logprobs) + len(last.prompt_logprobs) == 5000
    assert last.is_last


def test_a_direct_caller_who_is_answered_once_gets_all_at_once() -> None:
    stream = opened(reply_to="")
    assert not stream.put(0, scored(5000))
    assert not stream.put(0, scored(2))
    assert not stream.put(0, Generated(7))
    assert stream.put(0, Finished(FinishReason.LENGTH))
    packet = taken(stream)
    assert packet.prompt_logprobs is not None
    assert packet.prompt_logprobs.token_ids.tolist() == [*range(5000), 0, 1]
    assert token_ids_of(packet) == [7] and packet.is_last


@pytest.mark.parametrize("reply_to", ["", "socket"])
def test_an_embedding_goes_with_the_end(reply_to: str) -> None:
    stream, vector = opened(reply_to=reply_to), np.ones(3, np.float32)
    assert not stream.put(0, Embedded(vector))
    assert stream.put(0, Finished(FinishReason.LENGTH))
    packet = taken(stream)
    assert packet.embedding is vector and packet.is_last


def test_a_failure_does_not_wait_for_logprobs() -> None:
    stream = opened()
    assert stream.put(0, scored(10_000))
    first = taken(stream)
    assert stream.put(0, Failed(EngineFailure("broken")))
    packet = taken(stream)
    assert packet.index == first.index + 1
    assert packet.prompt_logprobs is None
    assert isinstance(packet.error, EngineFailure)


def test_a_sender_that_was_held_up_does_not_cost_the_stream() -> None:
    stream = opened(stream=True)
    assert stream.put(0, Generated(5))
    taken_s = time.monotonic()
    packet = stream.take()
    assert packet is not None and token_ids_of(packet) == [5]
    acknowledged_s = time.monotonic()  # a packet of another stream, taken later, went through
    assert not stream.release(packet.index)
    now_s = taken_s + PROBE_AFTER_S / 2
    assert stream.tick(now_s, acknowledged_s, grace_s=0.0) is Duty.NOTHING


def test_a_buffered_token_calls_for_a_sender_only_if_the_stream_waits_for_it() -> None:
    stream = opened(stream=True)
    calls: list[None] = []
    buffers = stream.buffers(lambda: calls.append(None))
    assert buffers is not None
    (buffer,) = buffers

    def push(token_id: int) -> None:
        """Push a token as the engine does."""
        buffer.tokens.append(token_id)
        if buffer.is_awaited:
            buffer.wake()

    push(5)
    assert len(calls) == 1
    push(6)
    assert len(calls) == 1, "a sender has the stream"
    first = stream.take()
    assert first is not None and token_ids_of(first) == [5, 6]
    push(7)
    assert not stream.release(first.index), "the packet is not acknowledged"
    push(8)
    assert len(calls) == 1
    assert stream.acknowledge(Ack(1, first.index, Verdict.CONTINUE))[0]
    second = taken(stream)
    assert token_ids_of(second) == [7, 8]
    assert not stream.acknowledge(Ack(1, second.index, Verdict.CONTINUE))[0]
    push(9)
    assert len(calls) == 2
    assert token_ids_of(taken(stream)) == [9]


def test_buffered_tokens_are_before_the_last_one_and_none_comes_after_a_stop_string() -> None:
    stream = opened(stream=True, n=2)
    buffers = stream.buffers(lambda: None)
    assert buffers is not None
    assert stream.put(0, Generated(5))
    first = taken(stream)
    buffers[0].tokens.append(6)
    buffers[1].tokens.append(7)
    assert stream.acknowledge(Ack(1, first.index, Verdict.CONTINUE, stopped=0b1))[0]
    buffers[0].tokens.append(8)  # the engine does not know yet
    assert not stream.put(1, Generated(9, is_last=True))
    assert not stream.put(1, Finished(FinishReason.LENGTH))
    last = taken(stream)
    assert last.deltas == [SampleDelta([7, 9], [], Finished(FinishReason.LENGTH), sample=1)]
    assert last.is_last


def test_a_stream_that_tells_times_has_no_buffers() -> None:
    """The times of its first and last token are those of the events."""
    assert opened(wanted=Wanted(perf_metrics=True)).buffers(lambda: None) is None


def test_the_last_token_is_in_the_packet_that_ends_the_request() -> None:
    """Whoever asks for a packet between the two events: a sender, the clock or the detokenizer."""
    stream = opened(stream=True)
    assert stream.put(0, Generated(5))
    first = stream.take()
    assert first is not None
    assert not stream.put(0, Generated(6))
    assert not stream.put(0, Generated(7, is_last=True))
    assert not stream.release(first.index)
    needs_sender, _ = stream.acknowledge(Ack(1, first.index, Verdict.CONTINUE))
    assert needs_sender
    second = stream.take()
    assert second is not None and token_ids_of(second) == [6] and not second.is_last
    assert not stream.put(0, Finished(FinishReason.LENGTH))
    assert stream.release(second.index)
    third = stream.take()
    assert third is not None and token_ids_of(third) == [7]
    assert finish_of(third) == Finished(FinishReason.LENGTH)


def test_samples_share_packets_and_the_last_to_end_ends_the_stream() -> None:
    stream = opened(stream=True, n=3)
    assert stream.put(0, Generated(5))
    first = taken(stream)
    assert first.deltas == [SampleDelta([5], [])]
    assert not stream.put(2, Generated(7))
    assert not stream.put(1, Generated(6, is_last=True))
    assert not stream.put(1, Finished(FinishReason.LENGTH)), "not before the acknowledgement"
    ready, _ = stream.acknowledge(Ack(1, first.index, Verdict.CONTINUE))
    assert ready
    second = taken(stream)
    assert [(one.sample, one.token_ids, one.finish) for one in second.deltas] == [
        (1, [6], Finished(FinishReason.LENGTH)),
        (2, [7], None),
    ]
    assert not second.is_last
    assert not stream.put(0, Finished(FinishReason.CANCELLED))
    assert stream.put(2, Finished(FinishReason.STOP, 9))
    last = taken(stream)
    assert last.is_last and last.error is None
    assert [one.sample for one in last.deltas] == [0, 2]


def test_a_sample_that_a_stop_string_ended_sends_nothing_more() -> None:
    stream = opened(stream=True, n=2)
    assert stream.put(0, Generated(5))
    first = taken(stream)
    assert not stream.put(0, Generated(6))
    assert not stream.put(1, Generated(7))
    ready, _ = stream.acknowledge(Ack(1, first.index, Verdict.CONTINUE, stopped=0b1))
    assert ready
    assert not stream.put(0, Generated(8))
    assert not stream.put(0, Finished(FinishReason.STOP))
    second = taken(stream)
    assert second.deltas == [SampleDelta([7], [], sample=1)]
    assert stream.put(1, Finished(FinishReason.LENGTH)), "the last that was running"
    assert taken(stream).is_last


def test_a_stop_string_in_the_last_running_sample_ends_the_stream() -> None:
    stream = opened(stream=True, n=2)
    assert stream.put(0, Generated(5))
    first = taken(stream)
    assert not stream.put(1, Finished(FinishReason.LENGTH))
    ready, _ = stream.acknowledge(Ack(1, first.index, Verdict.CONTINUE, stopped=0b1))
    assert ready
    last = taken(stream)
    assert last.is_last
    assert last.deltas == [SampleDelta([], [], Finished(FinishReason.LENGTH), sample=1)]


def test_one_failed_sample_fails_the_stream() -> None:
    stream = opened(n=3)
    assert not stream.put(0, Generated(5))
    assert stream.put(1, Failed(EngineFailure("broken")))
    packet = taken(stream)
    assert packet.is_last and str(packet.error) == "broken"
    assert not stream.put(0, Finished(FinishReason.CANCELLED)), "it has ended already"
