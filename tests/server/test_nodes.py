"""A server that is node 0 of two: its tokens, and what happens to it when a node is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from minisgl_backend.server.repository import shipped_repository
from minisgl_backend.server.supervisor import Recoveries
from minisgl_check.machines import OtherNode, free_port
from minisgl_check.processes import runs
from tests.server.client import Call, Refused
from tests.server.test_ranks import ENDLESS, OPTIONS, PROMPTS, SAMPLING, expected_tokens, tokens_of
from tests.server.test_supervision import PATIENCE_S, Supervised
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def other() -> Iterator[OtherNode]:
    """Node 1, the same one whatever happens to node 0."""
    node = OtherNode(f"127.0.0.1:{free_port('127.0.0.1')}", "--drain-timeout-s=1")
    try:
        yield node
    finally:
        node.close()


@contextmanager
def supervised(other: OtherNode) -> Iterator[Supervised]:
    options = {"nnodes": "2", "rendezvous": other.rendezvous}
    world = Supervised(shipped_repository(), {**OPTIONS, **options})
    try:
        world.supervisor._recoveries = Recoveries(first_pause_s=0.1)
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def world(other: OtherNode) -> Iterator[Supervised]:
    with supervised(other) as world:
        yield world


def test_tokens_are_those_of_one_rank(world: Supervised) -> None:
    found = [tokens_of(world, *asked) for asked in zip(PROMPTS, SAMPLING, strict=True)]
    assert found == expected_tokens()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
def test_a_lost_node_ends_every_stream_and_comes_back(
    world: Supervised, other: OtherNode, *, is_frozen: bool
) -> None:
    server, before = world.server, world.num_recoveries()
    lost = other.ranks()
    calls = [Call(world.server, "minisgl", **ENDLESS) for _ in range(2)]
    try:
        for call in calls:
            assert call.next(PATIENCE_S) is not None
        if is_frozen:
            other.freeze()
        else:
            os.kill(lost[0], signal.SIGKILL)
        for call in calls:
            with pytest.raises(Refused, match="INTERNAL: the engine stopped after an internal"):
                call.all()
    finally:
        for call in calls:
            call.cancel()
        for pid in (*lost, other.pid) if is_frozen else ():
            os.kill(pid, signal.SIGCONT)
    world.wait_recovered(before)
    assert world.answers()
    wait_until(lambda: not any(map(runs, lost)))
    if world.server is not server:  # it aborts if the process was reporting a metric
        assert server.poll() == -signal.SIGABRT


def test_a_node_waits_for_the_next_server(world: Supervised, other: OtherNode) -> None:
    """Node 0 is killed with all its processes, as if its machine died."""
    lost = other.ranks()
    world.supervisor._recoveries = Recoveries(first_pause_s=0.1)
    before = world.num_recoveries()
    os.killpg(world.server.pid, signal.SIGKILL)
    world.wait_recovered(before)
    assert world.answers()
    wait_until(lambda: not any(map(runs, lost)))
    assert len(other.ranks()) == 1


def test_a_server_that_stops_lets_the_node_go(world: Supervised, other: OtherNode) -> None:
    last = other.ranks()
    world.close()
    wait_until(lambda: not any(map(runs, last)))
    other.signal(signal.SIGTERM)
    assert other.wait() == 0
