"""Which snapshots of recurrent states sequences take, and when others may find them.

A chunk saves the states at positions after which another request may begin. A decoding row, with
guesses or without, keeps its latest states in a single snapshot, which it overwrites again and
again. If main memory has states of a longer prefix than the device, a sequence begins from a
snapshot that they are loaded into, and others may find it like one that was saved.

Knows positions and numbers of snapshots; ``cache.snapshots`` knows to which prefix each belongs.
Must not know what a state is, or when the executor copies it.

Invariants, verified by ``check``:
- The snapshots taken from the cache are those that sequences in rows hold, ``Sequence.snapshots``
  and ``Sequence.kept``.
- No row passes the position at which it keeps its states next.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from typing import Final

import numpy as np

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.cache.pages import num_pages_for
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import WHOLE_EVERY
from minisgl_backend.request import IntArray
from minisgl_backend.scheduling.draft import Draft
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.sequence import Sequence

_APART: Final = 16
"""The next snapshot comes at least 1 / _APART of the tokens so far later: closer ones cost more
copies and save little."""
_MOST_APART: Final = 64
"""Upper limit of that distance, in tokens."""


class StateSnapshots:
    """The snapshots that sequences in rows hold."""

    def __init__(self, cache: KVCache, rows: RunningRows) -> None:
        self._cache = cache
        self._rows = rows
        self._page_size = cache.page_size
        self._kept_every = lcm(cache.page_size, WHOLE_EVERY)
        self._begun_from: set[int] = set()  # by rows that the plan being made has started

    def begin_plan(self) -> None:
        """Another plan is made from here on."""
        self._begun_from.clear()

    def resume(self, sequence: Sequence) -> int:
        """Let a waiting sequence begin from states in main memory, if they are far enough after
        those that the device has, and if there is a snapshot to load them into: one from which no
        chunk of the same plan begins, since it is overwritten before that. Returns the number of
        tokens before these states, or 0."""
        cache, host = self._cache, self._cache.host
        tokens, key = sequence.reusable, sequence.request.cache_key
        if host is None:
            return 0
        resumed_at, found = host.match_length(tokens, key), cache.match_length(tokens, key)
        if resumed_at <= found + _apart(found):
            return 0
        snapshot = cache.take_snapshot(spared=self._begun_from)
        if snapshot is None:
            return 0
        sequence.loads = host.match(tokens, key)
        sequence.snapshots.append((resumed_at, snapshot))
        return resumed_at

    def give_up(self, sequence: Sequence) -> None:
        """Take back ``resume``: the sequence goes on waiting."""
        sequence.loads = None
        for _, snapshot in sequence.snapshots:
            self._cache.return_snapshot(snapshot)
        sequence.snapshots.clear()

    def begin(self, sequence: Sequence) -> None:
        """Choose where a sequence that was just started begins, and the positions at which it saves
        its states."""
        begun = sequence.held().num_shared * self._page_size, sequence.held().snapshot
        if sequence.loads is not None:
            (begun,) = sequence.snapshots
        num_begun, sequence.begins_from = begun
        self._begun_from.add(sequence.begins_from)
        sequence.saves = self._worth_saving(sequence, num_begun)
        first = len(sequence.tokens)
        self._rows.keeps_at[sequence.row] = self._keeps_at(first, self._last_found(sequence))

    def save(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Take snapshots after positions of a chunk; returns pairs of position and snapshot."""
        taken = []
        for position in sequence.saves:
            if start < position <= end:
                number = self._cache.take_snapshot()
                if number is not None:
                    taken.append((position, number))
        sequence.snapshots += taken
        return taken

    def keep(self, rows: IntArray, positions: IntArray, draft: Draft) -> None:
        """Keep the states of the decoding ``rows`` whose next ``positions``, int32[num_rows] each,
        are far enough after the last ones kept.

        Others find them only when the row ends, and by its tokens. So states are kept only if all
        tokens before the position are known: with one step in flight they are, as that step
        computes the last of them. If there is no snapshot to take, the row goes on, and tries again
        at the position that would have been next.
        """
        for index in np.flatnonzero(positions == self._rows.keeps_at[rows]).tolist():
            row, position = int(rows[index]), int(positions[index])
            self._rows.keeps_at[row] = self.kept_next(row, position)
            sequence = self._rows.sequence(row)
            if position > max(len(sequence.tokens), int(self._rows.computed[row]) + 1):
                continue
            kept = sequence.kept
            number = self._cache.take_snapshot(rolls=True) if kept is None else kept[1]
            if number is not None:
                sequence.kept = position, number
                draft.keep(row, number)

    def kept_next(self, row: int, position: int) -> int:
        """The first position after ``position`` at which the row's states are to be kept."""
        keeps_at = int(self._rows.keeps_at[row])
        return keeps_at if position < keeps_at else self._keeps_at(position + 1, position)

    def verify(self, sequence: Sequence) -> None:
        """Let others find what chunks have saved, now that a finite token was sampled after it."""
        for position, snapshot in sequence.snapshots:
            self._cache.attach_snapshot(sequence.held(), position, snapshot)
        sequence.snapshots.clear()

    def end(self, sequence: Sequence) -> None:
        """Let go of all snapshots, before the lease is released. Others may find what was kept
        while the row decoded, unless the sequence has failed: finite tokens were sampled after it.
        """
        kept, sequence.kept = sequence.kept, None
        if kept is not None and sequence.failed:
            self._cache.return_snapshot(kept[1])
        elif kept is not None:
            self._cache.attach_snapshot(sequence.held(), *kept)
        for _, snapshot in sequence.snapshots:  # not verified by any token
            self._cache.return_snapshot(snapshot)
        sequence.snapshots.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise ``InvariantError`` unless exactly the snapshots of ``sequences``, those in rows,
        are taken, and none has passed the position at which it keeps its states next."""
        num_held = sum(len(one.snapshots) + (one.kept is not None) for one in sequences)
        if self._cache.num_taken_snapshots != num_held:
            raise InvariantError("not exactly the snapshots that rows hold are taken")
        rows = [one.row for one in sequences]
        if (self._rows.planned[rows] > self._rows.keeps_at[rows]).any():
            raise InvariantError("a row has passed the position at which it keeps its states")

    def _worth_saving(self, sequence: Sequence, begun: int) -> tuple[int, ...]:
        """The positions after which another request may begin: where this one, which begins at
        ``begun``, diverges from cached ones, and the last one after which it could itself begin if
        it came again."""
        parted = self._cache.cached_length(sequence.tokens, sequence.request.cache_key)
        worth = set()
        if (last := self._last_found(sequence)) > begun:
            worth.add(last)
        if parted > begun + _apart(begun):  # a closer one would save little computing
            worth.add(parted)
        return tuple(sorted(worth))

    def _last_found(self, sequence: Sequence) -> int:
        """The last position after which the sequence would begin if it came again."""
        return (len(sequence.tokens) - 1) // self._page_size * self._page_size

    def _keeps_at(self, first: int, kept: int) -> int:
        """The next position before which to keep states: at least ``first``, and far enough after
        ``kept``, the last one."""
        size = self._kept_every
        return num_pages_for(max(first, kept + _apart(kept)), size) * size


def _apart(position: int) -> int:
    """How far after a snapshot at ``position`` the next one is worth its cost."""
    return min(position // _APART, _MOST_APART)
