"""How a gateway chooses one of several servers."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from minisgl_gateway.balance import BOUND, Balance

NAMES = [f"server-{number}:8001" for number in range(5)]


def key(number: int) -> bytes:
    return f"key {number}".encode()


def owners(balance: Balance) -> list[int]:
    """Where each of 2000 keys goes while nothing is open."""
    found = []
    for each in range(2000):
        found.append(balance.choose(key(each)))
        balance.ended(found[-1])
    return found


def test_keys_are_spread_and_stay() -> None:
    first = owners(Balance(NAMES))
    assert first == owners(Balance(NAMES))
    counts = Counter(first)
    assert min(counts.values()) > 0.6 * 2000 / len(NAMES)


def test_one_server_more_moves_only_its_own_share() -> None:
    before, after = owners(Balance(NAMES[:4])), owners(Balance(NAMES))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {4}
    assert len(moved) < 0.35 * len(before)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200))
def test_loads_are_bounded(steps: list[tuple[int, bool]]) -> None:
    """Even if nearly all requests have one key."""
    balance = Balance(NAMES)
    opened: list[int] = []
    for which, begins in steps:
        if begins or not opened:
            chosen = balance.choose(key(which))
            opened.append(chosen)
            assert balance.num_open(chosen) <= math.ceil(BOUND * len(opened) / len(NAMES))
        else:
            balance.ended(opened.pop(which % len(opened)))
    assert sum(map(balance.num_open, range(len(NAMES)))) == len(opened)


def test_a_failing_server_is_ejected_until_a_probe_succeeds() -> None:
    balance = Balance(NAMES)
    victim = balance.choose(key(1))
    for _ in range(2):
        balance.failed(victim, 10.0)
    assert not balance.is_ejected(victim)
    balance.failed(victim, 10.0)
    balance.worked(victim)  # a request from before
    assert balance.is_ejected(victim)
    assert balance.choose(key(1)) != victim
    assert balance.due_probes(10.9) == []
    assert balance.due_probes(11.0) == [victim]
    assert balance.due_probes(99.0) == [], "one runs"
    balance.worked(victim)  # another one from before
    assert balance.is_ejected(victim)
    balance.probed(victim, 11.0, works=False)
    assert balance.due_probes(12.9) == []
    assert balance.due_probes(13.0) == [victim], "the pause has doubled"
    balance.probed(victim, 13.0, works=True)
    assert not balance.is_ejected(victim)
    balance.ended(victim)
    assert balance.choose(key(1)) == victim


def test_a_success_between_failures_forgives_them() -> None:
    balance = Balance(NAMES)
    for _ in range(5):
        balance.failed(0, 1.0)
        balance.failed(0, 1.0)
        balance.worked(0)
    assert not balance.is_ejected(0)


def test_a_server_that_ends_is_ejected_at_once() -> None:
    balance = Balance(NAMES)
    balance.failed(3, 1.0, is_ending=True)
    assert 3 not in owners(balance)


def test_without_others_ejected_servers_are_tried() -> None:
    balance = Balance(NAMES[:2])
    for server in (0, 1):
        balance.failed(server, 1.0, is_ending=True)
    assert {balance.choose(key(each), excluding=[0]) for each in range(9)} == {1}
    assert {balance.choose(key(each)) for each in range(50)} == {0, 1}
