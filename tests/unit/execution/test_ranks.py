"""Rank 0 while it waits for silent ranks, as otherwise only kernels on GPUs can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.errors import EngineFailure
from minisgl_backend.execution.rank_channel import LeaderEnd
from minisgl_backend.execution.ranks import LeadingExecutor
from minisgl_backend.plan import SampledTokens, StepPlan
from tests.waiting import PATIENCE_S

TIMEOUT_S = 0.05


class Silence:
    """All parts of a ``LeadingExecutor``: the call named ``stuck`` ends only with the ranks."""

    def __init__(self) -> None:
        self.stuck = ""
        self.entered = threading.Event()
        self.ended = threading.Event()
        self.channel = LeaderEnd(0, start_s=PATIENCE_S)
        self.failure: EngineFailure | None = None
        self.complaint: Callable[[], str | None] = lambda: None

    def wait(self, where: str) -> None:
        if where == self.stuck:
            self.entered.set()
            assert self.ended.wait(PATIENCE_S)
            raise EngineFailure("the group was left")

    # the executor, and its pending step
    def launch(self, plan: object) -> Silence:
        self.wait("launch")
        return self

    def tokens(self) -> SampledTokens:
        self.wait("tokens")
        return SampledTokens(np.empty(0, dtype=np.int32))

    def renew(self) -> None:
        pass

    def close(self) -> None:
        self.wait("close")

    # the followers
    def start_steps(self, timeout_s: float) -> None:
        self.channel.start_steps(timeout_s)

    def watch_for(self, complaint: Callable[[], str | None]) -> None:
        self.complaint = complaint

    def lose(self, cause: str) -> EngineFailure:
        self.failure = self.failure or EngineFailure(cause)
        return self.failure

    # the group
    def leave(self, *, patience_s: float = 0.0) -> None:
        self.ended.set()


@pytest.fixture
def silence() -> Iterator[Silence]:
    made = Silence()
    yield made
    made.channel.close()


def test_the_executor_is_closed_before_the_group_is_left(silence: Silence) -> None:
    """Its CUDA graphs hold collectives, and a communicator cannot end before they are destroyed."""
    order: list[str] = []
    executor: Any = SimpleNamespace(close=lambda: order.append("executor"))
    group: Any = SimpleNamespace(leave=lambda *, patience_s: order.append("group"))
    followers: Any = silence
    leader = LeadingExecutor(executor, group, followers, timeout_s=PATIENCE_S, steps_may_hang=True)
    leader.close()
    leader.close()
    assert order == ["executor", "group"]


@pytest.mark.parametrize("where", ["launch", "tokens", "close"])
def test_silence_is_noticed_wherever_rank_0_waits(silence: Silence, where: str) -> None:
    parts: Any = silence
    leader = LeadingExecutor(parts, parts, parts, timeout_s=TIMEOUT_S, steps_may_hang=True)

    def run() -> None:
        leader.launch(StepPlan(step=0)).tokens()
        leader.close()

    assert silence.complaint() is None
    silence.stuck = where
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        assert silence.entered.wait(PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        while (cause := silence.complaint()) is None:
            assert time.monotonic() < until_s
        assert cause == "a step of the ranks does not end"
        silence.lose(cause)
        silence.leave()  # as lost ranks do
        with pytest.raises(EngineFailure):
            running.result(PATIENCE_S)
