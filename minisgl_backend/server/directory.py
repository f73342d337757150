"""The private directory of a server, and what is left of servers that were killed.

All processes of a server hold a lock on its directory: the starter, tritonserver and its models. So
if a directory is not locked, none of them is left, however they ended, and the next start removes
the directory and the shared memory that a file in it names. The lock is on the directory itself,
since systemd-tmpfiles, which removes files that are ten days old, respects such a lock. Must not
know what else servers keep there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from minisgl_backend.errors import ConfigError

SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "minisgl-"
_REGIONS: Final = "regions"
"""The file that holds the prefix of the shared memory's names."""
_LONGEST_BASE: Final = 40
"""Sockets live in the directory, and a socket's path must be short."""
_LEAST_BYTES: Final = 2**20
"""Some 100 KiB are written at the start, and as much again while it serves."""
_LEAST_SHARED_BYTES: Final = 8 * 2**20
"""Each of three processes begins with 1 MiB, and takes more as requests come."""


def make_directory(shared_memory_prefix: str) -> tuple[Path, int]:
    """A fresh directory of mode 0700, and the descriptor that holds its lock.

    Raises ``ConfigError`` if there is no place for it, or none for shared memory.
    """
    base = _base()
    _check_room(base, _LEAST_BYTES)
    _check_room(SHARED_MEMORY, _LEAST_SHARED_BYTES, " at least (in Docker: --shm-size)")
    with contextlib.ExitStack() as undo:
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            lock = os.open(directory, os.O_RDONLY)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (directory / _REGIONS).write_text(shared_memory_prefix, "utf-8")
        except OSError as error:
            raise ConfigError(f"{base} takes no files: {error.strerror}") from None
        undo.pop_all()
    return directory, lock


def regions(shared_memory_prefix: str) -> list[Path]:
    """The files of a server's shared memory."""
    return sorted(SHARED_MEMORY.glob(shared_memory_prefix + "*"))


def sweep() -> list[Path]:
    """Remove what is left of this user's servers that have no process; returns the directories."""
    swept = []
    for directory in _base().glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, not a server's, in use, or gone by now
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                prefix = (directory / _REGIONS).read_text("utf-8")
                if prefix.startswith(_PREFIX):
                    for region in regions(prefix):
                        region.unlink(missing_ok=True)
                    shutil.rmtree(directory, ignore_errors=True)
                    swept.append(directory)
            finally:
                os.close(lock)
    return swept


def _check_room(place: Path, least: int, advice: str = "") -> None:
    try:
        facts = os.statvfs(place)
    except OSError as error:
        raise ConfigError(f"{place} cannot be used: {error.strerror}") from None
    if facts.f_flag & os.ST_RDONLY or not os.access(place, os.W_OK):
        raise ConfigError(f"{place} cannot be written, and the server needs files there")
    free = facts.f_bavail * facts.f_frsize
    if free < least:
        raise ConfigError(f"{place} has {free:,} bytes left, a server needs {least:,}{advice}")


def _base() -> Path:
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"the server has no place for its files: {error.strerror}") from None
    return Path(base if len(base) < _LONGEST_BASE and base.isascii() else "/tmp")
