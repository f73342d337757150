"""The label that distinguishes the metrics of one engine from those of any other.

Two metrics with the same labels are one object inside Triton, which is dropped with the first of
the two; the next update of the other crashes tritonserver (measured with 24.10). So no two live
engines may share the label. But Triton never drops the metrics of a process that was killed, so an
engine that is loaded in its place takes over the label. Otherwise the dead engine's gauges would
stay forever and count, say, as a queue that no engine serves.

Knows files and their locks only. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from pathlib import Path
from typing import Final

_LABEL: Final = re.compile(r"[0-9a-f]{8}")
_LAST_LOCK_S: Final = 0.5
"""How long the locks of a process may outlive it, while the kernel takes it apart."""
_LOOK_EVERY_S: Final = 0.02


class SeriesLabel:
    """A label, held until ``release`` or the end of the process.

    Each label has a file, which the engine that has the label keeps locked. So an unlocked file
    belongs to an engine that was killed. The engine of a locked file may just be ending, so the
    lock is awaited for a moment.
    """

    def __init__(self, directory: Path | None, model: str) -> None:
        """``directory`` belongs to one tritonserver; without it no label is taken over."""
        self.value = secrets.token_hex(4)
        self._file = -1
        self._path: Path | None = None
        if directory is None:
            return
        prefix = f"series.{model}."
        with contextlib.suppress(OSError):  # a full disk
            names = (name.removeprefix(prefix) for name in sorted(os.listdir(directory)))
            left = list(filter(_LABEL.fullmatch, names))
            until_s = time.monotonic() + _LAST_LOCK_S
            while left and time.monotonic() < until_s:
                for label in left:
                    if self._take(directory / f"{prefix}{label}"):
                        self.value = label
                        return
                left = [label for label in left if (directory / f"{prefix}{label}").exists()]
                time.sleep(_LOOK_EVERY_S)
            self._take(directory / f"{prefix}{self.value}", os.O_CREAT)

    def _take(self, path: Path, flags: int = 0) -> bool:
        """Lock the file, unless a live engine has it; returns whether it is ours now."""
        try:
            file = os.open(path, os.O_RDWR | flags, 0o600)
        except FileNotFoundError:
            return False  # it was released just now
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink > 0:  # else it was released between the two calls
                self._file, self._path = file, path
                return True
        os.close(file)
        return False

    def release(self) -> None:
        """The series of this label are gone. Idempotent."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._path = None
