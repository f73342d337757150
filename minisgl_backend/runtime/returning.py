"""Which request may run again after a step that broke: one at a time, until it has a new token.

So if a step breaks again, the request that came back last is at fault. Pure: knows request ids and
the number of tokens of each request. Must not know planner or executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from minisgl_backend.errors import EngineFailure
from minisgl_backend.request import RequestId

MAX_BARREN: Final = 3


class Returning:
    """The requests that are still to come back, and the one that came back last: the suspect."""

    def __init__(self) -> None:
        self._waiting: deque[RequestId] = deque()
        self._suspect: RequestId | None = None
        self._num_tokens = 0
        self._num_barren = 0

    @property
    def is_over(self) -> bool:
        """Whether new requests may run at once, since no request is still to come back."""
        return not self._waiting and self._suspect is None

    @property
    def is_waiting(self) -> bool:
        """Whether there are requests still to come back."""
        return bool(self._waiting)

    def begin(self) -> RequestId | None:
        """Note that a step broke, and return the request at fault if it is known.

        Raises ``EngineFailure`` at break number ``MAX_BARREN`` in a row if no request has made
        progress in between: such breaks are no request's fault.
        """
        self._num_barren += 1
        if self._num_barren >= MAX_BARREN:
            raise EngineFailure("steps keep breaking, whichever requests are in them")
        culprit, self._suspect = self._suspect, None
        return culprit

    def progressed(self) -> None:
        """Note that some request has a new token or log-probabilities of its prompt, or has
        ended."""
        self._num_barren = 0

    def ended(self, request_id: RequestId) -> None:
        """Note that a request has ended: later breaks are not its fault."""
        if request_id == self._suspect:
            self._suspect = None

    def come_back(self, request_ids: Iterable[RequestId]) -> None:
        """Let these requests come back in this order, and no others."""
        self._waiting = deque(request_ids)

    def append(self, request_id: RequestId) -> None:
        """Let a new request wait behind those that are still to come back."""
        self._waiting.append(request_id)

    def next(self, num_tokens: Mapping[RequestId, int]) -> RequestId | None:
        """The request that comes back now, if any. ``num_tokens`` is that of each open request."""
        if self._suspect is not None:
            if num_tokens[self._suspect] == self._num_tokens:
                return None
            self._suspect = None
        while self._waiting:
            request_id = self._waiting.popleft()
            if request_id in num_tokens:
                self._suspect = request_id
                self._num_tokens = num_tokens[request_id]
                return request_id
        return None
