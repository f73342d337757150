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

from minisgl_backend.cache.kv import Lease, RadixCache
from tests.fakes.executor import tokens_of
from tests.properties.effort import examples


class CacheMachine(RuleBasedStateMachine):
    """Leases come, grow, publish and go.

    The model: for each page, the salt and the prefix of tokens that it was published under. A page
    that is evicted leaves the model when it is handed out again.
    """

    leases = Bundle("leases")

    @initialize(page_size=st.sampled_from([1, 2, 16, 64]), num_pages=st.integers(1, 24))
    def start(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(num_pages, page_size)
        self.published: dict[tuple[str, bytes], int] = {}
        self.held: dict[Lease, tuple[str, list[int]]] = {}

    def stretch(self, pattern: list[int], rest: int) -> list[int]:
        """Each number of ``pattern`` fills a page; then ``rest`` more tokens."""
        whole = [number for number in pattern for _ in range(self.page_size)]
        return whole + [0] * min(rest, self.page_size - 1)

    def longest_prefix(self, salt: str, tokens: list[int]) -> list[int]:
        """Pages of the longest published prefix of all but the last of ``tokens``."""
        pages = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.published.get((salt, tokens_of(tokens[:end]).tobytes()))
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, pages: list[int]) -> None:
        """``pages`` were evicted."""
        gone = set(pages)
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
        self.forget(added)

    @rule(lease=leases, other=leases)
    def grow_each(self, lease: Lease, other: Lease) -> None:
        both = [lease] if lease is other else [lease, other]
        possible = len(both) <= self.cache.num_free + self.cache.num_evictable
        pages = self.cache.grow_each(both)
        assert (pages is not None) == possible
        if pages is not None:
            assert pages.tolist() == [held.pages[-1] for held in both]
            self.forget(pages.tolist())

    @rule(lease=leases, num_tokens=st.integers(0, 600))
    def publish(self, lease: Lease, num_tokens: int) -> None:
        salt, tokens = self.held[lease]
        tokens = tokens[: min(num_tokens, len(lease.pages) * self.page_size)]
        before = lease.pages.tolist()
        changed = self.cache.publish(lease, tokens_of(tokens), verified=True)
        after = lease.pages.tolist()
        for index in range(len(tokens) // self.page_size):
            key = (salt, tokens_of(tokens[: (index + 1) * self.page_size]).tobytes())
            known = self.published.setdefault(key, after[index])
            assert after[index] == known, "the lease uses the page that everybody uses"
        assert [i for i in range(len(before)) if before[i] != after[i]] == list(changed)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        self.cache.release(lease)
        del self.held[lease]

    @rule(lease=consumes(leases))
    def discard(self, lease: Lease) -> None:
        salt, tokens = self.held.pop(lease)
        shared = lease.pages[: lease.num_shared]
        used = {page for other in self.held for page in other.pages[: other.num_shared]}
        private = lease.pages[lease.num_shared :].tolist()
        free = self.cache.num_free
        freed = self.cache.discard(lease).tolist()
        assert len(freed) == len(set(freed)) == self.cache.num_free - free
        assert set(freed) >= {*private, *shared} - used
        num_kept = sum(page in used for page in shared)
        if num_kept < len(shared):
            gone = tokens_of(tokens[: (num_kept + 1) * self.page_size]).tobytes()
            self.published = {
                key: page
                for key, page in self.published.items()
                if key[0] != salt or not key[1].startswith(gone)
            }

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert self.cache.num_cached >= self.cache.num_evictable

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
            if end:
                longer = tokens_of([*tokens[:end], 0])
                assert self.cache.match_length(longer, salt) >= end

    def teardown(self) -> None:
        for lease in getattr(self, "held", {}):
            self.cache.release(lease)
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.num_evictable == self.cache.num_cached
            whole = self.cache.acquire(np.empty(0, dtype=np.int32))
            assert self.cache.grow(whole, self.cache.num_pages * self.page_size)
            assert (self.cache.num_free, self.cache.num_cached) == (0, 0)


CacheMachine.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase
