"""The stream of one request, without threads."""

from __future__ import annotations

import time

import pytest

from minisgl_backend.request import Finished, FinishReason, Generated, RequestId
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.response_stream import Duty, ResponseStream
from minisgl_backend.tritonserver.window import PROBE_AFTER_S, Window
from minisgl_backend.wire.packets import StreamStart, Verdict
from tests.fakes import pb_utils


@pytest.fixture
def stream() -> ResponseStream:
    return ResponseStream(
        key=1,
        request_id=RequestId(1),
        responder=Responder(pb_utils.InferenceRequest({})),
        start=StreamStart(num_input_tokens=3),
        reply_to="/run/engine.sock",
        encode=lambda packet: None,
        window=Window(now_s=time.monotonic()),
        arrival_time_ns=0,
    )


def test_a_sender_that_was_held_up_does_not_cost_the_stream(stream: ResponseStream) -> None:
    assert stream.put(Generated(5))
    taken_s = time.monotonic()
    packet = stream.take()
    assert packet is not None and packet.token_ids == [5]
    acknowledged_s = time.monotonic()  # a packet of another stream, taken later, went through
    assert not stream.release(packet.index)
    now_s = taken_s + PROBE_AFTER_S / 2
    assert stream.tick(now_s, acknowledged_s, grace_s=0.0) is Duty.NOTHING


def test_the_last_token_is_in_the_packet_that_ends_the_request(stream: ResponseStream) -> None:
    """Whatever asks for a packet between the two events: a sender, the clock, the detokenizer."""
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
