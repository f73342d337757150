"""The pool of pages."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.cache.pages import PagePool
from minisgl_backend.errors import InvariantError


def test_pages_come_once_each_and_may_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.free(second)
    assert pool.num_free == 3
    assert sorted(pool.allocate(3).tolist()) == sorted(second.tolist())
    pool.check()


def test_what_is_allocated_is_a_copy() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    before = pages.tolist()
    pool.free(pages)
    pool.allocate(4)
    assert pages.tolist() == before


def test_more_than_is_free_is_refused() -> None:
    pool = PagePool(2)
    with pytest.raises(InvariantError, match="3 pages wanted, 2 are free"):
        pool.allocate(3)


def test_freeing_a_free_page_is_refused() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(InvariantError, match="freed twice"):
        pool.free(pages)


def test_check_sees_a_page_that_is_twice_on_the_stack() -> None:
    pool = PagePool(3)
    page = int(pool.allocate(2)[0])
    pool.free(np.array([page, page], dtype=np.int32))
    with pytest.raises(InvariantError, match="differ"):
        pool.check()


def test_suspect_pages_are_broken_once_they_are_free() -> None:
    pool = PagePool(6)
    pages = pool.allocate(4)
    pool.suspect(pages[:3])
    pool.suspect(pages[:1])
    assert pool.has_suspects(pages) and not pool.has_suspects(pages[3:])
    assert pool.take_broken().tolist() == []
    pool.trust(pages[1:2])
    pool.free(pages[1:])
    pool.check()
    assert pool.take_broken().tolist() == [pages[2]]
    assert pool.take_broken().tolist() == []
    pool.allocate(5)
    pool.free(pages)
    assert pool.take_broken().tolist() == [pages[0]]
    assert pool.num_suspect == 0
    pool.check()


def test_a_pool_that_is_not_clean_begins_with_broken_pages() -> None:
    pool = PagePool(3, is_clean=False)
    pool.allocate(1)
    assert pool.take_broken().tolist() == [0, 1, 2]
    pool.check()


def test_check_sees_a_free_page_that_is_suspect() -> None:
    pool = PagePool(3)
    pool.suspect(np.array([1], dtype=np.int32))
    with pytest.raises(InvariantError, match="suspect"):
        pool.check()
