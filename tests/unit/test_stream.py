"""The mailbox of one request, without threads."""

from __future__ import annotations

import time

import pytest

from minisgl_backend.request import Generated, RequestId
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.stream import Duty, Stream
from minisgl_backend.tritonserver.window import PROBE_AFTER_S, Window
from tests.fakes import pb_utils


@pytest.fixture
def stream() -> Stream:
    return Stream(
        key=1,
        request_id=RequestId(1),
        responder=Responder(pb_utils.InferenceRequest({})),
        encode=lambda outgoing: None,
        window=Window(now_s=time.monotonic()),
        acknowledged=True,
        arrival_time_ns=0,
    )


def test_a_sender_that_was_held_up_does_not_cost_the_stream(stream: Stream) -> None:
    assert stream.put(Generated(5))
    taken_s = time.monotonic()
    outgoing = stream.take()
    assert outgoing is not None and outgoing.token_ids == [5]
    acknowledged_s = time.monotonic()  # a chunk of another stream, taken later, went through
    assert not stream.release(outgoing.index)
    now_s = taken_s + PROBE_AFTER_S / 2
    assert stream.tick(now_s, acknowledged_s, grace_s=0.0) is Duty.NOTHING
