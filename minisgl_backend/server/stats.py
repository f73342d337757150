"""What a server and its processes hold and count, for operators and tests.

Knows /proc, and that each model's process reports its own counts. Must not know what they mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from minisgl_backend.runtime_files import read_beat
from minisgl_backend.server.model_processes import ModelProcess, counts_of
from minisgl_backend.server.process import TritonServer


def server_stats(server: TritonServer, processes: Sequence[ModelProcess]) -> dict[str, Any]:
    """What the server holds, and what each process reports about itself, all asked at once."""
    with ThreadPoolExecutor(max(1, len(processes))) as threads:
        models = list(threads.map(partial(_process_stats, server.directory), processes))
    return {
        "shared_memory_bytes": sum(map(_num_bytes, server.shared_memory_regions())),
        "tritonserver": _triton_stats(server),
        "models": models,
    }


def _triton_stats(server: TritonServer) -> dict[str, Any]:
    """What tritonserver holds; nothing if it has ended, since its id may have been reused."""
    if server.poll() is not None:
        return {"pid": None}
    return {"pid": server.pid, **_footprint(server.pid)}


def _process_stats(directory: Path, process: ModelProcess) -> dict[str, Any]:
    beat = read_beat(process.heartbeat) or process.beat
    counts: Mapping[str, Any]
    try:
        counts = counts_of(directory, process)
    except (OSError, ValueError):
        counts = {"error": "does not answer"}
    return {
        "model": process.model,
        "pid": process.pid,
        "age_s": process.age_s,
        "num_inside": beat.num_inside,
        "num_seen": beat.num_seen,
        **_footprint(process.pid),
        **counts,
    }


def _num_bytes(region: Path) -> int:
    """The size of a file; 0 if it has vanished."""
    try:
        return region.stat().st_size
    except FileNotFoundError:
        return 0


def _footprint(pid: int) -> dict[str, int]:
    """What a process holds: threads, descriptors, resident bytes; nothing if it has gone."""
    place = Path(f"/proc/{pid}")
    try:
        return {
            "num_threads": len(os.listdir(place / "task")),
            "num_descriptors": len(os.listdir(place / "fd")),
            "resident_bytes": int((place / "statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE"),
        }
    except OSError:
        return {}
