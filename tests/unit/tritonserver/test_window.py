"""When packets may be sent, by a clock of our own."""

from __future__ import annotations

from minisgl_backend.tritonserver.window import (
    GIVE_UP_AFTER_S,
    PROBE_AFTER_S,
    Acknowledged,
    Window,
)

GRACE_S = 0.3
NEVER = float("-inf")


def test_one_packet_at_a_time() -> None:
    window = Window(now_s=0.0)
    assert window.may_send_tokens(0.0)
    window.sent(0, 1.0, with_tokens=True)
    assert not window.may_send_tokens(2.0)
    assert window.acknowledged(0) == 1.0
    assert window.may_send_tokens(2.0)


def test_acknowledgements_are_cumulative_and_may_repeat() -> None:
    window = Window(now_s=0.0)
    for index in range(4):
        window.sent(index, float(index), with_tokens=False)
    assert window.acknowledged(1) == 1.0
    assert window.acknowledged(1) is None
    assert not window.is_open
    assert window.acknowledged(9) == 3.0
    assert window.is_open


def test_the_interval_holds_back_all_but_the_first() -> None:
    window = Window(now_s=0.0, interval_s=0.5)
    assert window.may_send_tokens(0.0)
    window.sent(0, 0.0, with_tokens=True)
    window.acknowledged(0)
    window.sent(1, 0.4, with_tokens=False)  # a probe does not count
    window.acknowledged(1)
    assert not window.may_send_tokens(0.49)
    assert window.may_send_tokens(0.5)


def test_tokens_that_wait_for_the_end() -> None:
    window = Window(now_s=0.0, interval_s=float("inf"))
    assert not window.may_send_tokens(1e9)


def test_probes_become_rarer_while_nothing_answers() -> None:
    window = Window(now_s=0.0)
    now_s, waits = 0.0, []
    for index in range(6):
        start = now_s
        while not window.probe_is_due(now_s):
            now_s += 0.125
        waits.append(now_s - start)
        window.sent(index, now_s, with_tokens=False)
    assert waits == [PROBE_AFTER_S, 0.5, 1.0, 2.0, 2.0, 2.0]
    window.acknowledged(5)
    assert window.probe_is_due(now_s + PROBE_AFTER_S)


def test_what_a_sender_was_held_up_with_is_not_overdue() -> None:
    window = Window(now_s=0.0)
    window.sent(0, 1.0, with_tokens=True)
    window.handed_over(0, 3.0)
    assert not window.is_overdue(3.1, 2.0, GRACE_S)  # for one taken later, handed over earlier
    assert not window.is_overdue(4.0, 2.9, GRACE_S)
    assert window.is_overdue(4.0, 3.5, GRACE_S)
    assert window.acknowledged(0) == 3.0
    window.handed_over(0, 5.0)  # its acknowledgement was faster than the sender
    assert window.is_open


def test_overdue_once_later_packets_are_acknowledged() -> None:
    window = Window(now_s=0.0)
    assert not window.is_overdue(100.0, 99.0, GRACE_S)  # nothing was sent
    window.sent(0, 1.0, with_tokens=True)
    assert not window.is_overdue(1.2, 1.1, GRACE_S)  # within the grace
    assert not window.is_overdue(2.0, 0.9, GRACE_S)  # the detokenizer is merely slow
    assert not window.is_overdue(2.0, 1.2, GRACE_S)  # one of another stream overtook it
    assert window.is_overdue(2.0, 1.4, GRACE_S)
    window.sent(1, 1.25, with_tokens=False)  # a probe: perhaps it gets through
    assert not window.is_overdue(2.0, 1.4, GRACE_S)
    assert window.is_overdue(2.0, 1.6, GRACE_S)
    assert not window.is_overdue(1.0 + GIVE_UP_AFTER_S - 0.1, NEVER, GRACE_S)
    assert window.is_overdue(1.0 + GIVE_UP_AFTER_S, NEVER, GRACE_S)


def test_another_lane_may_be_behind() -> None:
    """What a lane took proves that earlier packets on it are lost, but not those on others."""
    acknowledged = Acknowledged(num_lanes=2)
    window = Window(now_s=0.0)
    window.sent(0, 1.0, with_tokens=True)
    acknowledged.note(5, 1.4)
    assert window.is_overdue(2.0, acknowledged.newest_s(7), GRACE_S)
    assert not window.is_overdue(2.0, acknowledged.newest_s(4), GRACE_S)
    acknowledged.note(5, 2.2)
    assert not window.is_overdue(2.5, acknowledged.newest_s(4), GRACE_S)
    acknowledged.note(5, 2.4)  # no lane is that far behind
    assert window.is_overdue(2.5, acknowledged.newest_s(4), GRACE_S)
    acknowledged.note(5, 1.0)  # in any order
    assert window.is_overdue(2.5, acknowledged.newest_s(7), GRACE_S)


def test_no_packet_is_acknowledged_at_first() -> None:
    assert Acknowledged(num_lanes=3).newest_s(8) == NEVER
