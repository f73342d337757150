"""Moves sequences through their phases, with everything they hold: queue place, row, lease.

Knows the queue, the rows and the cache, and keeps the three consistent. It is the only owner of
leases: it acquires, grows, publishes and releases them. Must not decide which sequence is admitted,
retracted or decoded: the scheduler does.

When a sequence starts, pages of its prefix that main memory has (``cache.host``) and the device
lacks are loaded into private pages, which are published like those that it computes. When it gives
back its pages, copies of those that it has published go to main memory, with the snapshots of
recurrent states along them.

When a further sample of a prompt (``waiting_samples``) starts, it leases the cached pages of the
prompt. The rest of the prompt, usually its last, partial page, is copied from the pages of its
leader, if that is still running. So each sample computes only the prompt's last position again.

Invariants, verified by ``check``:
- A live sequence is in the queue, behind its leader or in a row, and in one of these only. A
  retiring sequence that does not return to the queue is in a row, but no longer live.
- A row, its lease and its use of an adapter slot are given back together, and only when no step in
  flight can write to them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np

from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.pages import num_pages_for
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_GROUPS, Groups
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.scheduling.adapter_places import AdapterPlaces
from minisgl_backend.scheduling.draft import Draft
from minisgl_backend.scheduling.lookup import RecentAnswers
from minisgl_backend.scheduling.room import Room
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.sequence import Phase, Sequence, by_precedence
from minisgl_backend.scheduling.state_snapshots import StateSnapshots
from minisgl_backend.scheduling.waiting import WaitingQueue, precedence_of
from minisgl_backend.scheduling.waiting_samples import WaitingSamples

_UNLIMITED: Final = 2**31


class Lifecycle:
    """All sequences of the planner.

    ``live`` holds the sequences that have not ended; ``prefilling`` those with known tokens left to
    plan, in order of precedence; ``released_rows`` the rows given back since the last plan;
    ``states`` the snapshots of recurrent states, None if rows have no such states.
    ``changes`` counts the events after which a waiting sequence that could not start might start: a
    change of the queue, of the cached prefixes, of the free pages or of the adapter slots.
    """

    def __init__(
        self,
        cache: KVCache,
        num_rows: int,
        queue: WaitingQueue,
        places: AdapterPlaces,
        *,
        group_cost_tokens: int | None,
        has_states: bool,
        released_rows: list[int],
        recent: RecentAnswers | None,
    ) -> None:
        """``group_cost_tokens``: see ``KVCache.groups``; None for no groups. ``has_states``: see
        ``SchedulerConfig``. ``recent`` gets the answers that end."""
        self.cache = cache
        self.rows = RunningRows(num_rows)
        self.queue = queue
        self.places = places
        self._group_cost_tokens = group_cost_tokens
        self.states = StateSnapshots(cache, self.rows) if has_states else None
        self.live: dict[RequestId, Sequence] = {}
        self.prefilling: list[Sequence] = []
        self.released_rows = released_rows
        self.changes = 0
        self._recent = recent
        self._num_arrivals = 0
        self._remaps: list[tuple[Sequence, Lease, range]] = []
        self._samples = WaitingSamples(self.live, self.rows)
        self._sliding: list[Sequence] = []  # with chunks of the last plan
        self._grouped_rows = EMPTY  # the rows of the last step, whose groups these were ...
        self._groups = NO_GROUPS
        self._are_groups_current = True  # ... unless a lease has got other shared pages since

    @property
    def room(self) -> Room:
        """What can be granted now."""
        windows = self.cache.windows
        return Room(
            self.cache.num_free + self.cache.num_evictable,
            _UNLIMITED if windows is None else windows.num_available,
        )

    @property
    def whole_room(self) -> Room:
        """What could be granted if nothing were held."""
        windows = self.cache.windows
        most = _UNLIMITED if windows is None else windows.num_window_pages
        return Room(self.cache.num_pages, most)

    def gain(self, sequence: Sequence) -> Room:
        """What becomes available to others when the sequence ends."""
        lease, windows = sequence.held(), self.cache.windows
        alone = 0 if windows is None else windows.num_alone(lease)
        return Room(lease.num_private, alone)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, or behind their leaders."""
        return len(self.queue) + len(self._samples)

    def enqueue(self, request: Request, generated: IntArray, num_scored: int) -> None:
        """Queue a request, which waits for its leader, if it has one. ``generated`` and
        ``num_scored``: see ``runtime.ports.Scheduler.add``."""
        if request.id in self.live:
            raise InvariantError(f"request {request.id} is live already")
        known = np.concatenate([request.prompt, generated]) if len(generated) else request.prompt
        precedence = precedence_of(request, self._num_arrivals)
        sequence = Sequence(request, precedence, known, num_scored=num_scored)
        self._num_arrivals += 1
        self.live[request.id] = sequence
        if not self._samples.wait(sequence):
            self.queue.push(sequence)
            self.changes += 1

    def start(self, sequence: Sequence, num_pages: int, room: Room) -> Room:
        """Give a waiting sequence a row, and pages for all its known tokens, if ``room`` allows.

        ``num_pages`` hold its known tokens and its reserve. Returns what the sequence takes, or
        would take, of what is available. It is PREFILLING if it was started, and WAITING if not.
        Window pages are granted chunk by chunk; counted here are those that the row needs when it
        decodes.
        """
        cache, size, windows = self.cache, self.cache.page_size, self.cache.windows
        available = self.room
        resumed_at = 0 if self.states is None else self.states.resume(sequence)
        tokens, key = sequence.reusable, sequence.request.cache_key
        lease = cache.acquire(tokens, key, resumed_at=resumed_at)
        # [0, num_shared)           cached: pinned from now on; those that no other lease pinned
        #                           before were available until now
        # [num_shared, known)       granted now, for the known tokens that are not cached
        # [known, num_pages)        the reserve: kept free, but not granted
        left = self.room
        cost = Room(available.pages - left.pages + num_pages - len(lease.pages), 0)
        if windows is not None:
            more = windows.num_missing(lease, num_pages)
            cost = Room(cost.pages, available.window_pages - left.window_pages + more)
        if not room.holds(cost):
            cache.release(lease)
            if self.states is not None:
                self.states.give_up(sequence)
            return cost
        if not cache.grow(lease, len(sequence.tokens)):
            raise InvariantError(f"request {sequence.request.id} does not fit: pages have leaked")
        cache.promise(lease, sequence.tokens)
        self.queue.admit(sequence)
        self.changes += 1
        sequence.enter(Phase.PREFILLING)
        sequence.lease, sequence.remapped_at = lease, -1
        sequence.adapter_slot, sequence.loads_adapter = self.places.take(sequence.request.adapter)
        sequence.row = self.rows.take(
            sequence, num_cached_tokens=lease.num_shared * size, capacity=len(lease.pages) * size
        )
        if windows is not None:
            windows.seat(lease, sequence.row, self._windows_worth_keeping(sequence))
        if self.states is not None:
            self.states.begin(sequence)
        insort(self.prefilling, sequence, key=by_precedence)
        return cost

    def begin_plan(self) -> None:
        """Let another plan load adapters, and give back the window pages that rows with chunks in
        the last plan have passed."""
        if self.places.begin_plan():
            self.changes += 1
        if self.states is not None:
            self.states.begin_plan()
        windows = self.cache.windows
        if windows is None:
            return
        for sequence in self._sliding:
            if sequence.lease is not None and sequence.phase is not Phase.RETIRING:
                windows.slide(sequence.lease, int(self.rows.planned[sequence.row]))
        self._sliding.clear()

    def cover(self, sequence: Sequence, start: int, end: int) -> int:
        """Grant window pages for the chunk from ``start`` to ``end``, as many as there are; returns
        the end of the positions covered."""
        windows, lease = self.cache.windows, sequence.held()
        if windows is None:
            return end
        self._sliding.append(sequence)
        most = lease.window_end + windows.num_available
        windows.extend(lease, min(num_pages_for(end, windows.page_size), most))
        return min(end, max(start, lease.window_end * windows.page_size))

    def load_prefix(self, sequence: Sequence, draft: Draft) -> int:
        """Let a sequence that was just started load the pages of its prefix that main memory has
        and the cache lacks, and states after them if it begins from these; returns the number of
        tokens in the pages."""
        host, prefix, sequence.loads = self.cache.host, sequence.loads, None
        if host is None:
            return 0
        if self.states is None:
            prefix = host.match(sequence.reusable, sequence.request.cache_key)
        elif prefix is not None:
            draft.load_states(sequence.begins_from, prefix.state_slot)
        if prefix is None:
            return 0
        lease, size = sequence.held(), self.cache.page_size
        begin, end = lease.num_shared, len(prefix.slots)
        # indices of lease.pages:
        # [0, begin)     cached
        # [begin, end)   private: loaded before the step of ``draft`` computes anything
        # [end, ...)     computed by this sequence
        if end <= begin:
            return 0
        if (windows := self.cache.windows) is not None:
            indices = windows.resume(lease, end)
            if indices is None:
                return 0
            window_slots = prefix.window_slots[len(prefix.window_slots) - len(indices) :]
            draft.load_window_pages(windows.pages_of(lease, indices), window_slots)
        draft.load_pages(lease.pages[begin:end], prefix.slots[begin:])
        self.rows.skip(sequence.row, end * size)
        return (end - begin) * size

    def copy_prompt(self, sequence: Sequence, draft: Draft) -> None:
        """Let a sequence that was just started copy the part of its prompt that is not cached from
        its leader, except for the last position, whose logits it needs.

        The leader runs, so it keeps its pages until the step of ``draft`` has copied them. Nothing
        is copied if rows have recurrent states, or layers window pages.
        """
        if self.states is not None or self.cache.windows is not None:
            return
        leader = self._samples.leader_of(sequence)
        if leader is None or leader.lease is None or leader.phase is Phase.RETIRING:
            return
        pages, size = sequence.held().pages, self.cache.page_size
        begin = int(self.rows.planned[sequence.row])
        end = min(int(self.rows.computed[leader.row]), len(sequence.request.prompt) - 1)
        # positions of the prompt:
        # [0, begin)     cached or loaded, in whole pages
        # [begin, end)   computed by the leader, in committed steps: copied
        # [end, ...)     computed by this sequence
        for index in range(begin // size, num_pages_for(end, size)):
            draft.copy(leader.lease.pages[index], pages[index], min(size, end - index * size))
        if end > begin:
            self.rows.skip(sequence.row, end)

    def grow_surely(self, rows: IntArray, draft: Draft) -> None:
        """Grant each of the rows one more page. Raises ``InvariantError`` if there are too few:
        ``room`` has said that there are enough."""
        if not self.grow(rows, draft):
            raise InvariantError("the cache does not grant the pages that it counts as available")

    def grow(self, rows: IntArray, draft: Draft) -> bool:
        """Grant each of the rows one more page. False if there are too few: then none gets one."""
        size, capacity = self.cache.page_size, self.rows.capacity
        leases = [self.rows.sequence(row).held() for row in rows.tolist()]
        windows = self.cache.windows
        if windows is not None:
            # each step of a decoding row samples, so computed positions are verified by a token
            for lease, computed in zip(leases, self.rows.computed[rows].tolist(), strict=True):
                windows.slide(lease, computed, num_verified=computed)
            if windows.num_available < len(leases):
                return False
        pages = self.cache.grow_each(leases)
        if pages is None:
            return False
        if windows is not None:
            for lease in leases:
                windows.extend(lease, len(lease.pages))
        # [0, capacity / size)   the pages of the row so far
        # [capacity / size]      the new page, for positions that the next step computes
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
        self._queue_samples_of(sequence)
        if sequence.phase is Phase.WAITING:
            if not self._samples.leave(sequence):
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
        # positions of the lease; no step in flight computes any:
        # [0, computed)        their full pages are published: others, and this sequence when it
        #                      returns, may find them
        # [computed, known)    not computed; the last token that was sampled never is
        known = self.rows.known(row)
        lease = sequence.held()
        if not sequence.failed:
            self.publish(sequence, known)
        if self.states is not None:
            self.states.end(sequence)
        if sequence.failed:
            self.cache.discard(lease)
        else:
            self._save_to_host(lease, known, sequence.request.cache_key)
            self.cache.release(lease)
        self.rows.give_back(row)
        self.places.give_back(sequence.request.adapter)
        self._are_groups_current = False  # the row may soon decode for another sequence
        self.changes += 1
        self.released_rows.append(row)
        sequence.lease, sequence.row = None, -1
        if sequence.returns:
            sequence.returns, sequence.was_retracted = False, True
            sequence.tokens = known
            sequence.enter(Phase.WAITING)
            self.queue.push(sequence)
        else:
            sequence.enter(Phase.DONE)
            if self._recent is not None and not sequence.failed:
                request = sequence.request
                self._recent.add(known[len(request.prompt) :], request.cache_key)

    def publish(self, sequence: Sequence, tokens: IntArray) -> None:
        """Share the full pages of the sequence's ``tokens`` that are computed.

        Once all known tokens are computed, each step of the sequence samples a token, which
        verifies the pages that the step has read. The last such step computed the position
        computed - 1. If that was planned after the last remap, it has read the present pages.
        """
        lease, row = sequence.held(), sequence.row
        computed = int(self.rows.computed[row])
        if computed < len(sequence.tokens):
            verified = Verified.NONE
        else:
            verified = Verified.ALL if computed > sequence.remapped_at else Verified.OWN
        indices = self.cache.publish(lease, tokens[:computed], verified=verified)
        self.changes += 1
        self._are_groups_current = False
        if verified is not Verified.NONE and self.states is not None:
            self.states.verify(sequence)
        if self._samples.has_computed_prompt(sequence):
            self._queue_samples_of(sequence)
        if indices:
            sequence.remapped_at = int(self.rows.planned[row])
            self._remaps.append((sequence, lease, indices))

    def groups_of(self, rows: IntArray) -> Groups:
        """Groups of the decoding ``rows``, int32[num_rows], ascending.

        They change only if a row starts or stops decoding or is given back, or if ``publish`` gives
        a lease more shared pages. So a steady step costs nothing here.
        """
        if not self._are_groups_current or not np.array_equal(rows, self._grouped_rows):
            cost = self._group_cost_tokens
            if cost is not None:
                found = self.cache.groups(self.rows.leases(rows), cost)
                self._groups = replace(found, members=rows[found.members])
            self._grouped_rows = rows
            self._are_groups_current = True
        return self._groups

    def grant_remaps(self, draft: Draft) -> None:
        """Grant the pages that ``publish`` has put in place of a row's own since the last plan.
        Steps planned earlier still read the row's old pages, which is safe as steps run in order:
        see the invariants of ``scheduler``."""
        for sequence, lease, indices in self._remaps:
            if not lease.released:
                pages = lease.pages[indices.start : indices.stop]
                draft.grant_row(sequence.row, indices, np.array(pages, dtype=np.int32))
        self._remaps.clear()

    def check(self) -> None:
        """Raise ``InvariantError`` if queue, rows and cache contradict each other. Slow."""
        self.cache.check()
        self.rows.check()
        held = [sequence for sequence in self.rows.sequences if sequence is not None]
        for sequence in held:
            capacity = len(sequence.held().pages) * self.cache.page_size
            if capacity != self.rows.capacity[sequence.row]:
                raise InvariantError(f"row {sequence.row} has another capacity than its lease")
            if self.cache.windows is not None and sequence.held().line != sequence.row:
                raise InvariantError(f"row {sequence.row} has the windows of another")
        if self.states is not None:
            self.states.check(held)
        adapters = Counter(s.request.adapter.id for s in held if s.request.adapter is not None)
        self.places.check(adapters)
        live = [s for s in held if s.phase is not Phase.RETIRING or s.returns]
        if len(live) + self.num_waiting != len(self.live):
            raise InvariantError("a live request is neither waiting nor in a row")
        self._samples.check()
        prefilling = [s for s in held if s.phase is Phase.PREFILLING]
        if sorted(prefilling, key=by_precedence) != self.prefilling:
            raise InvariantError("not exactly the prefilling sequences are listed as such")

    def _save_to_host(self, lease: Lease, tokens: IntArray, salt: str) -> None:
        """Let main memory keep what a lease has published, and what is needed to go on from it."""
        host, windows = self.cache.host, self.cache.windows
        if host is not None:
            pages = self.cache.finite_pages(lease)
            host.save(
                tokens,
                salt,
                pages,
                snapshots=self.cache.snapshots_along(lease),
                window_pages=(
                    EMPTY if windows is None else windows.worth_keeping(lease, len(pages))
                ),
            )

    def _queue_samples_of(self, leader: Sequence) -> None:
        """Queue the sequences that wait behind this one."""
        for sample in self._samples.let_go(leader):
            self.queue.push(sample)
            self.changes += 1

    def _windows_worth_keeping(self, sequence: Sequence) -> set[int]:
        """The pages before which windows are worth keeping: where this sequence diverges from the
        cached ones, and where it would itself begin if it came again."""
        parted = self.cache.cached_length(sequence.tokens, sequence.request.cache_key)
        size = self.cache.page_size
        return {parted // size, (len(sequence.tokens) - 1) // size}

    def _retire(self, sequence: Sequence) -> None:
        row = sequence.row
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        sequence.enter(Phase.RETIRING)
        self.rows.retire(row, still_accepting=sequence.returns)
        if not self.rows.in_flight[row]:
            self.release(sequence)
