"""When the next packet of a stream may go out, and when its acknowledgement is overdue.

Pure: knows counts and times, which are arguments (readings of one monotonic clock, in seconds).

At most one packet of a stream is unacknowledged, and new tokens gather for the next one: at low
load each token goes out alone, at high load packets grow to what the server carries, and no backlog
builds up. Probes, which find out whether the client still listens, pass a closed window, too, and
so does a stream's last packet, which is not acknowledged. Must not know what a packet holds, or how
it is sent.
"""

from __future__ import annotations

from collections import deque
from typing import Final

PROBE_AFTER_S: Final = 0.25
"""A stream that is silent for this long sends an empty packet, a probe."""
_LONGEST_PROBE_WAIT_S: Final = 2.0
GIVE_UP_AFTER_S: Final = 10.0
"""How long to wait for a detokenizer that acknowledges nothing at all: it may only be paused."""
_LANES_APART_S: Final = 1.0
"""How far one of the detokenizer's lanes may lag behind another on a busy machine."""


class Acknowledged:
    """When the newest acknowledged packet on each lane of the detokenizer was sent.

    A lane takes packets in order: if it has taken a later one, an earlier one is lost. A packet
    that another lane has taken proves less, since threads of a busy machine wait for each other.
    """

    def __init__(self, num_lanes: int) -> None:
        self._newest_s = [float("-inf")] * num_lanes

    def note(self, key: int, sent_s: float) -> None:
        """A packet of stream ``key``, sent at ``sent_s``, is acknowledged."""
        lane = key % len(self._newest_s)
        self._newest_s[lane] = max(self._newest_s[lane], sent_s)

    def newest_s(self, key: int) -> float:
        """The packets of stream ``key`` that were sent up to this time should be acknowledged by
        now."""
        of_lane = self._newest_s[key % len(self._newest_s)]
        return max(of_lane, max(self._newest_s) - _LANES_APART_S)


class Window:
    """The packets of one stream that are sent but not yet acknowledged.

    ``interval_s`` is the least time between two packets with tokens; infinite if all tokens wait
    for the end.
    """

    __slots__ = ("_interval_s", "_last_sent_s", "_last_tokens_s", "_probe_wait_s", "_unacked")

    def __init__(self, *, now_s: float, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._last_sent_s = now_s
        self._last_tokens_s = float("-inf") if interval_s < float("inf") else float("inf")
        self._probe_wait_s = PROBE_AFTER_S
        self._unacked: deque[tuple[int, float]] = deque()

    @property
    def has_interval(self) -> bool:
        """Whether the time between two packets with tokens has a bound."""
        return 0.0 < self._interval_s < float("inf")

    @property
    def is_open(self) -> bool:
        """Whether all packets that were sent are acknowledged."""
        return not self._unacked

    def may_send_tokens(self, now_s: float) -> bool:
        """Whether a packet with tokens may go out."""
        return not self._unacked and now_s - self._last_tokens_s >= self._interval_s

    def sent(self, index: int, now_s: float, *, with_tokens: bool) -> None:
        """Packet ``index`` goes out."""
        self._unacked.append((index, now_s))
        self._last_sent_s = now_s
        if with_tokens:
            self._last_tokens_s = now_s
            self._probe_wait_s = PROBE_AFTER_S
        else:
            # while nothing answers, more probes would only lengthen the queue
            self._probe_wait_s = min(2 * self._probe_wait_s, _LONGEST_PROBE_WAIT_S)

    def handed_over(self, index: int, now_s: float) -> None:
        """Packet ``index``, the last one, is with Triton: the detokenizer can have it from now on.

        A sender may have been held up since it took the packet, by Triton or by a busy machine,
        while packets of others, taken later, went through.
        """
        if self._unacked and self._unacked[-1][0] == index:
            self._unacked[-1] = index, now_s

    def acknowledged(self, index: int) -> float | None:
        """All packets up to ``index`` were taken. Returns when the last one was sent, or None."""
        sent_s = None
        while self._unacked and self._unacked[0][0] <= index:
            _, sent_s = self._unacked.popleft()
        if not self._unacked:
            self._probe_wait_s = PROBE_AFTER_S
        return sent_s

    def probe_is_due(self, now_s: float) -> bool:
        """Whether the stream has been silent long enough to send a probe."""
        return now_s - self._last_sent_s >= self._probe_wait_s

    def is_overdue(self, now_s: float, newest_acknowledged_s: float, grace_s: float) -> bool:
        """Whether the packets under way will never be acknowledged.

        ``newest_acknowledged_s`` is ``Acknowledged.newest_s``. If that is ``grace_s`` or more after
        our newest packet was sent, ours are lost. Within that time the detokenizer may only be
        slow, or packets may have overtaken each other on a busy machine.
        """
        if not self._unacked:
            return False
        (_, first_s), (_, last_s) = self._unacked[0], self._unacked[-1]
        return now_s - first_s >= GIVE_UP_AFTER_S or newest_acknowledged_s - last_s >= grace_s
