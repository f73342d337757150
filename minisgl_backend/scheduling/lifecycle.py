"""Moves sequences through their phases, with all that they hold: place in the queue, row, lease.

Knows the queue, the rows and the cache, and keeps the three consistent. It is the only owner of
leases: it acquires, grows, publishes and releases them. Must not decide which sequence is admitted,
retracted or decoded: the scheduler does.

Invariants, verified by ``check``:
- A live sequence is either in the queue or in a row, never both. A retiring sequence that does not
  return to the queue is in a row, but no longer live.
- A row and its lease are given back together, and only when no step in flight can write to them.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray, Request, RequestId
from minisgl_backend.scheduling.draft import Draft
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.sequence import Phase, Sequence
from minisgl_backend.scheduling.waiting import WaitingQueue, by_precedence, precedence_of


class Lifecycle:
    """All sequences of the planner.

    ``live`` holds the sequences that have not ended; ``prefilling`` those with known tokens left to
    plan, in order of precedence; ``released_rows`` the rows given back since the last plan.
    ``changes`` counts the events after which a waiting sequence that did not fit might fit: a
    change of the queue, of the cached prefixes or of the free pages.
    """

    def __init__(
        self, cache: KVCache, num_rows: int, policy: str, released_rows: list[int]
    ) -> None:
        self.cache = cache
        self.snapshots = cache if isinstance(cache, SnapshotCache) else None
        self.rows = RunningRows(num_rows)
        self.queue = WaitingQueue(cache, policy)
        self.live: dict[RequestId, Sequence] = {}
        self.prefilling: list[Sequence] = []
        self.released_rows = released_rows
        self.changes = 0
        self._num_arrivals = 0
        self._remaps: list[tuple[Sequence, Lease, range]] = []

    @property
    def num_available_pages(self) -> int:
        """Pages that can be granted now."""
        return self.cache.num_free + self.cache.num_evictable

    def enqueue(self, request: Request, generated: IntArray, num_scored: int) -> None:
        """Queue a new request, or one that comes back with the tokens ``generated`` so far, and
        ``num_scored`` log-probabilities of its prompt."""
        if request.id in self.live:
            raise InvariantError(f"request {request.id} is live already")
        known = np.concatenate([request.prompt, generated]) if len(generated) else request.prompt
        precedence = precedence_of(request, self._num_arrivals)
        sequence = Sequence(request, precedence, known, num_scored=num_scored)
        self._num_arrivals += 1
        self.live[request.id] = sequence
        self.queue.push(sequence)
        self.changes += 1

    def start(self, sequence: Sequence, num_pages: int, room: int) -> int:
        """Give a waiting sequence a row, and pages for all its known tokens, if ``room`` allows.

        ``num_pages`` hold its known tokens and its reserve. Returns how many of the available pages
        that takes. The sequence is PREFILLING if it was started, and still WAITING if not.
        """
        cache, size = self.cache, self.cache.page_size
        available = self.num_available_pages
        lease = cache.acquire(sequence.reusable, sequence.request.cache_salt)
        # [0, num_shared)           cached: pinned from now on; those that no other lease pinned
        #                           before were available until now
        # [num_shared, known)       granted now, for the known tokens that are not cached
        # [known, num_pages)        the reserve: kept free, but not granted
        pinned = available - self.num_available_pages
        cost = pinned + num_pages - len(lease.pages)
        if cost > room:
            cache.release(lease)
            return cost
        if not cache.grow(lease, len(sequence.tokens)):
            raise InvariantError(f"request {sequence.request.id} does not fit: pages have leaked")
        self.queue.admit(sequence)
        self.changes += 1
        sequence.enter(Phase.PREFILLING)
        sequence.lease, sequence.remapped_at = lease, -1
        sequence.begins_from = lease.snapshot
        sequence.saves = self._worth_saving(sequence)
        sequence.row = self.rows.take(
            sequence, num_cached_tokens=lease.num_shared * size, capacity=len(lease.pages) * size
        )
        insort(self.prefilling, sequence, key=by_precedence)
        return cost

    def take_snapshots(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Snapshots for the states behind positions of a chunk, with these positions."""
        taken = []
        for position in sequence.saves:
            if self.snapshots is not None and start < position <= end:
                number = self.snapshots.take_snapshot()
                if number is not None:
                    taken.append((position, number))
        sequence.snapshots += taken
        return taken

    def grow(self, rows: IntArray, draft: Draft) -> bool:
        """Grant one more page to each of the rows; False, and no page, if there are too few."""
        size, capacity = self.cache.page_size, self.rows.capacity
        pages = self.cache.grow_each([self.rows.sequence(row).held() for row in rows.tolist()])
        if pages is None:
            return False
        # [0, capacity / size)   the pages of the row so far
        # [capacity / size]      the new page, for the position that the next step computes
        draft.grant(rows, capacity[rows] // size, pages)
        capacity[rows] += size
        return True

    def planned(self, sequence: Sequence) -> None:
        """Note that all known tokens of the sequence are planned: from the next step it decodes."""
        self.prefilling.remove(sequence)
        sequence.enter(Phase.DECODING)
        self.rows.start_decoding(sequence.row)

    def retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, once no step in flight contains it."""
        sequence.returns = True
        self._retire(sequence)

    def end(self, sequence: Sequence) -> None:
        """End a request. What it holds is given back at once, or after the steps in flight."""
        del self.live[sequence.request.id]
        sequence.returns = False
        if sequence.phase is Phase.WAITING:
            self.queue.remove(sequence)
            self.changes += 1
            sequence.enter(Phase.DONE)
        elif sequence.phase is Phase.RETIRING:
            self.rows.accepting[sequence.row] = False
        else:
            self._retire(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take back the row and the pages of a retiring sequence; publish what it has computed."""
        row = sequence.row
        # the tokens of a lease, of which no step in flight can compute any:
        # [0, computed)        their full pages are published: others, and this sequence when it
        #                      returns, may find them
        # [computed, known)    not computed; the last token that was sampled never is
        known = np.concatenate([sequence.tokens, self.rows.output(row)])
        if sequence.failed:
            self.cache.discard(sequence.held())
        else:
            self.publish(sequence, known)
            self.cache.release(sequence.held())
        self.rows.give_back(row)
        self.changes += 1
        self.released_rows.append(row)
        for _, snapshot in sequence.snapshots:  # of which no token has said that it is finite
            assert self.snapshots is not None
            self.snapshots.return_snapshot(snapshot)
        sequence.snapshots.clear()
        sequence.lease, sequence.row = None, -1
        if sequence.returns:
            sequence.returns = False
            sequence.tokens = known
            sequence.enter(Phase.WAITING)
            self.queue.push(sequence)
        else:
            sequence.enter(Phase.DONE)

    def publish(self, sequence: Sequence, tokens: IntArray) -> None:
        """Make the full pages of the computed ones of the sequence's ``tokens`` shareable.

        Once all known tokens are computed, each step of the sequence samples. Its last one, which
        has computed position computed - 1, was planned after the last remap of the row only if that
        position was not planned then.
        """
        lease, row = sequence.held(), sequence.row
        computed = int(self.rows.computed[row])
        if computed < len(sequence.tokens):
            verified = Verified.NONE
        else:
            verified = Verified.ALL if computed > sequence.remapped_at else Verified.OWN
        indices = self.cache.publish(lease, tokens[:computed], verified=verified)
        self.changes += 1
        if verified is not Verified.NONE and self.snapshots is not None:
            for position, snapshot in sequence.snapshots:
                self.snapshots.attach_snapshot(lease, position, snapshot)
            sequence.snapshots.clear()
        if indices:
            sequence.remapped_at = int(self.rows.planned[row])
            self._remaps.append((sequence, lease, indices))

    def grant_remaps(self, draft: Draft) -> None:
        """Grant the pages of others that ``publish`` has put in place of a row's own since the
        last plan. Steps planned before go on reading the row's own pages: see ``scheduler``."""
        for sequence, lease, indices in self._remaps:
            if not lease.released:
                pages = lease.pages[indices.start : indices.stop]
                draft.grant_row(sequence.row, indices, np.array(pages, dtype=np.int32))
        self._remaps.clear()

    def rows_of_executor(self) -> list[int]:
        """The rows that a wrapper of the executor takes for held: it learns of releases only from
        plans."""
        held = [row for row, s in enumerate(self.rows.sequences) if s is not None]
        return sorted({*held, *self.released_rows})

    def check(self) -> None:
        """Raise ``InvariantError`` if queue, rows and cache contradict each other. Slow."""
        self.cache.check()
        self.rows.check()
        held = [sequence for sequence in self.rows.sequences if sequence is not None]
        for sequence in held:
            capacity = len(sequence.held().pages) * self.cache.page_size
            if capacity != self.rows.capacity[sequence.row]:
                raise InvariantError(f"row {sequence.row} has another capacity than its lease")
        live = [s for s in held if s.phase is not Phase.RETIRING or s.returns]
        if len(live) + len(self.queue) != len(self.live):
            raise InvariantError("a live request is neither in the queue nor in a row")
        prefilling = [s for s in held if s.phase is Phase.PREFILLING]
        if sorted(prefilling, key=by_precedence) != self.prefilling:
            raise InvariantError("not exactly the prefilling sequences are listed as such")

    def _worth_saving(self, sequence: Sequence) -> tuple[int, ...]:
        """The positions behind which another request may begin: where this one parts from what
        others have begun with, and the last one that it would find itself if it came again."""
        if self.snapshots is None:
            return ()
        salt = sequence.request.cache_salt
        parted = self.snapshots.cached_length(sequence.tokens, salt)
        last = (len(sequence.tokens) - 1) // self.cache.page_size * self.cache.page_size
        begun = sequence.held().num_shared * self.cache.page_size
        return tuple(sorted({position for position in (parted, last) if position > begun}))

    def _retire(self, sequence: Sequence) -> None:
        row = sequence.row
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        sequence.enter(Phase.RETIRING)
        self.rows.retire(row, still_accepting=sequence.returns)
        if not self.rows.in_flight[row]:
            self.release(sequence)
