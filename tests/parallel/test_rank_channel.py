"""Plans reach every rank whole and in order, whatever their size and the ranks' pace."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice

import numpy as np
import pytest

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.execution.rank_channel import HostFollowerEnd, LeaderEnd
from minisgl_backend.request import IntArray

WAIT_S = 60.0


@contextmanager
def channel(
    num_ranks: int, *, timeout_s: float = WAIT_S
) -> Iterator[tuple[LeaderEnd, list[HostFollowerEnd], list[socket.socket]]]:
    """Rank 0's end, the ends of ranks 1, 2, ... and their sockets.

    Rank 0's end is closed when the block is left, the others when everything has been read.
    """
    with ExitStack() as after:
        leader = LeaderEnd(num_ranks, start_s=timeout_s)
        after.callback(leader.close)
        followers, sockets = [], []
        for rank in range(1, num_ranks + 1):
            with leader.inherited(rank) as inherited:
                theirs, memory = map(os.dup, inherited)
            after.callback(os.close, memory)
            sockets.append(after.enter_context(socket.socket(fileno=theirs)))
            followers.append(HostFollowerEnd(sockets[-1], memory))
        leader.start_steps(timeout_s)
        yield leader, followers, sockets


def plans_of_sizes(*sizes: int) -> list[IntArray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-(2**31), 2**31, size).astype(np.int32) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([14] * 100, id="many"),
        pytest.param([14, 2**16, 2**16 + 1, 14, 300_000, 5, 1_000_000, 14, 14, 14], id="growing"),
    ],
)
def test_every_rank_gets_every_plan(sizes: list[int]) -> None:
    plans = plans_of_sizes(*sizes)
    with ThreadPoolExecutor(3) as threads, channel(3) as (sender, receivers, _):
        taken = [
            threads.submit(lambda source: list(islice(source, len(plans))), receiver)
            for receiver in receivers
        ]
        for plan in plans:
            sender.send(plan)
        for of_rank in taken:
            received = of_rank.result(WAIT_S)
            assert len(received) == len(plans)
            for got, sent in zip(received, plans, strict=True):
                assert np.array_equal(got, sent)


def test_a_slow_rank_holds_back_the_next_but_few() -> None:
    """A cell is not written again before the slowest rank has read it."""
    plans = plans_of_sizes(*[20] * 12)
    sent = []
    with channel(2) as (sender, (quick, slow), _):
        all_sent = threading.Event()

        def send() -> None:
            for plan in plans:
                sender.send(plan)
                sent.append(plan)
            all_sent.set()

        with ThreadPoolExecutor(2) as threads:
            threads.submit(send)
            first = iter(quick)
            taken = [next(first) for _ in range(4)]
            assert not all_sent.is_set()
            rest = threads.submit(lambda: [next(first) for _ in range(8)])
            late = iter(slow)
            for plan in plans:
                assert np.array_equal(next(late), plan)
            for got, plan in zip([*taken, *rest.result(WAIT_S)], plans, strict=True):
                assert np.array_equal(got, plan)
            assert all_sent.wait(WAIT_S)


def test_a_received_plan_stays_when_its_cell_is_written_again() -> None:
    plans = plans_of_sizes(*[8] * 9)
    with channel(1) as (sender, (receiver,), _):
        found = iter(receiver)
        taken = []
        for plan in plans:
            sender.send(plan)
            taken.append(next(found))
        for got, plan in zip(taken, plans, strict=True):
            assert np.array_equal(got, plan)


def test_a_lost_rank_is_named() -> None:
    with channel(2) as (sender, (first, _), sockets):
        sockets[1].close()
        with pytest.raises(EngineFailure, match="rank 2 is gone"):
            sender.send(np.zeros(1, np.int32))
        assert next(iter(first)).tolist() == [0]


def test_a_silent_rank_is_named() -> None:
    with (
        channel(1, timeout_s=0.2) as (sender, _receivers, _),
        pytest.raises(EngineFailure, match="rank 1 does not answer"),
    ):
        for _ in range(10):
            sender.send(np.zeros(1, np.int32))


def test_every_rank_answers_what_it_is_asked() -> None:
    """Even while plans have not been taken yet."""
    with channel(2) as (sender, receivers, _):
        sender.send(np.zeros(3, np.int32))
        sender.ask()
        assert not sender.have_answered()
        for num_done, receiver in enumerate(receivers, start=5):
            plans = iter(receiver)
            assert len(next(plans)) == 3
            assert len(next(plans)) == 0
            receiver.answer(num_done)
        assert sender.wait_answers() == [5, 6]
        assert sender.have_answered()


def test_plans_end_with_rank_0() -> None:
    with channel(1) as (leader, (follower,), _):
        leader.send(np.arange(3, dtype=np.int32))
        leader.close()
        plans = iter(follower)
        assert next(plans).tolist() == [0, 1, 2]
        assert list(plans) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("no file /models/\udcff", "no file /models/\\udcff", id="not UTF-8"),
        pytest.param("x" + "é" * 2**16, "x" + "é" * (2**15 - 1) + "\ufffd", id="long"),
    ],
)
def test_any_cause_of_a_failed_start_can_be_told(text: str, told: str) -> None:
    with channel(1) as (leader, (follower,), _):
        follower.report(ConfigError(text))
        assert leader.report() == f"rank 1: {told}"
