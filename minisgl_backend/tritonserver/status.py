"""A thread in each model's process that writes its heartbeat and answers requests for its counts.

Knows the server's runtime directory, which only this user may enter, so a caller who can open the
socket there may see the counts. A caller connects, and gets one JSON object and the end of the
stream. Must not know what the counts mean.

Without a runtime directory, no thread is started.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl_backend.runtime_files import Heartbeat, State, socket_path

logger = logging.getLogger(__name__)

BEAT_EVERY_S: Final = 0.25
_WRITE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """How the process is: ``tick_age_s`` is the age of its work loop's last sign of life."""

    tick_age_s: float = 0.0
    state: State = State.SERVING


class StatusServer:
    """The heartbeat and the counts of one process. Any thread may call ``entered`` and ``left``."""

    def __init__(
        self,
        directory: Path | None,
        model: str,
        *,
        stats: Callable[[], Mapping[str, Any]],
        status: Callable[[], Status] = Status,
    ) -> None:
        """``stats`` and ``status`` are called on the thread of this object, and must not wait."""
        self._heartbeat: Heartbeat | None = None
        if directory is None:
            return
        self._stats = stats
        self._get_status = status
        self._heartbeat = Heartbeat(directory, model)
        self._socket_path = socket_path(directory, model, os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._socket_path))
        self._listener.listen(16)
        self._wake, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def entered(self) -> None:
        """A request came in that only this process can end."""
        if self._heartbeat is not None:
            self._heartbeat.entered()

    def left(self) -> None:
        """Such a request got its final flag."""
        if self._heartbeat is not None:
            self._heartbeat.left()

    def close(self) -> None:
        """The process ends normally: its files are removed."""
        if self._heartbeat is None:
            return
        os.close(self._closing)
        self._thread.join()
        os.close(self._wake)
        self._listener.close()
        self._socket_path.unlink(missing_ok=True)
        self._heartbeat.close()

    def _run(self) -> None:
        assert self._heartbeat is not None
        while True:
            status = self._get_status()
            self._heartbeat.beat(tick_age_s=status.tick_age_s, state=status.state)
            listener = self._listener.fileno()
            ready, _, _ = select.select([self._wake, listener], [], [], BEAT_EVERY_S)
            if self._wake in ready:
                return
            if ready:
                self._answer()

    def _answer(self) -> None:
        try:
            caller, _ = self._listener.accept()
            with caller:
                caller.settimeout(_WRITE_S)
                caller.sendall(json.dumps(self._stats()).encode())
        except OSError:
            pass  # the caller has gone, or does not read
        except Exception:
            logger.exception("the counts could not be sent")
