"""Waiting for another thread or process to do something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when ``condition`` holds; fail if it does not within ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
