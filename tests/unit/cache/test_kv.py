"""Leases: what they share, what they own, what they must not do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray

CACHES: list[Callable[[int, int], KVCache]] = [RadixCache, NaiveCache]


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def computed(cache: KVCache, tokens: IntArray, salt: str = "") -> Lease:
    """A lease on the pages of ``tokens``, not published."""
    lease = cache.acquire(tokens, salt)
    assert cache.grow(lease, len(tokens))
    return lease


@pytest.mark.parametrize("make", CACHES)
def test_pages_are_granted_all_or_none(make: Callable[[int, int], KVCache]) -> None:
    cache = make(4, 2)
    lease = cache.acquire(ints(1, 2, 3), "")
    assert cache.grow(lease, 5)
    assert len(lease.pages) == 3
    assert cache.grow(lease, 6)
    assert len(lease.pages) == 3
    assert not cache.grow(lease, 9)
    assert cache.grow_each([lease, cache.acquire(ints(4), "")]) is None
    assert (len(lease.pages), cache.num_free) == (3, 1)
    pages = cache.grow_each([lease])
    assert pages is not None
    assert pages.tolist() == lease.pages[3:].tolist()
    cache.check()
    cache.release(lease)
    assert cache.num_free == 4
    cache.check()


@pytest.mark.parametrize("make", CACHES)
def test_a_released_lease_is_good_for_nothing(make: Callable[[int, int], KVCache]) -> None:
    cache = make(4, 1)
    lease = computed(cache, ints(1, 2))
    cache.release(lease)
    with pytest.raises(InvariantError, match="after its release"):
        cache.release(lease)
    with pytest.raises(InvariantError, match="after its release"):
        cache.grow(lease, 3)
    with pytest.raises(InvariantError, match="after its release"):
        cache.grow_each([lease])
    with pytest.raises(InvariantError, match="after its release"):
        cache.publish(lease, ints(1, 2), verified=Verified.ALL)


def test_a_naive_cache_shares_nothing() -> None:
    cache = NaiveCache(4, 1)
    first = computed(cache, ints(1, 2))
    assert not cache.publish(first, ints(1, 2), verified=Verified.ALL)
    assert cache.match_length(ints(1, 2, 3), "") == 0
    second = cache.acquire(ints(1, 2, 3), "")
    assert (len(second.pages), cache.num_cached, cache.num_evictable) == (0, 0, 0)


def test_the_last_token_is_left_to_compute() -> None:
    cache = RadixCache(4, 1)
    lease = computed(cache, ints(1, 2, 3))
    cache.publish(lease, ints(1, 2, 3), verified=Verified.ALL)
    assert cache.match_length(ints(1, 2, 3), "") == 2
    assert cache.acquire(ints(1, 2, 3), "").pages == lease.pages[:2]
    assert cache.acquire(ints(1, 2, 3, 4), "").pages == lease.pages
    cache.check()


def test_what_is_not_published_is_not_shared() -> None:
    cache = RadixCache(8, 2)
    lease = computed(cache, ints(1, 2, 3, 4))
    assert cache.match_length(ints(1, 2, 3, 4, 5), "") == 0
    cache.publish(lease, ints(1, 2, 3), verified=Verified.ALL)
    assert cache.match_length(ints(1, 2, 3, 4, 5), "") == 2
    cache.check()


def test_a_duplicate_gives_way_to_the_pages_that_were_there_first() -> None:
    cache = RadixCache(8, 1)
    first = computed(cache, ints(1, 2, 3))
    second = computed(cache, ints(1, 2, 9))
    assert not set(first.pages) & set(second.pages)
    assert cache.publish(first, ints(1, 2, 3), verified=Verified.ALL) == range(0)
    own = second.pages[2]
    assert cache.publish(second, ints(1, 2, 9), verified=Verified.ALL) == range(2)
    assert second.pages.tolist() == [*first.pages[:2].tolist(), own]
    assert (cache.num_free, cache.num_cached, cache.num_evictable) == (4, 4, 0)
    cache.check()
    cache.release(first)
    assert cache.num_evictable == 1
    cache.release(second)
    assert cache.num_evictable == 4
    cache.check()


def test_publishing_goes_on_where_it_ended() -> None:
    cache = RadixCache(8, 2)
    lease = computed(cache, ints(1, 2, 3, 4, 5))
    pages = lease.pages.tolist()
    for end in (1, 2, 3, 4, 4, 5):
        assert not cache.publish(lease, ints(1, 2, 3, 4, 5)[:end], verified=Verified.ALL)
        cache.check()
    assert (lease.pages.tolist(), lease.num_shared) == (pages, 2)


def test_pages_that_are_not_leased_cannot_be_published() -> None:
    cache = RadixCache(8, 1)
    lease = computed(cache, ints(1, 2))
    with pytest.raises(InvariantError, match="3 pages are published, 2 are leased"):
        cache.publish(lease, ints(1, 2, 3), verified=Verified.ALL)


def test_growth_evicts_what_nobody_uses() -> None:
    cache = RadixCache(4, 1)
    old = computed(cache, ints(1, 2))
    cache.publish(old, ints(1, 2), verified=Verified.ALL)
    cache.release(old)
    used = computed(cache, ints(3))
    cache.publish(used, ints(3), verified=Verified.ALL)
    lease = cache.acquire(ints(9), "")
    assert cache.grow(lease, 3)
    assert (cache.num_free, cache.num_cached) == (0, 1)
    assert cache.match_length(ints(3, 0), "") == 1
    assert not cache.grow(lease, 4)
    cache.check()


@pytest.mark.parametrize("make", CACHES)
def test_pages_are_broken_if_they_are_freed_before_they_are_verified(
    make: Callable[[int, int], KVCache],
) -> None:
    cache = make(8, 2)
    lease = computed(cache, ints(1, 2, 3, 4, 5, 6, 7))
    cache.publish(lease, ints(1, 2, 3), verified=Verified.NONE)
    cache.release(lease)
    assert cache.grow(computed(cache, ints(9)), 16), "all pages"
    assert sorted(cache.take_broken().tolist()) == lease.pages[:2].tolist()


@pytest.mark.parametrize("make", CACHES)
def test_the_pages_of_a_discarded_lease_are_broken(make: Callable[[int, int], KVCache]) -> None:
    cache = make(8, 2)
    lease = computed(cache, ints(1, 2, 3, 4, 5))
    cache.publish(lease, ints(1, 2, 3), verified=Verified.ALL)
    cache.discard(lease)
    cache.check()
    assert cache.num_free == 8
    assert sorted(cache.take_broken().tolist()) == lease.pages.tolist()
    assert cache.match_length(ints(1, 2, 3, 4, 5), "") == 0
    with pytest.raises(InvariantError, match="after its release"):
        cache.discard(lease)


def test_pages_that_others_have_verified_outlive_a_discarded_lease() -> None:
    cache = RadixCache(8, 1)
    first = computed(cache, ints(1, 2))
    cache.publish(first, ints(1, 2), verified=Verified.ALL)
    second = computed(cache, ints(1, 2, 3))
    cache.discard(second)
    cache.check()
    assert cache.take_broken().tolist() == second.pages[2:].tolist()
    assert cache.match_length(ints(1, 2, 3), "") == 2


@pytest.mark.parametrize("make", CACHES)
def test_nothing_is_known_of_the_pages_of_an_emptied_cache(
    make: Callable[[int, int], KVCache],
) -> None:
    cache = make(4, 1)
    computed(cache, ints(1, 2))
    fresh = cache.emptied()
    assert (fresh.num_free, fresh.page_size) == (4, 1)
    assert fresh.take_broken().tolist() == [0, 1, 2, 3]


def test_salts_may_be_any_text() -> None:
    cache = RadixCache(4, 1)
    lease = computed(cache, ints(1), "\ud800")
    cache.publish(lease, ints(1), verified=Verified.ALL)
    assert cache.match_length(ints(1, 2), "\ud800") == 1
    assert cache.match_length(ints(1, 2), "é") == 0


def leak(cache: RadixCache, lease: Lease) -> None:
    cache._pool.allocate(1)


def write_to_shared(cache: RadixCache, lease: Lease) -> None:
    lease.num_shared = 1
    lease.pages.pop()


def swap(cache: RadixCache, lease: Lease) -> None:
    lease.pages[0], lease.pages[1] = lease.pages[1], lease.pages[0]


def pin_more(cache: RadixCache, lease: Lease) -> None:
    cache._tree.match(ints(1, 2), b"")


@pytest.mark.parametrize("damage", [leak, write_to_shared, swap, pin_more])
def test_check_sees_broken_books(damage: Callable[[RadixCache, Lease], None]) -> None:
    cache = RadixCache(4, 1)
    lease = computed(cache, ints(1, 2))
    cache.publish(lease, ints(1, 2), verified=Verified.ALL)
    cache.check()
    damage(cache, lease)
    with pytest.raises(InvariantError):
        cache.check()
