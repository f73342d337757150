"""Further samples of a prompt, which wait behind the one that computes it.

A sequence whose request has a leader (``Request.leader``) stays out of the queue until committed
steps have computed the leader's prompt, or the leader has ended. Must not know the queue, or what
the samples share.
"""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import RequestId
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.sequence import Sequence


class WaitingSamples:
    """The sequences that wait behind their leaders. ``live``: all sequences that have not ended."""

    def __init__(self, live: Mapping[RequestId, Sequence], rows: RunningRows) -> None:
        self._live = live
        self._rows = rows
        self._waiting: dict[RequestId, list[Sequence]] = {}  # by leader

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """The live sequence whose prompt this one shares."""
        leader = sequence.request.leader
        return None if leader is None else self._live.get(leader)

    def has_computed_prompt(self, leader: Sequence) -> bool:
        """Whether the leader has a row, in which committed steps have computed the whole prompt."""
        is_held = leader.lease is not None
        return is_held and int(self._rows.computed[leader.row]) >= len(leader.request.prompt)

    def wait(self, sequence: Sequence) -> bool:
        """Put the sequence behind its leader; False if it need not wait."""
        leader = self.leader_of(sequence)
        if leader is None or self.has_computed_prompt(leader):
            return False
        self._waiting.setdefault(leader.request.id, []).append(sequence)
        return True

    def let_go(self, leader: Sequence) -> list[Sequence]:
        """Remove and return the sequences that wait behind this one."""
        return self._waiting.pop(leader.request.id, [])

    def leave(self, sequence: Sequence) -> bool:
        """Stop waiting behind a leader; False if the sequence does not wait."""
        leader = sequence.request.leader
        waiting = [] if leader is None else self._waiting.get(leader, [])
        if leader is None or sequence not in waiting:
            return False
        waiting.remove(sequence)
        if not waiting:
            del self._waiting[leader]
        return True

    def check(self) -> None:
        """Raise ``InvariantError`` if a leader with sequences behind it has ended."""
        if not self._waiting.keys() <= self._live.keys():
            raise InvariantError("a request waits for a leader that has ended")
