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
from minisgl_backend.wire.packets import Packet, StreamStart, Verdict
from tests.fakes import pb_utils


def opened(*, reply_to: str = "/run/engine.sock", stream: bool = False) -> ResponseStream:
    interval_s = 0.0 if stream else float("inf")
    return ResponseStream(
        key=1,
        request_id=RequestId(1),
        responder=Responder(pb_utils.InferenceRequest({})),
        start=StreamStart(num_input_tokens=3, stream=stream),
        reply_to=reply_to,
        encode=lambda packet: None,
        window=Window(now_s=time.monotonic(), interval_s=interval_s),
        arrival_time_ns=0,
    )


def scored(num_tokens: int, num_alternatives: int = 0) -> PromptLogprobs:
    """Tokens 0, 1, 2, ..."""
    ids = np.arange(num_tokens, dtype=np.int32)
    shape = (num_tokens, num_alternatives)
    logprobs = np.zeros(num_tokens, np.float32)
    return PromptLogprobs(
        ids, logprobs, ids, np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    )


def taken(stream: ResponseStream) -> Packet:
    """The next packet, as a sender takes and sends it."""
    packet = stream.take()
    assert packet is not None
    if packet.terminal is None:
        assert not stream.release(packet.index)
    return packet


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_alternatives", [0, 20])
def test_a_long_prompts_logprobs_go_packet_by_packet_before_tokens_and_end(
    is_streamed: bool, num_alternatives: int
) -> None:
    stream = opened(stream=is_streamed)
    assert stream.put(scored(10_000, num_alternatives))
    assert not stream.is_urgent
    assert not stream.put(Generated(7))
    assert not stream.put(Finished(FinishReason.LENGTH))
    found: list[int] = []
    while True:
        packet = taken(stream)
        assert packet.prompt_logprobs is not None
        assert packet.prompt_logprobs.token_ids.size * (1 + num_alternatives) <= 4096
        found += packet.prompt_logprobs.token_ids.tolist()
        if packet.terminal is not None:
            break
        assert packet.token_ids == []
        ready, _ = stream.acknowledge(packet.index, Verdict.CONTINUE)
        assert ready
    assert packet.token_ids == [7]
    assert found == list(range(10_000))


def test_a_probe_overtakes_no_logprobs() -> None:
    stream = opened()
    assert stream.put(scored(5000))
    first = taken(stream)
    assert not stream.put(Finished(FinishReason.LENGTH))
    probe = taken(stream)
    assert probe.prompt_logprobs is None and probe.terminal is None
    stream.acknowledge(probe.index, Verdict.CONTINUE)
    last = taken(stream)
    assert first.prompt_logprobs is not None and last.prompt_logprobs is not None
    assert len(first.prompt_logprobs) + len(last.prompt_logprobs) == 5000
    assert last.terminal is not None


def test_a_direct_caller_who_is_answered_once_gets_all_at_once() -> None:
    stream = opened(reply_to="")
    assert not stream.put(scored(5000))
    assert not stream.put(scored(2))
    assert not stream.put(Generated(7))
    assert stream.put(Finished(FinishReason.LENGTH))
    packet = taken(stream)
    assert packet.prompt_logprobs is not None
    assert packet.prompt_logprobs.token_ids.tolist() == [*range(5000), 0, 1]
    assert packet.token_ids == [7] and packet.terminal is not None


@pytest.mark.parametrize("reply_to", ["", "socket"])
def test_an_embedding_goes_with_the_end(reply_to: str) -> None:
    stream, vector = opened(reply_to=reply_to), np.ones(3, np.float32)
    assert not stream.put(Embedded(vector))
    assert stream.put(Finished(FinishReason.LENGTH))
    packet = taken(stream)
    assert packet.embedding is vector and packet.terminal is not None


def test_a_failure_does_not_wait_for_logprobs() -> None:
    stream = opened()
    assert stream.put(scored(10_000))
    first = taken(stream)
    assert stream.put(Failed(EngineFailure("broken")))
    packet = taken(stream)
    assert packet.index == first.index + 1
    assert packet.prompt_logprobs is None
    assert isinstance(packet.terminal, Failed)


def test_a_sender_that_was_held_up_does_not_cost_the_stream() -> None:
    stream = opened(stream=True)
    assert stream.put(Generated(5))
    taken_s = time.monotonic()
    packet = stream.take()
    assert packet is not None and packet.token_ids == [5]
    acknowledged_s = time.monotonic()  # a packet of another stream, taken later, went through
    assert not stream.release(packet.index)
    now_s = taken_s + PROBE_AFTER_S / 2
    assert stream.tick(now_s, acknowledged_s, grace_s=0.0) is Duty.NOTHING


def test_the_last_token_is_in_the_packet_that_ends_the_request() -> None:
    """Whatever asks for a packet between the two events: a sender, the clock, the detokenizer."""
    stream = opened(stream=True)
    assert stream.put(Generated(5))
    first = stream.take()
    assert first is not None
    assert not stream.put(Generated(6))
    assert not stream.put(Generated(7, is_last=True))
    assert not stream.release(first.index)
    needs_sender, _ = stream.acknowledge(first.index, Verdict.CONTINUE)
    assert needs_sender
    second = stream.take()
    assert second is not None and second.token_ids == [6] and second.terminal is None
    assert not stream.put(Finished(FinishReason.LENGTH))
    assert stream.release(second.index)
    third = stream.take()
    assert third is not None and third.token_ids == [7]
    assert third.terminal == Finished(FinishReason.LENGTH)
