"""Keeps machine code in the user's cache folder, so that a kernel is compiled only once.

Several processes may compile the same kernel at the same time: a file appears whole or not at all.
If nothing can be kept there, kernels are compiled at every start. Must not know compilers or GPUs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def kept(name: str, compiled: Callable[[], bytes]) -> bytes:
    """The content of the cache's file ``name``. If there is no such file, returns and keeps what
    ``compiled`` returns."""
    path = _path(name)
    if path is not None:
        with contextlib.suppress(OSError):
            if binary := path.read_bytes():  # a machine that lost power may have left it empty
                return binary
    binary = compiled()
    if path is not None:
        _keep(path, binary)
    return binary


def _path(name: str) -> Path | None:
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home, as in some containers
        logger.info("compiled kernels are not kept: %s", error)
        return None
    return cache / "minisgl" / "kernels" / name


def _keep(path: Path, binary: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(binary)
                file.flush()
                os.fsync(file.fileno())  # before its name: power may be lost in between
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
