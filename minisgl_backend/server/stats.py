"""The counts of a server and of its models' processes, for operators and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from minisgl_backend.heartbeat import read_beat
from minisgl_backend.server.model_processes import ModelProcess, counts_of, footprint
from minisgl_backend.server.process import TritonServer


def server_stats(server: TritonServer, processes: Sequence[ModelProcess]) -> dict[str, Any]:
    """What the server holds, and what each process tells of itself, all asked at once."""
    with ThreadPoolExecutor(max(1, len(processes))) as threads:
        models = list(threads.map(partial(_process_stats, server.directory), processes))
    return {
        "shared_memory_bytes": sum(map(_num_bytes, server.shared_memory_regions())),
        "tritonserver": _triton_stats(server),
        "models": models,
    }


def _triton_stats(server: TritonServer) -> dict[str, Any]:
    """Nothing of one that has ended: its process id may be another's by now."""
    if server.poll() is not None:
        return {"pid": None}
    return {"pid": server.pid, **footprint(server.pid)}


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
        **footprint(process.pid),
        **counts,
    }


def _num_bytes(region: Path) -> int:
    """The size of a file; 0 where it has vanished."""
    try:
        return region.stat().st_size
    except FileNotFoundError:
        return 0
