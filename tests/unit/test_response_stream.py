"""The stream of one request, without threads."""

from __future__ import annotations

import time

import pytest

from minisgl_backend.request import Generated, RequestId
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.response_stream import Duty, ResponseStream
from minisgl_backend.tritonserver.window import PROBE_AFTER_S, Window
from minisgl_backend.wire.packets import StreamStart
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
