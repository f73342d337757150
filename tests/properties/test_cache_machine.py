"""The radix cache against a model that is a plain set of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from minisgl_backend.cache.kv import Lease, Verified
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.plan import Groups
from tests.fakes.executor import tokens_of
from tests.properties.effort import examples


class CacheMachine(RuleBasedStateMachine):
    """Leases come, grow, publish and go.

    The model: for each page that a match can find, the salt and the prefix of tokens that it was
    published under; the leases whose prefix no match finds any more; and the pages that may hold
    NaN. A page that is evicted leaves the model when it is handed out again.
    """

    leases = Bundle("leases")

    @initialize(page_size=st.sampled_from([1, 2, 16, 64]), num_pages=st.integers(1, 24))
    def start(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(num_pages, page_size)
        self.published: dict[tuple[str, bytes], int] = {}
        self.held: dict[Lease, tuple[str, list[int]]] = {}
        self.detached: set[Lease] = set()
        self.promised: dict[Lease, tuple[str, bytes]] = {}
        self.suspects: set[int] = set()

    def stretch(self, pattern: list[int], rest: int) -> list[int]:
        """Each number of ``pattern`` fills a page; ``rest`` more tokens follow."""
        whole = [number for number in pattern for _ in range(self.page_size)]
        return whole + [0] * min(rest, self.page_size - 1)

    def longest_prefix(self, salt: str, tokens: list[int]) -> list[int]:
        """The pages of the longest published prefix of ``tokens`` without the last one."""
        pages = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.published.get((salt, tokens_of(tokens[:end]).tobytes()))
            if page is None:
                break
            pages.append(page)
        return pages

    def handed_out(self, pages: list[int]) -> None:
        """``pages`` were free or evicted; those that may hold NaN are named, and no others."""
        gone = set(pages)
        named = self.cache.take_broken().tolist()
        assert len(named) == len(set(named))
        assert set(named) <= self.suspects, "pages are cleared without need"
        self.suspects -= set(named)
        assert not gone & self.suspects, "pages with NaN are handed out"
        self.published = {key: page for key, page in self.published.items() if page not in gone}

    @rule(
        target=leases,
        pattern=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        rest=st.integers(0, 63),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def acquire(self, pattern: list[int], rest: int, salt: str) -> Lease:
        tokens = self.stretch(pattern, rest)
        expected = self.longest_prefix(salt, tokens)
        assert self.cache.match_length(tokens_of(tokens), salt) == len(expected) * self.page_size
        lease = self.cache.acquire(tokens_of(tokens), salt)
        assert lease.pages.tolist() == expected
        assert lease.num_shared == len(expected)
        self.held[lease] = (salt, tokens)
        return lease

    @rule(lease=leases, num_tokens=st.integers(1, 600))
    def grow(self, lease: Lease, num_tokens: int) -> None:
        before = lease.pages.tolist()
        available = self.cache.num_free + self.cache.num_evictable
        missing = max(0, -(-num_tokens // self.page_size) - len(before))
        assert self.cache.grow(lease, num_tokens) == (missing <= available)
        added = lease.pages.tolist()[len(before) :]
        assert len(added) == (missing if missing <= available else 0)
        self.handed_out(added)

    @rule(lease=leases, other=leases)
    def grow_each(self, lease: Lease, other: Lease) -> None:
        both = [lease] if lease is other else [lease, other]
        possible = len(both) <= self.cache.num_free + self.cache.num_evictable
        pages = self.cache.grow_each(both)
        assert (pages is not None) == possible
        if pages is not None:
            assert pages.tolist() == [held.pages[-1] for held in both]
            self.handed_out(pages.tolist())

    @rule(lease=leases, num_tokens=st.integers(0, 600), verified=st.sampled_from(Verified))
    def publish(self, lease: Lease, num_tokens: int, verified: Verified) -> None:
        salt, tokens = self.held[lease]
        shared = lease.num_shared * self.page_size
        tokens = tokens[: max(shared, min(num_tokens, len(lease.pages) * self.page_size))]
        before = lease.pages.tolist()
        written = before[: -(-len(tokens) // self.page_size)]
        if verified is Verified.ALL:
            self.suspects -= set(written)
        elif verified is Verified.OWN:
            self.suspects -= set(written[lease.num_shared :])
        else:
            self.suspects |= set(written[lease.num_shared :])
        changed = self.cache.publish(lease, tokens_of(tokens), verified=verified)
        whole = len(tokens) // self.page_size * self.page_size
        if lease in self.promised and 4 * whole >= len(self.promised[lease][1]):
            del self.promised[lease]
        after = lease.pages.tolist()
        if lease not in self.detached:
            for index in range(len(tokens) // self.page_size):
                key = (salt, tokens_of(tokens[: (index + 1) * self.page_size]).tobytes())
                known = self.published.setdefault(key, after[index])
                assert after[index] == known, "the lease uses the page that all use"
        assert [i for i in range(len(before)) if before[i] != after[i]] == list(changed)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        self.cache.release(lease)
        del self.held[lease]
        self.promised.pop(lease, None)

    @rule(lease=leases)
    def promise(self, lease: Lease) -> None:
        if lease in self.promised:
            return
        salt, tokens = self.held[lease]
        self.cache.promise(lease, tokens_of(tokens))
        num_pages = len(tokens) // self.page_size
        if num_pages > lease.num_shared:
            self.promised[lease] = (salt, tokens_of(tokens[: num_pages * self.page_size]).tobytes())

    @rule(chosen=st.lists(leases, unique=True, max_size=6), cost=st.sampled_from([0, 1, 20]))
    def group(self, chosen: list[Lease], cost: int) -> None:
        """Each group reads the same pages, and saves enough; the groups of a lease have no gaps. If
        nothing saves too little, they reach as far as leases share pages."""
        groups = self.cache.groups(chosen, cost)
        ends = dict.fromkeys(range(len(chosen)), 0)
        first = 0
        for size, begin, end in zip(groups.sizes, groups.begins, groups.ends, strict=True):
            members = groups.members[first : first + size].tolist()
            first += size
            pages = chosen[members[0]].pages[begin:end]
            for member in members:
                assert ends[member] == begin
                assert end <= chosen[member].num_shared
                assert chosen[member].pages[begin:end] == pages
                ends[member] = end
            assert len(set(members)) == size > 1
            assert (end - begin) * (size - 1) * self.page_size > cost * size
        if cost == 0:
            for index, lease in enumerate(chosen):
                shared = [
                    sum(a == b for a, b in zip(lease.pages, other.pages, strict=False))
                    for other in chosen
                    if other is not lease
                ]
                assert ends[index] == max(shared, default=0) or self.levels(groups, index) == 4

    def levels(self, groups: Groups, member: int) -> int:
        return int(np.count_nonzero(groups.members == member))

    @rule(lease=consumes(leases))
    def discard(self, lease: Lease) -> None:
        salt, tokens = self.held.pop(lease)
        self.promised.pop(lease, None)
        shared = lease.pages[: lease.num_shared].tolist()
        used = {page for other in self.held for page in other.pages[: other.num_shared]}
        dropped = {*lease.pages.tolist()} - used
        for index, page in enumerate(shared):
            if page in used and page not in self.suspects:
                continue
            gone = (salt, tokens_of(tokens[: (index + 1) * self.page_size]).tobytes())
            if self.published.get(gone) == page:
                keys = [k for k in self.published if k[0] == salt and k[1].startswith(gone[1])]
                dropped |= {self.published.pop(key) for key in keys} - used
                for other in self.held:
                    if page in other.pages[: other.num_shared]:
                        self.detached.add(other)
            break
        free = self.cache.num_free
        self.cache.discard(lease)
        assert self.cache.num_free >= free + len(set(lease.pages) - used)
        self.suspects |= dropped

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.cache.num_cached >= self.cache.num_evictable

    @invariant()
    def promises_are_known(self) -> None:
        for salt, tokens in getattr(self, "held", {}).values():
            expected = max((self.in_common(salt, tokens, of) for of in self.promised), default=0)
            assert self.cache.promised_length(tokens_of(tokens), salt) == expected

    def in_common(self, salt: str, tokens: list[int], lease: Lease) -> int:
        """How many of ``tokens``, except the last, are in whole pages that a lease has promised."""
        of_salt, promised = self.promised[lease]
        whole, count = tokens_of(tokens[:-1]).tobytes(), 0
        page = 4 * self.page_size
        while of_salt == salt and len(whole) >= (count + 1) * page <= len(promised):
            if whole[: (count + 1) * page] != promised[: (count + 1) * page]:
                break
            count += 1
        return count * self.page_size

    @invariant()
    def no_page_is_writable_by_two(self) -> None:
        private = [
            page
            for lease in getattr(self, "held", {})
            for page in lease.pages[lease.num_shared :].tolist()
        ]
        assert len(private) == len(set(private))

    @invariant()
    def pinned_prefixes_stay(self) -> None:
        for lease in getattr(self, "held", {}):
            salt, tokens = self.held[lease]
            end = lease.num_shared * self.page_size
            if end and lease not in self.detached:
                longer = tokens_of([*tokens[:end], 0])
                assert self.cache.match_length(longer, salt) >= end

    def teardown(self) -> None:
        for lease in getattr(self, "held", {}):
            self.cache.release(lease)
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.num_evictable == self.cache.num_cached
            whole = self.cache.acquire(np.empty(0, dtype=np.int32), "")
            assert self.cache.grow(whole, self.cache.num_pages * self.page_size)
            self.handed_out(whole.pages.tolist())
            assert (self.cache.num_free, self.cache.num_cached) == (0, 0)


CacheMachine.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase
