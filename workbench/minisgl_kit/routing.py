"""What benchmarks and tests ask of a router beside requests: caches in this process that report to
its index, and the loads of its replicas."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from minisgl_backend.routing.cache_index import CacheIndex, TreeReports
from minisgl_backend.routing.router import Router


def reports_to(index: CacheIndex, replica: int, page_size: int) -> TreeReports:
    """The observer of a replica's cache, for a cache in this process."""
    return TreeReports(
        page_size,
        publish=partial(index.publish, replica),
        evict=partial(index.evict, replica),
        forget=partial(index.forget, replica),
    )


def shares_of_load(router: Router) -> npt.NDArray[np.float64]:
    """Rows, waiting tokens and pages of each replica as shares of its capacity,
    [3, num_replicas]."""
    shares: npt.NDArray[np.float64] = np.array(router.loads, np.float64) / router.capacity
    return shares.T
