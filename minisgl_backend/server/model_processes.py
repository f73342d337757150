"""The processes of a server's models, as their heartbeats and the kernel show them.

Knows the heartbeat files in the server's runtime directory, process ids and /proc. Must not know
what is done about a process that has died or hangs.

A process that ends normally removes its heartbeat file. So if a process is gone but its file
is there, it was killed or crashed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl_backend.runtime_files import Beat, heartbeat_files, read_beat, socket_path

_END_S: Final = 10.0
_ANSWER_S: Final = 2.0
_SHARED_MEMORY: Final = "/dev/shm/"


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """A process of a model, alive or not, and what its heartbeat file said last."""

    heartbeat: Path
    model: str
    beat: Beat
    is_alive: bool

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.beat.pid

    @property
    def age_s(self) -> float:
        """How long it has served."""
        return round(time.monotonic() - self.beat.started_s, 3)


class ModelProcesses:
    """All processes that have a heartbeat file in ``directory``. Belongs to one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: dict[Path, int] = {}
        """By heartbeat file: a descriptor of the process, valid even if its id is used again."""
        self._regions: dict[Path, set[Path]] = {}
        """By heartbeat file: the files of the process's shared memory."""

    def look(self) -> list[ModelProcess]:
        """The processes at this moment."""
        found = []
        here = heartbeat_files(self._directory)
        for path in self._descriptors.keys() - {path for _, path in here}:
            os.close(self._descriptors.pop(path))
            self._regions.pop(path, None)
        for model, path in here:
            beat = read_beat(path)
            if beat is not None:
                found.append(ModelProcess(path, model, beat, self._is_alive(path, beat.pid)))
        return found

    def end(self, process: ModelProcess) -> Beat:
        """Kill a process, stopped or not, and remove what it left; returns its last beat.

        The beat is read when nothing can change it anymore.
        """
        descriptor = self._descriptors.get(process.heartbeat)
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], _END_S)
        beat = read_beat(process.heartbeat) or process.beat
        # everything that a model's process puts there has its id in its name
        for path in self._directory.glob(f"*[.-]{process.pid}[.-]*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for region in self._regions.get(process.heartbeat, ()):
            # Triton lets go of a process only when the last of its requests is over
            region.unlink(missing_ok=True)
        return beat

    def close(self) -> None:
        """Close the descriptors that name the processes."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _is_alive(self, path: Path, pid: int) -> bool:
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.pidfd_open(pid)
            except ProcessLookupError:
                return False
            self._regions[path] = _shared_memory(pid)
        ended, _, _ = select.select([self._descriptors[path]], [], [], 0)
        return not ended


def _shared_memory(pid: int) -> set[Path]:
    """The files of shared memory that a process has mapped."""
    try:
        text = os.fsdecode(Path(f"/proc/{pid}/maps").read_bytes())
    except OSError:
        return set()
    mapped = (line.split(maxsplit=5)[-1] for line in text.split("\n") if line)
    return {Path(name) for name in mapped if name.startswith(_SHARED_MEMORY)}


def counts_of(directory: Path, process: ModelProcess) -> Mapping[str, Any]:
    """What a model's process reports about itself; raises ``OSError`` if it does not answer."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(_ANSWER_S)
        caller.connect(str(socket_path(directory, process.model, process.pid)))
        text = b"".join(iter(lambda: caller.recv(2**16), b""))
    counts: Mapping[str, Any] = json.loads(text) if text else {}
    return counts


def computed_s(pid: int) -> float:
    """Seconds of computing that a process has used up; 0 if it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
