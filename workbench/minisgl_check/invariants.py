"""The invariants of an idle server, by the counts of ``/stats``. A violation is one sentence.

Pages: each is free or cached, and every cached one may be evicted. Requests: none in any process.
Processes: the same as at the start, with no more threads, descriptors and shared memory.

Must not know which case came before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from minisgl_check.own_server import OwnServer
from minisgl_check.target import Stats, Target
from minisgl_check.waiting import wait_until

SETTLES_WITHIN_S: Final = 60.0
"""How long a server may take to become idle; usually a moment, but machines may be busy."""
SPARE: Final = max(16, 2 * (os.cpu_count() or 1))
"""Threads and descriptors that tritonserver may gain: gRPC has a pool of two threads a core, and
keeps connections for a while."""
_MODEL_SPARE: Final = 4
"""Threads and descriptors that Python's and torch's libraries keep after their first use."""
_KEPT_OF_THE_DEAD: Final = {"num_threads": 35, "num_descriptors": 1}
"""Triton 24.10 keeps the instance of a model that was killed under load, as long as it lives."""
_SPARE_SHARED_MEMORY: Final = 16 * 2**20
"""Triton 24.10 enlarges a model's region under load, and never shrinks it."""
_QUIET_S: Final = 0.3


class Invariants:
    """Compares a server with what it was when this was made, after a warm-up and idle."""

    def __init__(self, target: Target, *, settles_within_s: float = SETTLES_WITHIN_S) -> None:
        self._target = target
        self._settles_within_s = settles_within_s
        wait_until(lambda: not busy(target.stats()), settles_within_s)
        stats = target.stats()
        self._processes = dict(stats.processes)
        self._shared_memory_bytes = int(stats.told["shared_memory_bytes"])
        self._num_regions = _num_regions(target)

    def violations(self) -> list[str]:
        """What differs from the start, after the server has had time to settle."""
        target = self._target
        wait_until(lambda: not self._differences(target.stats()), self._settles_within_s)
        stats = target.stats()
        found = self._differences(stats)
        if not found:
            time.sleep(_QUIET_S)
            made = _num_tokens(target.stats()) - _num_tokens(stats)
            if made:
                found.append(f"{made} tokens were made without a request")
        return found

    def renew(self) -> None:
        """From now on, expect processes that are new since a fault to stay as they are now."""
        server = dict(self._processes["tritonserver"])
        for name, process in self._target.stats().processes.items():
            if process["pid"] != self._processes.get(name, {}).get("pid"):
                self._processes[name] = process
                for kind, count in _KEPT_OF_THE_DEAD.items():
                    server[kind] += count
        if self._processes["tritonserver"]["pid"] == server["pid"]:
            self._processes["tritonserver"] = server

    def _differences(self, stats: Stats) -> list[str]:
        found = busy(stats)
        for name, before in self._processes.items():
            now = stats.processes.get(name, {})
            if now.get("pid") != before["pid"]:
                found.append(f"{name} is another process than at the start")
                continue
            spare = SPARE if name == "tritonserver" else _MODEL_SPARE
            for kind in _KEPT_OF_THE_DEAD:
                grown = now.get(kind, 0) - before.get(kind, 0)
                if grown > spare:
                    found.append(f"{name} has {grown} more {kind[4:]} than at the start")
        grown = stats.told["shared_memory_bytes"] - self._shared_memory_bytes
        if grown > _SPARE_SHARED_MEMORY:
            found.append(f"{grown:,} bytes more of shared memory than at the start")
        regions = _num_regions(self._target)
        if regions != self._num_regions:
            found.append(f"{regions} regions of shared memory instead of {self._num_regions}")
        return found


def busy(stats: Stats) -> list[str]:
    """The counts that show that a server is not idle."""
    found = []
    for model in ("llm_engine", "tokenizer", "detokenizer"):
        counts = stats.process(model)
        if not counts:
            found.append(f"{model} does not answer")
            continue
        for name in ("num_open", "num_streams", "num_jobs", "num_inside"):
            if counts.get(name, 0):
                found.append(f"{model} has {name} = {counts[name]}")
    scheduler = stats.engine.get("scheduler")
    if scheduler is None:
        return found
    for name in ("num_running", "num_waiting"):
        if scheduler[name]:
            found.append(f"the planner has {name} = {scheduler[name]}")
    free, cached, total = (scheduler[f"{kind}_pages"] for kind in ("free", "cached", "total"))
    if free + cached != total:
        found.append(f"{total - free - cached} of {total} pages are neither free nor cached")
    if scheduler["evictable_pages"] != cached:
        found.append(f"{cached - scheduler['evictable_pages']} cached pages are still held")
    return found


def _num_regions(target: Target) -> int:
    """Number of files of shared memory; 0 for a server that others run, which tells only their
    size."""
    return len(target.server.shared_memory_regions()) if isinstance(target, OwnServer) else 0


def _num_tokens(stats: Stats) -> int:
    return int(stats.engine["num_generated_tokens"])


def settled(condition: Callable[[], bool]) -> bool:
    """Whether the condition came true in time."""
    return wait_until(condition, SETTLES_WITHIN_S)
