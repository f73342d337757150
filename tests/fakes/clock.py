"""A clock for deadlines and waiting limits that a test can move forward."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from minisgl_backend.runtime import loop
from tests.waiting import wait_until

if TYPE_CHECKING:
    from minisgl_backend import LLM  # brings torch


class LoopClock:
    """The clock by which all engines of this process end requests, ``ahead_s`` ahead of real time.

    An hour's time limit ends when a test says so, and never because the machine was busy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=self.monotonic))

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@contextmanager
def passing_within_the_answer(llm: LLM, clock: LoopClock, seconds: float) -> Iterator[None]:
    """Move the clock forward by ``seconds`` once an idle ``llm`` has made some tokens for the
    caller."""
    before = llm.stats().num_generated_tokens

    def wait_and_pass() -> None:
        # the first few may belong to an earlier request, one step of which was still running
        wait_until(lambda: llm.stats().num_generated_tokens > before + 100)
        clock.ahead_s += seconds

    thread = threading.Thread(target=wait_and_pass)
    thread.start()
    try:
        yield
    finally:
        thread.join()
