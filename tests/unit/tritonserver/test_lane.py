"""Lanes: order, the end, and errors."""

from __future__ import annotations

import threading

import pytest

from minisgl_backend.tritonserver.lane import Lane
from tests.waiting import PATIENCE_S


def test_items_are_taken_in_order_and_all_before_the_end() -> None:
    goes_on = threading.Event()
    taken: list[int] = []

    def take(item: int) -> None:
        assert goes_on.wait(PATIENCE_S)
        taken.append(item)

    lane = Lane(take, name="lane")
    for item in range(5):
        lane.put(item)
    assert not taken and not lane.is_empty
    goes_on.set()
    lane.close()
    assert taken == list(range(5)) and lane.is_empty


def test_an_error_ends_one_item_alone(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[int] = []

    def take(item: int) -> None:
        taken.append(1 // item)

    lane = Lane(take, name="lane 3")
    for item in (0, 1):
        lane.put(item)
    lane.close()
    assert taken == [1]
    assert "lane 3: an item could not be taken" in caplog.text
