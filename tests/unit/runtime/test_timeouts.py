"""Deadlines and waiting limits: each request once, in order, and nothing kept of the others."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.request import Request, RequestId, SamplingParams
from minisgl_backend.runtime.timeouts import Timeouts


def request(number: int, deadline_s: float | None = None) -> Request:
    prompt = np.array([1], dtype=np.int32)
    sampling = SamplingParams(max_tokens=1)
    return Request(id=RequestId(number), prompt=prompt, sampling=sampling, deadline_s=deadline_s)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_each_open_request_is_overdue_once(requests: list[tuple[int, bool]]) -> None:
    timeouts = Timeouts(None)
    for number, (deadline_s, _) in enumerate(requests):
        timeouts.add(request(number, deadline_s), 0.0)
    for number, (_, ends) in enumerate(requests):
        if ends:
            timeouts.ended(RequestId(number))
    for now_s in range(11):
        due = [n for n, (at_s, ends) in enumerate(requests) if at_s == now_s and not ends]
        assert list(timeouts.overdue(now_s)) == due
    assert not list(timeouts.stale(1e9))


def test_who_waits_for_too_long() -> None:
    timeouts = Timeouts(5.0)
    for number in range(4):
        timeouts.add(request(number), float(number))
    timeouts.begun(RequestId(0))
    timeouts.ended(RequestId(2))
    assert list(timeouts.stale(5.9)) == []
    assert list(timeouts.stale(6.0)) == [1]
    assert list(timeouts.stale(100.0)) == [3]
    assert list(timeouts.stale(100.0)) == []


def test_requests_that_ended_take_no_memory() -> None:
    """Neither does one old request keep the entries of later ones that have ended."""
    timeouts = Timeouts(1e6)
    timeouts.add(request(0, 1e9), 0.0)

    def kept() -> int:
        parts: list[Any] = list(vars(timeouts).values())
        return sum(sys.getsizeof(part) for part in parts)

    sizes = []
    for number in range(1, 20_000):
        timeouts.add(request(number, 1e9 - number), 0.0)
        timeouts.ended(RequestId(number))
        sizes.append(kept())
    assert max(sizes[-10_000:]) <= max(sizes[:1000])
    assert list(timeouts.overdue(2e9)) == [0]
