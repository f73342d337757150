"""The oracle can see: bugs that such planners have had, put in on purpose, are all noticed.

Each bug is tried with the planner's own checks and without them; without them, the oracle alone
must notice a wrong token. Without a bug the same workloads pass.
"""

from __future__ import annotations

import collections.abc
import random
from array import array
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.cache.host import HostCache, HostPrefix
from minisgl_backend.cache.host_windows import HostWindows
from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.pages import PagePool, as_array
from minisgl_backend.cache.radix import Node, RadixTree
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.cache.windows import WindowLease, WindowPages
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import MTP_GUESS, Groups, HostCopies, SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, PromptLogprobs, RequestId
from minisgl_backend.scheduling.draft import Draft
from minisgl_backend.scheduling.guess_planner import GuessPlanner
from minisgl_backend.scheduling.guesses import Guesser
from minisgl_backend.scheduling.intake import Intake
from minisgl_backend.scheduling.lifecycle import Lifecycle
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.sequence import Phase, Sequence
from minisgl_backend.scheduling.state_snapshots import StateSnapshots
from tests.fakes.executor import FakeExecutor
from tests.fakes.harness import (
    Harness,
    Setup,
    random_setup,
    run_randomly,
    with_guesses,
    with_host,
    with_host_states,
    with_host_windows,
    with_mtp,
)
from tests.properties.effort import examples

NUM_SEEDS = examples(150)
NUM_SOUND_SEEDS = examples(50)
"""More than any bug needs to be noticed."""

Inject = Callable[[pytest.MonkeyPatch], None]
Kept = collections.abc.Sequence[tuple[int, int]]
"""Snapshots, each with the number of pages before it."""


def freed_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Row and pages go back at once, even if a step is still to write to them."""

    def retire_at_once(self: Lifecycle, sequence: Sequence) -> None:
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        sequence.enter(Phase.RETIRING)
        self.rows.retire(sequence.row, still_accepting=sequence.returns)
        self.rows.in_flight[sequence.row] = 0
        self.release(sequence)

    patch.setattr(Lifecycle, "_retire", retire_at_once)


def not_pinned(patch: pytest.MonkeyPatch) -> None:
    """A prefix in use can be evicted."""
    pin_path, insert = RadixTree._pin_path, RadixTree.insert

    def unpin_node(tree: RadixTree, node: Node) -> None:
        while node.parent is not None:
            if node not in tree._recency:
                tree.num_evictable += len(node.pages)
            node.pins = 0
            tree._recency[node] = None
            tree._recency.move_to_end(node)
            node = node.parent

    def pin_nothing(
        self: RadixTree, node: Node, path: Iterable[tuple[Node, int]]
    ) -> tuple[Node, IntArray]:
        last, pages = pin_path(self, node, path)
        unpin_node(self, last)
        return last, pages

    def insert_unpinned(
        self: RadixTree, node: Node, tokens: IntArray, pages: IntArray, salt: bytes
    ) -> tuple[Node, IntArray]:
        last, known = insert(self, node, tokens, pages, salt)
        unpin_node(self, last)
        return last, known

    patch.setattr(RadixTree, "_pin_path", pin_nothing)
    patch.setattr(RadixTree, "insert", insert_unpinned)
    patch.setattr(RadixTree, "unpin", lambda self, node: EMPTY)


def released_twice(patch: pytest.MonkeyPatch) -> None:
    """The pages of an ended request go back to the pool twice."""
    release = RadixCache.release

    def twice(self: RadixCache, lease: Lease) -> None:
        private = lease.pages[lease.num_shared :]
        release(self, lease)
        self._pool.free(np.array(private, dtype=np.int32))

    patch.setattr(RadixCache, "release", twice)


def wrong_key(patch: pytest.MonkeyPatch) -> None:
    """Pages are found by the first token of each, without looking at the others."""

    def first_token(
        self: RadixTree, parent: Node, tokens: IntArray, page: int, salt: bytes
    ) -> bytes:
        return salt + tokens[page * self.page_size :][:1].tobytes()

    def trust_the_key(self: RadixTree, a: IntArray, b: IntArray) -> int:
        return min(len(a), len(b)) // self.page_size

    patch.setattr(RadixTree, "_key", first_token)
    patch.setattr(RadixTree, "_agreed_pages", trust_the_key)


def matched_in_full(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is cached to its end leaves no token to compute."""
    acquire = RadixCache.acquire

    def acquire_all(self: RadixCache, tokens: IntArray, salt: str, *, resumed_at: int = 0) -> Lease:
        return acquire(self, np.append(tokens, np.int32(0)), salt, resumed_at=resumed_at)

    patch.setattr(RadixCache, "acquire", acquire_all)


def copied_in_part(patch: pytest.MonkeyPatch) -> None:
    """A sample gets its leader's last page without the last position that is copied."""
    copy = Draft.copy
    patch.setattr(
        Draft,
        "copy",
        lambda self, source, target, length: copy(self, source, target, length - 1),
    )


def grouped_too_far(patch: pytest.MonkeyPatch) -> None:
    """Rows of a group are said to share one page more than they do."""
    groups = RadixCache.groups

    def one_more(self: RadixCache, leases: list[Lease], cost_tokens: int) -> Groups:
        found = groups(self, leases, cost_tokens)
        return replace(found, ends=found.ends + np.int32(1))

    patch.setattr(RadixCache, "groups", one_more)


def grouped_with_others(patch: pytest.MonkeyPatch) -> None:
    """A row is named in place of another."""
    groups = RadixCache.groups

    def rotated(self: RadixCache, leases: list[Lease], cost_tokens: int) -> Groups:
        found = groups(self, leases, cost_tokens)
        members = (found.members + 1) % max(len(leases), 1)
        return replace(found, members=members.astype(np.int32))

    patch.setattr(RadixCache, "groups", rotated)


def misplaced_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A state is found after one page less than it stands for."""
    attach = RadixTree.attach

    def attach_before(self: RadixTree, node: Node, num_pages: int, snapshot: int) -> bool:
        return attach(self, node, max(1, num_pages - 1), snapshot)

    patch.setattr(RadixTree, "attach", attach_before)


def stale_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A state is overwritten while a prefix still has it."""

    def take_any(self: SnapshotCache, *, rolls: bool = False) -> int | None:
        return 0 if self.num_snapshots else None

    def keep_nothing(self: SnapshotCache, lease: Lease, num_tokens: int, snapshot: int) -> None:
        self._require_held(lease)
        assert lease.node is not None
        self._tree.attach(lease.node, num_tokens // self.page_size, snapshot)

    patch.setattr(SnapshotCache, "take_snapshot", take_any)
    patch.setattr(SnapshotCache, "attach_snapshot", keep_nothing)
    patch.setattr(SnapshotCache, "return_snapshot", lambda self, snapshot: None)


def kept_late(patch: pytest.MonkeyPatch) -> None:
    """The state of a decoding row is kept one step later than noted."""
    keep = StateSnapshots.keep

    def of_step_before(
        self: StateSnapshots, rows: IntArray, positions: IntArray, draft: Draft
    ) -> None:
        keep(self, rows, positions - 1, draft)

    patch.setattr(StateSnapshots, "keep", of_step_before)


def kept_twice(patch: pytest.MonkeyPatch) -> None:
    """A sequence that returns overwrites a state that others can already find."""
    release = Lifecycle.release

    def hold_on(self: Lifecycle, sequence: Sequence) -> None:
        kept = sequence.kept
        release(self, sequence)
        if kept is not None and sequence.phase is Phase.WAITING:
            sequence.kept = kept

    patch.setattr(Lifecycle, "release", hold_on)


def window_left_early(patch: pytest.MonkeyPatch) -> None:
    """A window page is given back while one more position sees it."""
    slide = WindowPages.slide

    def further(
        self: WindowPages, lease: WindowLease, position: int, *, num_verified: int = 0
    ) -> None:
        slide(self, lease, position + 1, num_verified=num_verified)

    patch.setattr(WindowPages, "slide", further)


def window_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """A prefix is taken for cached although its window is not."""
    patch.setattr(WindowPages, "usable", lambda self, pages: len(pages))


def window_line_not_written(patch: pytest.MonkeyPatch) -> None:
    """A row is not told of the window that it begins with."""

    def seat_only(self: WindowPages, lease: WindowLease, line: int, keeps: Iterable[int]) -> None:
        lease.line = line

    patch.setattr(WindowPages, "seat", seat_only)


def wrong_guesses_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """A row decodes on after all its guesses, the wrong ones included."""

    def go_on(self: RunningRows, row: int, num_wrong: int) -> None:
        self.start_decoding(row)

    patch.setattr(RunningRows, "go_on_from_guesses", go_on)


def accepted_after_a_wrong_guess(patch: pytest.MonkeyPatch) -> None:
    """Every guess is taken for the token that was sampled in its place."""
    take = Intake._take_guessed

    def believe(
        self: Intake,
        plan: StepPlan,
        tokens: SampledTokens,
        scored: list[tuple[RequestId, PromptLogprobs]],
    ) -> StepResult:
        checks, believed = plan.checks, plan.checks.tokens.copy()
        believed[1:] = tokens.token_ids[: len(believed) - 1]
        plan = replace(plan, checks=replace(checks, tokens=believed))
        return take(self, plan, tokens, scored)

    patch.setattr(Intake, "_take_guessed", believe)


def one_right_guess_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A row goes on one position before the one that its right guesses reach."""
    go_on = RunningRows.go_on_from_guesses

    def too_early(self: RunningRows, row: int, num_wrong: int) -> None:
        go_on(self, row, num_wrong)
        if self.decoding[row]:
            self.planned[row] -= 1

    patch.setattr(RunningRows, "go_on_from_guesses", too_early)


def kept_with_guesses(patch: pytest.MonkeyPatch) -> None:
    """Guesses pass the position at which the state of a row is kept, and it is kept after them."""
    keep, kept_next = StateSnapshots.keep, StateSnapshots.kept_next

    def when_passed(
        self: StateSnapshots, rows: IntArray, positions: IntArray, draft: Draft
    ) -> None:
        keep(self, rows, np.minimum(positions, self._rows.keeps_at[rows]), draft)

    def further(self: StateSnapshots, row: int, position: int) -> int:
        return kept_next(self, row, position) + self._kept_every

    patch.setattr(StateSnapshots, "keep", when_passed)
    patch.setattr(StateSnapshots, "kept_next", further)


def guessed_beside_many(patch: pytest.MonkeyPatch) -> None:
    """Rows have guesses, however many there are."""
    of_rows = Guesser.of_rows

    def of_any(
        self: Guesser, ready: IntArray, lookahead: Lookahead | None = None
    ) -> dict[int, IntArray]:
        self._max_rows = len(self._rows.sequences)
        return of_rows(self, ready, lookahead)

    patch.setattr(Guesser, "of_rows", of_any)


def mtp_passes_without_pages(patch: pytest.MonkeyPatch) -> None:
    """The MTP layer guesses for rows that have no pages for its passes."""
    patch.setattr(GuessPlanner, "_reach", lambda self, row, short: 10_000)
    patch.setattr(GuessPlanner, "_grow_up_to", lambda self, end, row, short, draft: None)


def mtp_guesses_of_an_earlier_step(patch: pytest.MonkeyPatch) -> None:
    """Rows check what the MTP layer has guessed once, wherever they have got to."""
    of_rows = Guesser.of_rows

    def of_any_position(
        self: Guesser, ready: IntArray, lookahead: Lookahead | None = None
    ) -> dict[int, IntArray]:
        has_some = self._mtp_at >= 0
        self._mtp_at[has_some] = self._rows.planned[has_some]
        return of_rows(self, ready, lookahead)

    patch.setattr(Guesser, "of_rows", of_any_position)


def mtp_guesses_taken_for_right(patch: pytest.MonkeyPatch) -> None:
    """Guesses that stay on the device are taken for the tokens that were sampled in their place."""
    take = Intake.take

    def believe(self: Intake, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        if tokens.checked is not None:
            is_left = np.flatnonzero(plan.checks.tokens <= MTP_GUESS)
            believed = tokens.checked.copy()
            believed[is_left] = tokens.token_ids[is_left - 1]
            tokens = replace(tokens, checked=believed)
        return take(self, plan, tokens)

    patch.setattr(Intake, "take", believe)


def not_moved_back(patch: pytest.MonkeyPatch) -> None:
    """Rows go on as if all their guesses had been right."""

    def as_planned(plan: StepPlan, before: StepPlan, tokens: SampledTokens) -> StepPlan:
        return replace(plan, assumes_right=False)

    patch.setattr("tests.fakes.harness.moved_back", as_planned)


def saved_late(patch: pytest.MonkeyPatch) -> None:
    """Pages are saved one plan later, when others may have written to them."""
    take = HostCache.take_saves
    due: dict[HostCache, HostCopies] = {}

    def take_older(self: HostCache) -> HostCopies:
        older, due[self] = due.get(self, HostCopies()), take(self)
        return older

    patch.setattr(HostCache, "take_saves", take_older)


def saved_after_loads(patch: pytest.MonkeyPatch) -> None:
    """Pages are saved after others of the same step are cleared, granted and loaded."""
    save, load = FakeExecutor._save, FakeExecutor._load
    due: list[HostCopies] = []

    def load_first(self: FakeExecutor, loads: HostCopies) -> None:
        load(self, loads)
        save(self, due.pop())

    patch.setattr(FakeExecutor, "_save", lambda self, saves: due.append(saves))
    patch.setattr(FakeExecutor, "_load", load_first)


def saved_to_an_evicted_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot that is given to another prefix before it is saved to gets the page of the first."""
    save = HostCache.save

    def save_first(
        self: HostCache, tokens: IntArray, salt: str, pages: IntArray, **others: Any
    ) -> None:
        before = dict(self._pending)
        save(self, tokens, salt, pages, **others)
        self._pending |= before

    patch.setattr(HostCache, "save", save_first)


def saved_unverified(patch: pytest.MonkeyPatch) -> None:
    """Pages are saved that may hold NaN."""
    patch.setattr(
        NaiveCache, "finite_pages", lambda self, lease: as_array(lease.pages[: lease.num_shared])
    )


def loaded_from_stale_slots(patch: pytest.MonkeyPatch) -> None:
    """A prefix that was found once is found there again, though its slots were given to others."""
    match = HostCache.match
    found: dict[tuple[HostCache, str, bytes], HostPrefix] = {}

    def match_once(self: HostCache, tokens: IntArray, salt: str) -> HostPrefix:
        return found.setdefault((self, salt, tokens.tobytes()), match(self, tokens, salt))

    patch.setattr(HostCache, "match", match_once)


def loaded_to_the_next_page(patch: pytest.MonkeyPatch) -> None:
    """Loaded pages are one place too far along."""
    load = Draft.load_pages

    def rotated(self: Draft, pages: array[int], slots: IntArray) -> None:
        load(self, pages, np.roll(slots, 1))

    patch.setattr(Draft, "load_pages", rotated)


def loaded_in_full(patch: pytest.MonkeyPatch) -> None:
    """A prompt that main memory has to its end leaves no token to compute."""
    match = HostCache.match

    def match_all(self: HostCache, tokens: IntArray, salt: str) -> HostPrefix:
        return match(self, np.append(tokens, np.int32(0)), salt)

    patch.setattr(HostCache, "match", match_all)


def states_saved_too_early(patch: pytest.MonkeyPatch) -> None:
    """States are found one page before the tokens that they are of."""
    along = SnapshotCache.snapshots_along

    def earlier(self: SnapshotCache, lease: Lease) -> Kept:
        return [(num_pages - 1, number) for num_pages, number in along(self, lease)]

    patch.setattr(SnapshotCache, "snapshots_along", earlier)


def states_saved_to_an_evicted_slot(patch: pytest.MonkeyPatch) -> None:
    """A state slot that is given away before it is saved to gets the states of the first prefix."""
    save = HostCache._save_states

    def save_first(self: HostCache, node: Node, num_pages: int, snapshot: int) -> None:
        before = dict(self._pending_states)
        save(self, node, num_pages, snapshot)
        self._pending_states |= before

    patch.setattr(HostCache, "_save_states", save_first)


def states_loaded_over_those_begun_from(patch: pytest.MonkeyPatch) -> None:
    """States are loaded into a snapshot from which another chunk of the plan begins."""
    take = SnapshotCache.take_snapshot

    def take_any(
        self: SnapshotCache, *, rolls: bool = False, spared: Set[int] = frozenset()
    ) -> int | None:
        return take(self, rolls=rolls)

    patch.setattr(SnapshotCache, "take_snapshot", take_any)


def states_saved_late(patch: pytest.MonkeyPatch) -> None:
    """Snapshots are saved one plan later, when they may have other states."""
    take = HostCache.take_saves
    due: dict[HostCache, HostCopies] = {}

    def take_older(self: HostCache) -> HostCopies:
        now = take(self)
        older, due[self] = due.get(self, HostCopies()), now
        states = older.snapshots, older.state_slots
        return HostCopies(now.pages, now.slots, now.window_pages, now.window_slots, *states)

    patch.setattr(HostCache, "take_saves", take_older)


def states_loaded_from_another_slot(patch: pytest.MonkeyPatch) -> None:
    """States are those of another prefix."""
    load = Draft.load_states
    loaded: list[int] = []

    def load_last(self: Draft, snapshot: int, state_slot: int) -> None:
        loaded.append(state_slot)
        load(self, snapshot, loaded[max(0, len(loaded) - 2)])

    patch.setattr(Draft, "load_states", load_last)


def loaded_states_attached_to_all(patch: pytest.MonkeyPatch) -> None:
    """A snapshot with loaded states is found at the end of the prompt, not where they belong."""
    resume = StateSnapshots.resume

    def resume_late(self: StateSnapshots, sequence: Sequence) -> int:
        resumed_at = resume(self, sequence)
        if resumed_at:
            size, (_, number) = self._page_size, sequence.snapshots.pop()
            end = (len(sequence.tokens) - 1) // size * size
            sequence.snapshots.append((end, number))
        return resumed_at

    patch.setattr(StateSnapshots, "resume", resume_late)


def pages_without_states_leased(patch: pytest.MonkeyPatch) -> None:
    """A lease has cached pages beyond the states that are loaded."""
    acquire = SnapshotCache.acquire

    def acquire_all(
        self: SnapshotCache, tokens: IntArray, salt: str, *, resumed_at: int = 0
    ) -> Lease:
        return acquire(self, tokens, salt, resumed_at=len(tokens) - 1 if resumed_at else 0)

    patch.setattr(SnapshotCache, "acquire", acquire_all)


def windows_saved_late(patch: pytest.MonkeyPatch) -> None:
    """Window pages are saved one plan later, when others may have written to them."""
    take = HostWindows.take_saves
    due: dict[HostWindows, tuple[IntArray, IntArray]] = {}

    def take_older(self: HostWindows) -> tuple[IntArray, IntArray]:
        older, due[self] = due.get(self, (EMPTY, EMPTY)), take(self)
        return older

    patch.setattr(HostWindows, "take_saves", take_older)


def windows_loaded_to_the_next_page(patch: pytest.MonkeyPatch) -> None:
    """Loaded window pages are one place too far along."""
    load = Draft.load_window_pages

    def rotated(self: Draft, window_pages: IntArray, window_slots: IntArray) -> None:
        load(self, window_pages, np.roll(window_slots, 1))

    patch.setattr(Draft, "load_window_pages", rotated)


def windows_loaded_but_for_the_first(patch: pytest.MonkeyPatch) -> None:
    """A row that goes on after a loaded prefix does not have all of its window."""
    load = Draft.load_window_pages

    def cut(self: Draft, window_pages: IntArray, window_slots: IntArray) -> None:
        load(self, window_pages[1:], window_slots[1:])

    patch.setattr(Draft, "load_window_pages", cut)


def without_guards(patch: pytest.MonkeyPatch) -> None:
    """Remove the checks that refuse broken bookkeeping, so that only tokens can tell."""

    def free_unseen(self: PagePool, pages: IntArray) -> None:
        room = self._stack[self.num_free :]
        pages = pages[: len(room)]  # more free pages than there are
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)
        self._broken.append(pages[self._is_suspect[pages]])
        self.trust(pages)

    patch.setattr(PagePool, "free", free_unseen)
    patch.setattr(NaiveCache, "_require_held", lambda self, lease: None)
    patch.setattr(RunningRows, "check", lambda self: None)


BUGS: dict[Inject, int] = {
    freed_in_flight: 6,
    not_pinned: 7,
    released_twice: 6,
    wrong_key: 0,
    matched_in_full: 0,
    copied_in_part: 38,
    grouped_too_far: 0,
    grouped_with_others: 11,
    misplaced_snapshot: 6,
    stale_snapshot: 6,
    kept_late: 6,
    kept_twice: 67,
    window_left_early: 0,
    window_not_looked_for: 0,
    window_line_not_written: 0,
}
"""Each bug, and the seed that is tried first: one that notices it, so that few others are run."""
BUGS_OF_GUESSES: dict[Inject, int] = {
    wrong_guesses_not_taken_back: 0,
    accepted_after_a_wrong_guess: 0,
    one_right_guess_forgotten: 0,
    kept_with_guesses: 11,
    guessed_beside_many: 21,
}
"""The same in workloads with guesses."""
BUGS_OF_MTP: dict[Inject, int] = {
    mtp_passes_without_pages: 0,
    mtp_guesses_of_an_earlier_step: 0,
    mtp_guesses_taken_for_right: 0,
    not_moved_back: 0,
}
"""The same in workloads with guesses of an MTP layer."""
BUGS_OF_HOST: dict[Inject, int] = {
    saved_late: 22,
    saved_after_loads: 22,
    saved_to_an_evicted_slot: 90,
    saved_unverified: 57,
    loaded_from_stale_slots: 0,
    loaded_to_the_next_page: 3,
    loaded_in_full: 2,
}
"""The same in workloads with prefixes in main memory."""
BUGS_OF_HOST_STATES: dict[Inject, int] = {
    states_saved_too_early: 0,
    states_saved_to_an_evicted_slot: 32,
    states_loaded_over_those_begun_from: 113,
    states_saved_late: 25,
    states_loaded_from_another_slot: 3,
    loaded_states_attached_to_all: 3,
    pages_without_states_leased: 3,
}
"""The same with recurrent states there."""
BUGS_OF_HOST_WINDOWS: dict[Inject, int] = {
    windows_saved_late: 3,
    windows_loaded_to_the_next_page: 3,
    windows_loaded_but_for_the_first: 0,
}
"""The same with window pages there."""
ALL_BUGS = (
    BUGS | BUGS_OF_GUESSES | BUGS_OF_MTP | BUGS_OF_HOST | BUGS_OF_HOST_STATES | BUGS_OF_HOST_WINDOWS
)


def as_drawn(setup: Setup) -> Setup:
    """Without guesses."""
    return setup


def noticed(inject: Inject, *, by: tuple[type[Exception], ...], check: bool) -> bool:
    """Whether a workload of some seed fails with one of the errors; others do not count."""
    changed = as_drawn
    if inject in BUGS_OF_GUESSES:
        changed = with_guesses
    if inject in BUGS_OF_MTP:
        changed = with_mtp
    if inject in BUGS_OF_HOST:
        changed = with_host
    if inject in BUGS_OF_HOST_STATES:
        changed = with_host_states
    if inject in BUGS_OF_HOST_WINDOWS:
        changed = with_host_windows
    for seed in (ALL_BUGS[inject], *range(NUM_SEEDS)):
        rng = random.Random(seed)
        try:
            run_randomly(Harness(changed(random_setup(rng))), rng, check=check)
        except by:
            return True
        except (InvariantError, IndexError, KeyError):
            continue
    return False


@pytest.mark.parametrize(
    ("changed", "num_seeds"),
    [
        (as_drawn, NUM_SOUND_SEEDS),
        (with_guesses, NUM_SOUND_SEEDS // 5),
        (with_mtp, NUM_SOUND_SEEDS // 2),
        (with_host, NUM_SOUND_SEEDS // 2),
        (with_host_states, NUM_SOUND_SEEDS),
        (with_host_windows, NUM_SOUND_SEEDS),
    ],
)
def test_without_a_bug_all_workloads_pass(
    changed: Callable[[Setup], Setup], num_seeds: int
) -> None:
    for seed in range(num_seeds):
        rng = random.Random(seed)
        run_randomly(Harness(changed(random_setup(rng))), rng, check=True)


@pytest.mark.parametrize("inject", ALL_BUGS, ids=lambda inject: inject.__name__)
def test_a_check_or_the_oracle_notices(inject: Inject, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch)
    assert noticed(inject, by=(AssertionError, InvariantError), check=True)


@pytest.mark.parametrize("inject", ALL_BUGS, ids=lambda inject: inject.__name__)
def test_the_oracle_alone_notices(inject: Inject, monkeypatch: pytest.MonkeyPatch) -> None:
    without_guards(monkeypatch)
    inject(monkeypatch)
    assert noticed(inject, by=(AssertionError,), check=False)
