"""Ranks as threads of the test: real groups without the cost of processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from minisgl_backend.parallel.connect import connect, open_store
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.parallel.place import RankPlace

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Group], T], *, timeout_s: float = 60.0) -> list[T]:
    """What ``work`` returns on each of ``size`` connected ranks; a single one uses this thread."""
    if size == 1:
        return [work(OneRank())]
    first, store = open_store(RankPlace.first(size, None), timeout_s)

    def run(rank: int) -> T:
        place = first.of(rank)
        own = store if rank == 0 else open_store(place, timeout_s)[1]
        group = connect(place, own, "gloo", torch.device("cpu"), timeout_s=timeout_s)
        try:
            return work(group)
        finally:
            group.leave()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
