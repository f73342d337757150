"""A clock for deadlines and limits on waiting, which a test moves on."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from minisgl_backend.runtime import loop


class LoopClock:
    """The clock by which all engines of this process end requests, ``ahead_s`` before the real one.

    A time limit of an hour is over when a test says so, and not because the machine was busy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=self.monotonic))

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s
