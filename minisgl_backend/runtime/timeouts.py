"""Which requests have run out of time, by their own deadline or by the limit on waiting.

Pure: times are arguments, readings of one clock in seconds. Memory grows with the number of open
requests only. Must not know what happens to a request that has run out of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from minisgl_backend.request import Request, RequestId

_SPARE: Final = 64
"""Number of entries of ended requests that may stay in the heap before they are removed."""


class Timeouts:
    """The open requests, by the time at which each must end."""

    def __init__(self, max_queue_time_s: float | None) -> None:
        self.max_queue_time_s = max_queue_time_s
        self._deadlines: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []
        """All of ``_deadlines``, and some entries of requests that have ended."""
        self._waiting: dict[RequestId, float] = {}
        """When each request that has not begun arrived, the oldest first."""

    def add(self, request: Request, arrived_s: float) -> None:
        """Add a request, which arrived after all that were added before. The limit on waiting
        applies only to the first sample of a prompt."""
        if request.deadline_s is not None:
            self._deadlines[request.id] = request.deadline_s
            heapq.heappush(self._heap, (request.deadline_s, request.id))
        if self.max_queue_time_s is not None and request.leader is None:
            self._waiting[request.id] = arrived_s

    def begun(self, request_id: RequestId) -> None:
        """Note that the request has got a row: it waits no longer."""
        self._waiting.pop(request_id, None)

    def ended(self, request_id: RequestId) -> None:
        """Forget a request that has ended."""
        self._waiting.pop(request_id, None)
        self._deadlines.pop(request_id, None)
        if len(self._heap) > 2 * len(self._deadlines) + _SPARE:
            self._heap = [(deadline_s, it) for it, deadline_s in self._deadlines.items()]
            heapq.heapify(self._heap)

    def overdue(self, now_s: float) -> Iterator[RequestId]:
        """The requests whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            if self._deadlines.pop(request_id, None) is not None:
                yield request_id

    def stale(self, now_s: float) -> Iterator[RequestId]:
        """The requests that have waited for too long, each once."""
        if self.max_queue_time_s is None:
            return
        while self._waiting:
            request_id, arrived_s = next(iter(self._waiting.items()))
            if now_s - arrived_s < self.max_queue_time_s:
                return
            del self._waiting[request_id]
            yield request_id
