"""The cache that shares nothing. It is also the base of those that do: it leases, verifies and
frees pages.

Knows leases and the pool of pages. Must not know which pages hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.pages import PagePool, as_array, num_pages_for
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_GROUPS, Groups
from minisgl_backend.request import IntArray


class NaiveCache:
    """Every sequence computes all its tokens itself."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        is_clean: bool = True,
        windows: WindowPages | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._windows = windows
        self._pool = PagePool(num_pages, is_clean=is_clean)
        self._leases: dict[Lease, None] = {}

    @property
    def windows(self) -> WindowPages | None:
        return self._windows

    @property
    def host(self) -> HostCache | None:
        return None

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_evictable(self) -> int:
        return 0

    @property
    def num_taken_snapshots(self) -> int:
        return 0

    def match_length(self, tokens: IntArray, salt: str) -> int:
        return 0

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        pass

    def promised_length(self, tokens: IntArray, salt: str) -> int:
        return 0

    def acquire(self, tokens: IntArray, salt: str, *, resumed_at: int = 0) -> Lease:
        return self._register(Lease())

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        self._require_held(lease)
        missing = num_pages_for(num_tokens, self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        if not self._make_room(missing):
            return False
        # [0, N)   the pages of the lease so far
        # [N, M)   new and private: free pages, after evictions if necessary
        lease.pages.frombytes(self._pool.allocate(missing).tobytes())
        return True

    def grow_each(self, leases: Sequence[Lease]) -> IntArray | None:
        if not self._make_room(len(leases)):
            return None
        pages = self._pool.allocate(len(leases))
        for lease, page in zip(leases, pages.tolist(), strict=True):
            self._require_held(lease)
            lease.pages.append(page)
        return pages

    def publish(self, lease: Lease, tokens: IntArray, *, verified: Verified) -> range:
        self._require_held(lease)
        self._judge(lease, len(tokens), verified)
        return range(0)

    def finite_pages(self, lease: Lease) -> IntArray:
        self._require_held(lease)
        published = as_array(lease.pages[: lease.num_shared])
        return published[: self._pool.num_trusted(published)]

    def groups(self, leases: Sequence[Lease], cost_tokens: int) -> Groups:
        return NO_GROUPS

    def cached_length(self, tokens: IntArray, salt: str) -> int:
        return self.match_length(tokens, salt)

    def take_snapshot(self, *, rolls: bool = False, spared: Set[int] = frozenset()) -> int | None:
        return None

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        self.return_snapshot(snapshot)

    def return_snapshot(self, snapshot: int) -> None:
        raise InvariantError("this cache has no snapshots")

    def snapshots_along(self, lease: Lease) -> Sequence[tuple[int, int]]:
        return ()

    def release(self, lease: Lease) -> None:
        self._end(lease)

    def discard(self, lease: Lease) -> None:
        self._end(lease, is_suspect=True)

    def take_broken(self) -> IntArray:
        return self._pool.take_broken()

    def emptied(self) -> KVCache:
        windows = self._emptied_windows()
        return NaiveCache(self.num_pages, self.page_size, is_clean=False, windows=windows)

    def check(self) -> None:
        self._pool.check()
        self._check_pages([])

    def _register(self, lease: Lease) -> Lease:
        self._leases[lease] = None
        return lease

    def _end(self, lease: Lease, *, is_suspect: bool = False) -> None:
        """End the lease and free its private pages."""
        self._require_held(lease)
        lease.released = True
        del self._leases[lease]
        private = as_array(lease.pages[lease.num_shared :])
        if self._windows is not None:
            self._windows.leave(lease)
        if is_suspect:
            self._suspect(private)
        self._free(private)

    def _free(self, pages: IntArray) -> None:
        if self._windows is not None:
            self._windows.drop(pages)
        self._pool.free(pages)

    def _suspect(self, pages: IntArray) -> None:
        self._pool.suspect(pages)
        if self._windows is not None:
            self._windows.suspect(pages)

    def _is_suspect(self, pages: IntArray) -> bool:
        windows = self._windows
        return self._pool.has_suspects(pages) or (
            windows is not None and windows.has_suspects(pages)
        )

    def _emptied_windows(self) -> WindowPages | None:
        return None if self._windows is None else self._windows.emptied(self._leases)

    def _require_held(self, lease: Lease) -> None:
        if lease.released:
            raise InvariantError("a lease is used after its release")

    def _judge(self, lease: Lease, num_tokens: int, verified: Verified) -> None:
        """Trust or suspect the pages with the first ``num_tokens`` positions of the lease. Window
        pages are suspect from the start."""
        begin = 0 if verified is Verified.ALL else lease.num_shared
        written = lease.pages[begin : num_pages_for(num_tokens, self.page_size)]
        if verified is Verified.NONE:
            self._pool.suspect(as_array(written))
            return
        if self._windows is not None:
            self._windows.trust(as_array(written))
        if self._pool.num_suspect:
            self._pool.trust(as_array(written))

    def _make_room(self, num_pages: int) -> bool:
        return num_pages <= self._pool.num_free

    def _check_pages(self, cached: list[IntArray]) -> None:
        private = [as_array(lease.pages[lease.num_shared :]) for lease in self._leases]
        pages = np.concatenate([self._pool.free_pages(), *cached, *private])
        if not np.array_equal(np.sort(pages), np.arange(self.num_pages)):
            raise InvariantError(
                f"{self._pool.num_free} free, {sum(map(len, cached))} cached and "
                f"{sum(map(len, private))} leased pages are not the {self.num_pages} of the pool"
            )
        if self._windows is not None:
            self._windows.check(self._leases, self._pool.free_pages())
