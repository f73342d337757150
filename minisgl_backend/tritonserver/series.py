"""The label by which the metrics of one engine are told from those of any other.

Two metrics with the same labels are one object inside Triton, which goes with the first of the two;
the next update of the other crashes tritonserver (measured with 24.10). So no two engines that live
may share the label. But Triton never drops the metrics of a process that was killed: an engine that
is loaded in its place takes over the label. Otherwise gauges of the dead one would stay for ever
and count, say, as a queue that no engine serves.

Knows files and their locks only. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Final

_LABEL: Final = re.compile(r"[0-9a-f]{8}")


class SeriesLabel:
    """A label, held until ``release`` or the end of the process.

    Each has a file, which the engine that has the label keeps locked. So a file that is not locked
    is of an engine that was killed.
    """

    def __init__(self, directory: Path | None, model: str) -> None:
        """``directory`` is of one tritonserver; without one no label is taken over."""
        self.value = secrets.token_hex(4)
        self._file = -1
        self._path: Path | None = None
        if directory is None:
            return
        prefix = f"series.{model}."
        with contextlib.suppress(OSError):  # a full disk
            left = (name.removeprefix(prefix) for name in sorted(os.listdir(directory)))
            for label in (*filter(_LABEL.fullmatch, left), self.value):
                if self._take(directory / f"{prefix}{label}"):
                    self.value = label
                    return

    def _take(self, path: Path) -> bool:
        """Whether no engine that lives has the file."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
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
