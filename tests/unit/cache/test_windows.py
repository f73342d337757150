"""Window pages: kept as far as windows see, and as long as others may begin after them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_PAGE
from minisgl_backend.request import IntArray
from tests.fakes.executor import tokens_of

SIZE = 4
WINDOW = 9  # the first token of a page sees two pages before its own


def cache_of(num_window_pages: int) -> RadixCache:
    windows = WindowPages(num_window_pages, num_pages=40, page_size=SIZE, window=WINDOW)
    return RadixCache(40, SIZE, windows=windows)


def prompt(*pages: int) -> IntArray:
    """Each number fills a page; one more token follows."""
    return tokens_of([number for number in pages for _ in range(SIZE)] + [0])


def windows_of(cache: KVCache) -> WindowPages:
    assert cache.windows is not None
    return cache.windows


def compute(
    cache: NaiveCache, tokens: IntArray, *, line: int = 0, keeps: tuple[int, ...] = ()
) -> Lease:
    """Compute all tokens in one-page chunks."""
    windows = windows_of(cache)
    lease = cache.acquire(tokens, "")
    windows.seat(lease, line, keeps)
    assert cache.grow(lease, len(tokens))
    for index in range(lease.num_shared, len(lease.pages)):
        windows.slide(lease, index * SIZE)
        windows.extend(lease, index + 1)
        cache.check()
    cache.publish(lease, tokens, verified=Verified.ALL)
    cache.check()
    return lease


def table(cache: KVCache) -> dict[tuple[int, int], int]:
    """What has changed in the window table."""
    grants = windows_of(cache).take_grants()
    lines, indices, pages = grants.rows.tolist(), grants.indices.tolist(), grants.pages.tolist()
    return dict(zip(zip(lines, indices, strict=True), pages, strict=True))


def test_a_lease_holds_its_window_and_no_more() -> None:
    cache = cache_of(4)
    lease = compute(cache, prompt(1, 2, 3, 4, 5, 6, 7), line=3)
    assert (lease.window_begin, lease.window_end) == (5, 8)
    assert windows_of(cache).num_available == 1
    entries = table(cache)
    assert {index for (_, index), page in entries.items() if page == NO_PAGE} == {*range(5)}
    assert len({page for page in entries.values() if page != NO_PAGE}) == 3
    cache.release(lease)
    assert table(cache) == {(3, index): NO_PAGE for index in (5, 6, 7)}
    assert windows_of(cache).num_available == 4
    cache.check()


def test_a_prefix_is_found_up_to_where_its_window_is_kept() -> None:
    cache = cache_of(4)
    cache.release(compute(cache, prompt(1, 2, 3, 4, 5, 6, 7)))
    longer = prompt(1, 2, 3, 4, 5, 6, 7, 8)
    assert cache.match_length(longer, "") == 7 * SIZE
    # a token after the fifth page sees the fourth, whose window page belongs to another by now
    parting = prompt(1, 2, 3, 4, 5, 9)
    assert cache.match_length(parting, "") == 0 and cache.cached_length(parting, "") == 5 * SIZE
    lease = cache.acquire(longer, "")
    assert lease.num_shared == 7 and (lease.window_begin, lease.window_end) == (5, 7)
    cache.release(lease)
    cache.check()


def test_short_prefixes_need_no_whole_window() -> None:
    cache = cache_of(8)
    cache.release(compute(cache, prompt(1)))
    assert cache.match_length(prompt(1, 2), "") == SIZE


def test_windows_where_others_part_are_kept_longer() -> None:
    cache = cache_of(6)
    lease = compute(cache, prompt(1, 2, 3, 4, 5, 6, 7, 8, 9), keeps=(4,))
    cache.release(lease)
    assert cache.match_length(prompt(1, 2, 3, 4, 0), "") == 4 * SIZE
    assert cache.match_length(prompt(1, 2, 3, 4, 5, 6, 0), "") == 4 * SIZE


def test_window_pages_are_taken_over_with_the_tokens_of_another() -> None:
    """The same tokens were published before in other pages, whose window pages are gone."""
    cache = cache_of(4)
    tokens = prompt(1, 2, 3, 4, 5, 6)
    cache.release(compute(cache, tokens))
    strangers = compute(cache, prompt(7, 7, 7, 7))
    cache.release(strangers)
    assert cache.match_length(prompt(1, 2, 3, 4, 5, 6, 0), "") == 0
    before = table(cache)
    again = compute(cache, tokens)
    assert again.num_shared == 6
    assert cache.match_length(prompt(1, 2, 3, 4, 5, 6, 0), "") == 6 * SIZE
    held = {(0, index) for index in range(again.window_begin, again.window_end)}
    now = {**before, **table(cache)}
    assert {place for place, page in now.items() if page != NO_PAGE} == held
    cache.release(again)
    cache.check()


def test_suspect_window_pages_are_cleared_before_they_are_granted_again() -> None:
    cache = cache_of(3)
    lease = cache.acquire(prompt(1, 2), "")
    windows = windows_of(cache)
    windows.seat(lease, 0, ())
    assert cache.grow(lease, 9)
    windows.extend(lease, 3)
    cache.discard(lease)
    assert sorted(windows.take_broken().tolist()) == [0, 1, 2]
    cache.release(compute(cache, prompt(3, 4)))
    cache.release(compute(cache, prompt(5, 6)))
    assert not len(windows.take_broken()), "a token has verified them"
    assert len(windows_of(cache.emptied()).take_broken()) == 3


def test_a_lease_may_go_on_after_pages_that_it_loads() -> None:
    """It lets go of what the new window does not reach; no window pages are granted in between."""
    cache = cache_of(8)
    windows = windows_of(cache)
    cache.release(compute(cache, prompt(1, 2, 3)))
    tokens = prompt(1, 2, 3, 4, 5, 6, 7)
    lease = cache.acquire(tokens, "")
    assert (lease.num_shared, lease.window_begin, lease.window_end) == (3, 1, 3)
    windows.seat(lease, 5, ())
    assert cache.grow(lease, len(tokens))
    table(cache)
    assert windows.resume(lease, 4) == range(3, 4)
    assert (lease.window_begin, lease.window_end) == (2, 4)
    (loaded,) = windows.pages_of(lease, range(3, 4)).tolist()
    assert table(cache) == {(5, 1): NO_PAGE, (5, 3): loaded}
    assert windows.resume(lease, 7) == range(5, 7)
    entries = table(cache)
    assert {index for (_, index), page in entries.items() if page != NO_PAGE} == {5, 6}
    cache.check()
    cache.release(lease)
    cache.check()


def test_a_lease_does_not_go_on_without_window_pages() -> None:
    cache = cache_of(4)
    windows = windows_of(cache)
    held = compute(cache, prompt(1, 2, 3))
    lease = cache.acquire(prompt(7, 8, 9), "")
    windows.seat(lease, 1, ())
    assert cache.grow(lease, 13)
    assert windows.resume(lease, 3) is None
    assert (lease.window_begin, lease.window_end) == (0, 0)
    cache.release(held)
    assert windows.resume(lease, 3) == range(1, 3)
    cache.check()


def test_finite_window_pages_that_are_worth_keeping() -> None:
    cache = cache_of(12)
    windows = windows_of(cache)
    lease = compute(cache, prompt(1, 2, 3, 4, 5, 6, 7, 8), keeps=(3, 9))
    pages = np.array(lease.pages, np.int32)
    kept = windows.worth_keeping(lease, 8)
    assert np.flatnonzero(kept != NO_PAGE).tolist() == [1, 2, 6, 7]
    assert kept[[6, 7]].tolist() == windows.pages_of(lease, range(6, 8)).tolist()
    windows.suspect(pages[[2, 7]])
    assert np.flatnonzero(windows.worth_keeping(lease, 8) != NO_PAGE).tolist() == [1, 6]
    assert windows.worth_keeping(lease, 0).tolist() == []


def test_an_emptied_cache_clears_the_lines_of_lost_leases() -> None:
    cache = cache_of(8)
    compute(cache, prompt(1, 2), line=5)
    fresh = cache.emptied()
    assert isinstance(fresh, RadixCache)
    assert table(fresh) == {(5, index): NO_PAGE for index in range(3)}
    fresh.check()


def test_an_emptied_cache_clears_no_line_of_a_lease_that_has_none() -> None:
    """Bookkeeping may break after a match, before the sequence gets its row."""
    cache = cache_of(8)
    cache.release(compute(cache, prompt(1, 2), line=5))
    assert cache.acquire(prompt(1, 2), "").window_end > 0
    windows_of(cache).take_grants()
    fresh = cache.emptied()
    assert isinstance(fresh, RadixCache)
    assert table(fresh) == {}


def test_without_a_prefix_cache_windows_are_kept_as_well() -> None:
    windows = WindowPages(4, num_pages=40, page_size=SIZE, window=WINDOW)
    cache = NaiveCache(40, SIZE, windows=windows)
    lease = compute(cache, prompt(1, 2, 3, 4, 5, 6, 7))
    assert windows.num_available == 1
    cache.release(lease)
    assert cache.match_length(prompt(1, 2, 3, 4, 5, 6, 7), "") == 0
    assert windows.num_available == 4


def test_more_than_there_are_is_refused() -> None:
    cache = cache_of(2)
    lease = cache.acquire(prompt(1, 2, 3), "")
    assert cache.grow(lease, 13)
    with pytest.raises(InvariantError, match="1 window pages wanted, 2 available"):
        windows_of(cache).extend(lease, 3)


def lose(windows: WindowPages, lease: Lease) -> None:
    windows._attached[lease.pages[2]] = -1


def forget(windows: WindowPages, lease: Lease) -> None:
    windows._users[lease.pages[2]] = 0


def let_go_of_held(windows: WindowPages, lease: Lease) -> None:
    windows._kept[lease.pages[2]] = None


def attach_to_free(windows: WindowPages, lease: Lease) -> None:
    free = next(page for page in range(40) if page not in lease.pages)
    windows._attached[free], windows._attached[lease.pages[2]] = (
        windows._attached[lease.pages[2]],
        -1,
    )


@pytest.mark.parametrize("damage", [lose, forget, let_go_of_held, attach_to_free])
def test_check_sees_broken_books(damage: Callable[[WindowPages, Lease], None]) -> None:
    cache = cache_of(6)
    lease = compute(cache, prompt(1, 2))
    damage(windows_of(cache), lease)
    with pytest.raises(InvariantError):
        cache.check()


def test_window_pages_in_use_are_neither_dropped_nor_attached_twice() -> None:
    cache = cache_of(6)
    lease = compute(cache, prompt(1, 2))
    windows = windows_of(cache)
    with pytest.raises(InvariantError, match="held is dropped"):
        windows.drop(np.array(lease.pages, np.int32))
    lease.window_end -= 1
    with pytest.raises(InvariantError, match="a second window page"):
        windows.extend(lease, lease.window_end + 1)
