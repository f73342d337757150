"""The files in a server's runtime directory, through which its processes share their state.

Knows the names, and how each file is written and read. Must not know what the readers conclude: the
models' processes and the starter of the server do not import each other. Empty *marker files* speak
by their presence; they are hints, never locks:

- ``queue-open.*`` or ``queue-full.*``, one for each engine that serves. Tokenizers look at them to
  refuse early. The last part of the name is the number of tokens that a request may have. When a
  model is reloaded, the new engine removes the old one's marker, which tells the old one that it
  has a successor.
- ``drain``: the starter is about to stop the server, and waits until the engines have removed their
  markers.
- ``recovering``: the starter reloads a model that died; tokenizers refuse requests until then.

``adapters.json`` holds the LoRA adapters that the engine knows, {name: path}, once a request has
loaded or unloaded one. An engine that replaces another starts with them; the starter carries the
file over if it restarts the whole server.

A *heartbeat file*, one for each model's process, is written through a memory map and outlives the
process. It says when it was last written, how old the work loop's last sign of life was then, and
how many requests were inside the process: if the process is killed, Triton would wait for these in
vain. Times are of ``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

RUNTIME_DIRECTORY_VARIABLE: Final = "MINISGL_RUNTIME_DIR"
"""The environment variable that tells the models their runtime directory."""
HTTP_URL_VARIABLE: Final = "MINISGL_HTTP_URL"
"""The environment variable that tells the models where their server listens."""
OPTIONS_MODEL: Final = "llm_engine"
"""The model whose config.pbtxt holds the engine's options, for the text models too."""
DETOKENIZER: Final = "detokenizer"
"""The model that receives packets, not requests."""
DRAIN_MARKER: Final = "drain"
RECOVERING_MARKER: Final = "recovering"
ADAPTERS: Final = "adapters.json"
QUEUE_OPEN: Final = "queue-open"
QUEUE_FULL: Final = "queue-full"
"""Prefixes of the names of engines' markers."""

MARKERS_READ_EVERY_S: Final = 0.02
"""The shortest time between two readings of the markers by a tokenizer."""
_HEARTBEAT_LAYOUT: Final = struct.Struct("=qqqqddd")
_PID, _STATE, _NUM_INSIDE, _NUM_SEEN, _STARTED_S, _BEAT_S, _TICK_AGE_S = range(7)
_PREFIX: Final = "heartbeat"


class QueueMarker:
    """An engine's marker; ``place`` names the model's instance, which one engine should serve.

    ``most_tokens`` is what a request may have, with its answer. Without a directory there is no
    marker: requests are refused by the engine alone.
    """

    def __init__(self, directory: Path | None, place: str, most_tokens: int) -> None:
        self._directory = directory
        # the process id tells a supervisor what to remove if this process was killed
        self._name = f"{place}.{os.getpid()}.{secrets.token_hex(8)}.{most_tokens}"
        self._full = False
        self._lock = threading.Lock()  # who looks for the marker must not miss it in a renaming
        if directory is not None:
            for state in (QUEUE_OPEN, QUEUE_FULL):
                for old in directory.glob(f"{state}.{place}.*"):
                    old.unlink(missing_ok=True)
            self._path(self._full).touch()

    def show(self, full: bool) -> None:
        """Say whether the queue is full."""
        if self._directory is None or full == self._full:
            return
        with self._lock:
            with contextlib.suppress(FileNotFoundError):
                self._path(self._full).rename(self._path(full))
            self._full = full

    def is_replaced(self) -> bool:
        """Whether a successor removed the marker."""
        if self._directory is None:
            return False
        with self._lock:
            return not self._path(self._full).exists()

    def must_drain(self) -> bool:
        """Whether the starter of the server is about to stop it."""
        return self._directory is not None and (self._directory / DRAIN_MARKER).exists()

    def remove(self) -> None:
        """Remove the marker: the engine ends."""
        if self._directory is not None:
            with self._lock:
                self._path(self._full).unlink(missing_ok=True)

    def _path(self, full: bool) -> Path:
        assert self._directory is not None
        return self._directory / f"{QUEUE_FULL if full else QUEUE_OPEN}.{self._name}"


class MarkerReader:
    """The markers as a tokenizer sees them."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._read_s = float("-inf")
        self._names: list[str] = []

    def is_queue_full(self) -> bool:
        """Whether every engine says that its queue is full."""
        states = {name.partition(".")[0] for name in self._read()}
        return QUEUE_FULL in states and QUEUE_OPEN not in states

    def is_recovering(self) -> bool:
        """Whether another model is being reloaded."""
        return RECOVERING_MARKER in self._read()

    def most_tokens(self) -> int | None:
        """The tokens that a request may have, whichever engine it goes to; None if none serves."""
        markers = [name for name in self._read() if name.startswith((QUEUE_OPEN, QUEUE_FULL))]
        return min((int(name.rpartition(".")[2]) for name in markers), default=None)

    def _read(self) -> list[str]:
        now_s = time.monotonic()
        if self._directory is not None and now_s - self._read_s >= MARKERS_READ_EVERY_S:
            self._read_s = now_s
            try:
                self._names = os.listdir(self._directory)
            except OSError:
                self._names = []
        return self._names


def write_adapters(directory: Path, paths: Mapping[str, str]) -> None:
    """Tell the engine that will replace this one which adapters are known. Raises ``OSError``."""
    draft = directory / f".{ADAPTERS}"
    draft.write_text(json.dumps(paths), "utf-8")
    draft.rename(directory / ADAPTERS)


def read_adapters(directory: Path) -> dict[str, str] | None:
    """The adapters that the previous engine knew, {name: path}; None if no request has changed
    those of the options."""
    try:
        paths: dict[str, str] = json.loads((directory / ADAPTERS).read_text("utf-8"))
    except FileNotFoundError:
        return None
    return paths


class State(IntEnum):
    """What a process says about itself."""

    SERVING = 0
    ENDING = 1
    BROKEN = 2
    LOADING = 3
    """It serves nothing for the moment: its replicas are being loaded."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat file says.

    It was written at ``beat_s``; the last sign of life of the work loop was ``tick_age_s`` old
    then. ``num_seen`` requests have come in, and ``num_inside`` of them have not had their final
    flag yet.
    """

    pid: int
    state: State
    num_inside: int
    num_seen: int
    started_s: float
    beat_s: float
    tick_age_s: float

    def silent_s(self, now_s: float) -> float:
        """How long the process, or its work loop, has given no sign of life."""
        return max(self.tick_age_s, now_s - self.beat_s)


class Heartbeat:
    """Writes the file of this process. Any thread may call ``entered`` and ``left``."""

    def __init__(self, directory: Path, model: str) -> None:
        self.path = heartbeat_path(directory, model, os.getpid())
        draft = self.path.with_name(f".{self.path.name}")
        draft.write_bytes(bytes(_HEARTBEAT_LAYOUT.size))
        with draft.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), _HEARTBEAT_LAYOUT.size))
        # numbers are written whole through these views: a reader never sees half of one
        self._ints = memory.cast("q")
        self._floats = memory.cast("d")
        self._lock = threading.Lock()
        self._ints[_PID] = os.getpid()
        self._floats[_STARTED_S] = time.monotonic()
        self.beat()
        draft.rename(self.path)

    def beat(self, *, tick_age_s: float = 0.0, state: State = State.SERVING) -> None:
        """Write that the process lives, and how old the work loop's last sign of life is."""
        self._ints[_STATE] = state
        self._floats[_TICK_AGE_S] = tick_age_s
        self._floats[_BEAT_S] = time.monotonic()

    def entered(self) -> None:
        """Count a request that came in."""
        with self._lock:
            self._ints[_NUM_INSIDE] += 1
            self._ints[_NUM_SEEN] += 1

    def left(self) -> None:
        """Count a request that has had its final flag."""
        with self._lock:
            self._ints[_NUM_INSIDE] -= 1

    def close(self) -> None:
        """Remove the file: the process ends normally. Late calls of ``left`` still work."""
        self.path.unlink(missing_ok=True)


def heartbeat_path(directory: Path, model: str, pid: int) -> Path:
    """The heartbeat file of the process ``pid`` of a model."""
    return directory / f"{_PREFIX}.{pid}.{model}"


def socket_path(directory: Path, model: str, pid: int) -> Path:
    """The socket at which the process ``pid`` of a model reports its counts."""
    return directory / f"stats.{pid}.{model}"


def heartbeat_files(directory: Path) -> list[tuple[str, Path]]:
    """The heartbeat files in a directory, each with its model's name, sorted by path."""
    found = sorted(directory.glob(f"{_PREFIX}.*.*"))
    return [(path.name.split(".", 2)[2], path) for path in found]


def read_beat(path: Path) -> Beat | None:
    """What a heartbeat file says; None if it is gone."""
    try:
        values = _HEARTBEAT_LAYOUT.unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    pid, state, num_inside, num_seen, started_s, beat_s, tick_age_s = values
    return Beat(pid, State(state), num_inside, num_seen, started_s, beat_s, tick_age_s)
