"""The private directory of a server, its shared memory, and what is left of servers that were
killed.

All processes of a server hold two locks: the starter, tritonserver and its models. One is on its
directory, the other on a file beside its shared memory. So if one of these is not locked, no
process is left, however they ended, and the next start removes what it stands for: either may be
gone before the other, and containers may share one of the places only. The first lock is on the
directory itself, since systemd-tmpfiles, which removes files that are ten days old, respects such a
lock. Must not know what else servers keep there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from minisgl_backend.errors import ConfigError, NotNow

SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "minisgl-"
_MARKER: Final = "server"
"""The file that tells the directory of a server from others."""
_LOCK: Final = "lock"
"""What follows the prefix in the name of the locked file beside the shared memory."""
_LONGEST_BASE: Final = 40
"""Sockets live in the directory, and a socket's path must be short."""
_LEAST_BYTES: Final = 2**20
"""Some 100 KiB are written at the start, and as much again while it serves."""
_LEAST_SHARED_BYTES: Final = 8 * 2**20
"""Each of three processes begins with 1 MiB, and takes more as requests come."""


def make_directory(shared_memory_prefix: str) -> tuple[Path, tuple[int, int]]:
    """A fresh directory of mode 0700, and the descriptors that hold the server's locks.

    Raises ``ConfigError`` if there is no place for it, or none for shared memory; ``NotNow`` if
    there is too little room.
    """
    base = _base()
    _check_room(base, _LEAST_BYTES)
    _check_room(SHARED_MEMORY, _LEAST_SHARED_BYTES, " at least (in Docker: --shm-size)")
    place = base
    with contextlib.ExitStack() as undo:
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            lock = os.open(directory, os.O_RDONLY)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (directory / _MARKER).touch()
            place = SHARED_MEMORY
            lock_of_regions = _lock_regions(shared_memory_prefix)
        except OSError as error:
            kind = NotNow if is_for_want_of_room(error) else ConfigError
            raise kind(f"{place} takes no files: {error.strerror}") from None
        undo.pop_all()
    return directory, (lock, lock_of_regions)


def is_for_want_of_room(error: OSError) -> bool:
    """Whether a disk is full, or a quota used up. ``shutil.Error`` has no errno, only the messages
    of the errors that it collected, so the message is searched."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def regions(shared_memory_prefix: str) -> list[Path]:
    """The files of a server's shared memory."""
    found = set(SHARED_MEMORY.glob(shared_memory_prefix + "*"))
    return sorted(found - {_lock_of(shared_memory_prefix)})


def remove_regions(shared_memory_prefix: str) -> None:
    """Remove a server's shared memory, and the locked file beside it, by which it is found."""
    for region in (*regions(shared_memory_prefix), _lock_of(shared_memory_prefix)):
        with contextlib.suppress(OSError):  # gone by now, or another user's of the same name
            region.unlink()


def sweep() -> list[Path]:
    """Remove what is left of this user's servers that have no process; returns the directories, and
    the locked files beside shared memory."""
    swept = []
    for directory in _base().glob(_PREFIX + "*"):
        with _unused(directory, stat.S_IFDIR) as is_unused:
            if is_unused and (directory / _MARKER).exists():
                shutil.rmtree(directory, ignore_errors=True)
                swept.append(directory)
    for lock in SHARED_MEMORY.glob(f"{_PREFIX}*-{_LOCK}"):
        with _unused(lock, stat.S_IFREG) as is_unused:
            if is_unused:
                remove_regions(lock.name.removesuffix(_LOCK))
                swept.append(lock)
    return swept


def _lock_of(prefix: str) -> Path:
    return SHARED_MEMORY / f"{prefix}{_LOCK}"


def _lock_regions(prefix: str) -> int:
    """Create the file beside a server's shared memory; returns the descriptor that holds its lock.

    It has its name only once it is locked, so nobody takes it for one that was left.
    """
    descriptor, unnamed = tempfile.mkstemp(prefix=f".{prefix}", dir=SHARED_MEMORY)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        undo.callback(Path(unnamed).unlink)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(unnamed, _lock_of(prefix))
        undo.pop_all()
    return descriptor


@contextlib.contextmanager
def _unused(path: Path, kind: int) -> Iterator[bool]:
    """Whether a file of the type ``kind`` (``S_IFREG``, ``S_IFDIR``) is this user's and no process
    holds its lock; nobody can take it meanwhile."""
    is_unused = False
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # another user's, in use, or gone by now
            # another user's pipe must not make this wait
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            held.callback(os.close, lock)
            facts = os.fstat(lock)
            if facts.st_uid == os.getuid() and stat.S_IFMT(facts.st_mode) == kind:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_unused = True
        yield is_unused


def _check_room(place: Path, least: int, advice: str = "") -> None:
    try:
        facts = os.statvfs(place)
    except OSError as error:
        raise ConfigError(f"{place} cannot be used: {error.strerror}") from None
    if facts.f_flag & os.ST_RDONLY or not os.access(place, os.W_OK):
        raise ConfigError(f"{place} cannot be written, and the server needs files there")
    free = facts.f_bavail * facts.f_frsize
    if free < least:
        raise NotNow(f"{place} has {free:,} bytes left, a server needs {least:,}{advice}")


def _base() -> Path:
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"the server has no place for its files: {error.strerror}") from None
    return Path(base if len(base) < _LONGEST_BASE and base.isascii() else "/tmp")
