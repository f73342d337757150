"""What open requests are told of a step."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.request import (
    Event,
    Finished,
    FinishReason,
    Generated,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime.open_requests import OpenRequest, OpenRequests
from minisgl_backend.runtime.recorder import Recorder
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.token_buffer import TokenBuffer
from tests.fakes.executor import tokens_of

ENDS, GOES_ON = RequestId(7), RequestId(8)


@pytest.fixture
def told() -> dict[RequestId, list[Event]]:
    """The events of each request."""
    return {ENDS: [], GOES_ON: []}


@pytest.fixture
def requests(told: dict[RequestId, list[Event]]) -> OpenRequests:
    found = OpenRequests(
        recorder=Recorder(),
        on_admitted=lambda request: None,
        on_ended=lambda request, was_admitted: None,
        max_queue_time_s=None,
    )
    for request_id, events in told.items():
        request = Request(id=request_id, prompt=tokens_of([1]), sampling=SamplingParams())
        found.add(OpenRequest(request, events.append, arrived_s=0.0))
    return found


def result(logprobs: dict[int, TokenLogprobs] | None = None) -> StepResult:
    """A step that gives each request three tokens, in turn, and ends one."""
    return StepResult(
        request_ids=[ENDS, GOES_ON] * 3,
        token_ids=np.arange(10, 16, dtype=np.int32),
        logprobs=logprobs or {},
        ended={ENDS: Finished(FinishReason.LENGTH)},
    )


def test_only_the_last_of_several_tokens_is_marked_as_last(
    requests: OpenRequests, told: dict[RequestId, list[Event]]
) -> None:
    requests.deliver(result(), now_s=1.0)
    assert told == {
        ENDS: [Generated(10), Generated(12), Generated(14, is_last=True)],
        GOES_ON: [Generated(11), Generated(13), Generated(15)],
    }
    assert requests.num_tokens() == {ENDS: 3, GOES_ON: 3}


def test_each_of_several_tokens_has_its_logprobs(
    requests: OpenRequests, told: dict[RequestId, list[Event]]
) -> None:
    of_tokens = {index: TokenLogprobs(-float(index), 1) for index in (0, 2, 4)}
    requests.deliver(result(of_tokens), now_s=1.0)
    assert told == {
        ENDS: [
            Generated(10, of_tokens[0]),
            Generated(12, of_tokens[2]),
            Generated(14, of_tokens[4], is_last=True),
        ],
        GOES_ON: [Generated(11), Generated(13), Generated(15)],
    }


def test_several_common_tokens_go_to_a_buffer_but_not_those_of_an_end(
    requests: OpenRequests, told: dict[RequestId, list[Event]]
) -> None:
    buffers = {request_id: TokenBuffer(lambda: None) for request_id in told}
    for request_id, buffer in buffers.items():
        requests[request_id].buffer = buffer
    requests.deliver(result(), now_s=1.0)
    assert buffers[GOES_ON].take() == [11, 13, 15] and not told[GOES_ON]
    assert not buffers[ENDS].take()
    assert told[ENDS] == [Generated(10), Generated(12), Generated(14, is_last=True)]
