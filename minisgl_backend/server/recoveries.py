"""How often a server may be recovered, after what pause: a longer one each time, then no more."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

MAX_RECOVERIES: Final = 5
WINDOW_S: Final = 600.0


class Recoveries:
    """The recoveries of the last ``WINDOW_S`` seconds; ``num_begun`` counts all there ever were."""

    def __init__(self, first_pause_s: float) -> None:
        """``first_pause_s`` is the pause before the second one of a window; the first has none."""
        self.num_begun = 0
        self._first_pause_s = first_pause_s
        self._begun_s: deque[float] = deque()

    def begin(self) -> float | None:
        """Begin a recovery; returns the seconds to wait first, None where there were too many."""
        now_s = time.monotonic()
        while self._begun_s and now_s - self._begun_s[0] > WINDOW_S:
            self._begun_s.popleft()
        num_before = len(self._begun_s)
        if num_before == MAX_RECOVERIES:
            return None
        self._begun_s.append(now_s)
        self.num_begun += 1
        return self._first_pause_s * 2 ** (num_before - 1) if num_before else 0.0
