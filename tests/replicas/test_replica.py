"""What a replica tells its parent of requests that its engine does not take."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from minisgl_backend import replica
from minisgl_backend.errors import EngineLost, InvalidRequest, MiniSGLError, Overloaded
from minisgl_backend.replicas.gatherer import Happened
from minisgl_backend.replicas.messages import encode_request
from minisgl_backend.request import Failed, Request, RequestId, SamplingParams, Sink


class RefusingEngine:
    def __init__(self, error: MiniSGLError) -> None:
        self._error = error

    def submit_samples(self, samples: Sequence[Request], sinks: Sequence[Sink]) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "told"), [(Overloaded("down"), EngineLost), (InvalidRequest("wrong"), InvalidRequest)]
)
def test_only_an_engine_that_breaks_is_lost(error: MiniSGLError, told: type[MiniSGLError]) -> None:
    """For a lost engine the parent would wait for another process, and the request with it."""
    request = Request(
        id=RequestId(3), prompt=np.arange(4, dtype=np.int32), sampling=SamplingParams(max_tokens=2)
    )
    happened: list[Happened] = []
    engine: Any = RefusingEngine(error)
    with ThreadPoolExecutor(1) as orders:
        message = encode_request(request, [RequestId(3), RequestId(4)])
        replica._take(message, engine, happened.append, orders)
    found = []
    for each in happened:
        assert isinstance(each, tuple)
        request_id, event = each
        assert isinstance(event, Failed) and str(event.error) == str(error)
        found.append((request_id, type(event.error)))
    assert found == [(3, told), (4, told)]
