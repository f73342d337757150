"""The order in which streams are sent, and how many packets are in flight."""

from __future__ import annotations

import threading
import time

from minisgl_backend.tritonserver.outbox import Outbox
from tests.waiting import PATIENCE_S


def test_urgent_items_go_first_and_each_lane_keeps_its_order() -> None:
    outbox: Outbox[str] = Outbox(2)
    for item in ("a", "b"):
        outbox.put(item, urgent=False)
    for item in ("c", "d"):
        outbox.put(item, urgent=True)
    assert [outbox.get() for _ in range(4)] == ["c", "d", "a", "b"]


def test_plain_items_wait_while_enough_packets_are_under_way() -> None:
    outbox: Outbox[str] = Outbox(1)
    outbox.sent(7)
    outbox.put("plain", urgent=False)
    outbox.put("urgent", urgent=True)
    assert outbox.get() == "urgent"

    got: list[str | None] = []
    getter = threading.Thread(target=lambda: got.append(outbox.get()))
    getter.start()
    outbox.arrived(8)  # another stream's, which has none on its way
    assert not got
    outbox.arrived(7)
    getter.join(PATIENCE_S)
    assert got == ["plain"]


def test_plain_items_wait_while_requests_wait() -> None:
    waiting = [True]
    outbox: Outbox[str] = Outbox(9, requests_wait=lambda: waiting[0], most_held_s=3600)
    outbox.put("plain", urgent=False)
    outbox.put("urgent", urgent=True)
    assert outbox.get() == "urgent"

    got: list[str | None] = []
    getter = threading.Thread(target=lambda: got.append(outbox.get()))
    getter.start()
    outbox.expire(time.monotonic())
    assert not got
    waiting[0] = False
    while getter.is_alive():  # the clock calls this again and again
        outbox.expire(time.monotonic())
    assert got == ["plain"]


def test_plain_items_do_not_wait_for_ever_for_requests() -> None:
    outbox: Outbox[str] = Outbox(9, requests_wait=lambda: True, most_held_s=0.0)
    outbox.put("plain", urgent=False)
    assert outbox.get() == "plain"


def test_a_packet_that_never_arrives_is_not_counted_for_ever() -> None:
    outbox: Outbox[str] = Outbox(1, patience_s=1.0)
    outbox.sent(7)
    outbox.put("plain", urgent=False)
    outbox.expire(time.monotonic())
    got: list[str | None] = []
    getter = threading.Thread(target=lambda: got.append(outbox.get()))
    getter.start()
    assert not got
    outbox.expire(time.monotonic() + 2.0)
    getter.join(PATIENCE_S)
    assert got == ["plain"]


def test_two_packets_of_one_stream_count_once() -> None:
    outbox: Outbox[str] = Outbox(2)
    outbox.sent(7)
    outbox.sent(7)
    outbox.put("plain", urgent=False)
    assert outbox.get() == "plain"


def test_close_ends_every_getter() -> None:
    outbox: Outbox[str] = Outbox(1)
    getters = [threading.Thread(target=outbox.get) for _ in range(3)]
    for getter in getters:
        getter.start()
    outbox.close(len(getters))
    for getter in getters:
        getter.join(PATIENCE_S)
        assert not getter.is_alive()
