"""Which requests have run out of time: by their own deadline, or by the limit on waiting.

Pure: times are arguments, readings of one clock in seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from minisgl_backend.request import Request, RequestId


class Timeouts:
    """The open requests, by when their time is over. Some have ended or begun meanwhile."""

    def __init__(self, max_queue_time_s: float | None) -> None:
        self.max_queue_time_s = max_queue_time_s
        self._deadlines: list[tuple[float, RequestId]] = []
        self._arrivals: deque[tuple[float, RequestId]] = deque()

    def add(self, request: Request, arrived_s: float) -> None:
        """A request came in, after all that were added before."""
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.id))
        if self.max_queue_time_s is not None:
            self._arrivals.append((arrived_s, request.id))

    def overdue(self, now_s: float) -> Iterator[RequestId]:
        """Those whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            yield heapq.heappop(self._deadlines)[1]

    def stale(self, now_s: float, is_waiting: Callable[[RequestId], bool]) -> Iterator[RequestId]:
        """Those that still wait and have done so for too long, each once."""
        while self._arrivals:
            arrived_s, request_id = self._arrivals[0]
            waits = is_waiting(request_id)
            if waits and now_s - arrived_s < (self.max_queue_time_s or 0.0):
                return
            self._arrivals.popleft()
            if waits:
                yield request_id
