"""Waiting for a condition that nothing announces. Must not know what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_POLL_S: Final = 0.02


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until the condition holds; False if it has not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
