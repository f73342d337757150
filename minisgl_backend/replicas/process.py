"""The process of one replica: started, watched, ended, and started again if it ends by itself.

Knows processes and sockets, and passes messages on. Must not know requests or what a replica has
cached. A thread for each replica owns its processes, since Linux kills such a child when the thread
that started it ends; it also reads what they send. Another thread writes, so that the sender of a
message never waits for a replica that does not read.

Invariants: a replica never outlives this process, however this one ends. For each process,
``joined`` is called before any of its messages is passed on, and ``lost`` after the last.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Protocol

from minisgl_backend.child_process import import_path
from minisgl_backend.errors import ConfigError
from minisgl_backend.replicas.messages import Incoming, Message, decode_info, send
from minisgl_backend.runtime.engine_base import EngineInfo

logger = logging.getLogger(__name__)

_START_S: Final = 1800.0
"""How long a replica may load its model."""
_HANG_AFTER_S: Final = 7.0
"""A replica gives a sign of life several times a second; it hangs if it is silent for longer."""
_LOOK_EVERY_S: Final = 0.5
_END_S: Final = 10.0
"""How long a replica that is stopped has to end by itself."""
_MOST_FAILURES: Final = 5
"""A replica whose start failed this many times in a row stays down."""
_WINDOW_S: Final = 600.0
_MOST_PAUSE_S: Final = 30.0


class Owner(Protocol):
    """Who is told about a replica, on the replica's thread."""

    def joined(self, replica: int) -> None:
        """A process serves from now on."""

    def take(self, replica: int, message: Message) -> None:
        """A message that the replica has sent."""

    def lost(self, replica: int, *, is_last: bool) -> None:
        """The process has ended, or could not start; ``is_last`` if no other process follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """Where a replica runs: ``environment`` holds variables that its process gets besides those of
    this one, ``cores`` the processor cores that it may use; if empty, all."""

    environment: Mapping[str, str]
    cores: frozenset[int] = frozenset()


class ReplicaProcess:
    """One replica, in one process after another."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        place: ReplicaPlace,
        options: Mapping[str, object],
    ) -> None:
        """``command`` gets three more arguments: the number, the descriptor of its socket and the
        id of this process."""
        self.number = number
        self.pid: int | None = None
        """That of the process that serves now."""
        self.num_starts = 0
        self.started: Future[EngineInfo] = Future()
        """What the first process serves; a ``ConfigError`` if it cannot."""
        self._command = command
        self._place = place
        self._options = options
        self._owner: Owner | None = None
        self._is_owned = threading.Event()
        self._has_served = False
        self._process: subprocess.Popen[bytes] | None = None
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"replica {number}", daemon=True)

    def start(self) -> None:
        """Start the replica's thread; ``started`` gets the outcome."""
        self._thread.start()

    def serve(self, owner: Owner) -> None:
        """Tell ``owner`` everything that happens from now on. The first process waits for this."""
        self._owner = owner
        self._is_owned.set()

    def send(self, message: Message) -> None:
        """Send a message to the process that serves now, without waiting."""
        self._outgoing.put(message)

    def kill(self) -> None:
        """End the process that runs now. Another one follows unless ``close`` was called."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Let the process end by itself; no other process follows. Does not wait; idempotent."""
        self._closing.set()
        self._is_owned.set()
        self._outgoing.put(None)

    def close(self, patience_s: float | None = None) -> None:
        """End for good, within ``patience_s`` as a rule."""
        self.stop()
        if self._thread.ident is None:  # ``start`` has failed, or was not called
            return
        self._thread.join(_END_S if patience_s is None else patience_s)
        self.kill()
        self._thread.join()

    # --- the thread that owns the processes --------------------------------------------------

    def _run(self) -> None:
        ended_s: list[float] = []
        num_failures = 0
        while not self._closing.wait(self._pause_s(ended_s)):
            try:
                self._serve()
            except Exception as error:
                if self._closing.is_set():
                    pass  # whatever it was doing has been cut off
                elif isinstance(error, ConfigError):
                    logger.error("replica %d cannot start: %s", self.number, error)
                else:
                    logger.exception("replica %d is ended after an internal error", self.number)
                if not self.started.done():
                    self.started.set_exception(error)
                    return
            ended_s.append(time.monotonic())
            num_failures = 0 if self._has_served else num_failures + 1
            is_last = self._closing.is_set() or num_failures == _MOST_FAILURES
            if self._owner is not None:
                self._owner.lost(self.number, is_last=is_last)
            if is_last:
                if not self._closing.is_set():
                    logger.critical("replica %d could not be started again", self.number)
                return

    def _pause_s(self, ended_s: Sequence[float]) -> float:
        """The pause before the next start: none before the first restart within ``_WINDOW_S``, a
        second before the next, and then twice as long each time, up to ``_MOST_PAUSE_S``."""
        num_ended = sum(time.monotonic() - at_s < _WINDOW_S for at_s in ended_s)
        return min(_MOST_PAUSE_S, 2.0 ** (num_ended - 2)) if num_ended > 1 else 0.0

    def _serve(self) -> None:
        """Run one process to its end. Raises ``ConfigError`` if it cannot start."""
        self._has_served = False
        outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        outgoing.put({"options": self._options})  # before others can send anything
        self._outgoing = outgoing  # drops what was sent to the previous process
        ours, process = self._launched()
        writer = threading.Thread(
            target=self._write, args=(ours, self._outgoing), name="to replica", daemon=True
        )
        with ours:
            self.num_starts += 1
            self._process = process
            try:
                writer.start()
                incoming = Incoming(ours)
                first = self._first(incoming)
                self._loaded(decode_info(first["info"]))
                self._is_owned.wait()
                self._has_served = True
                if self._owner is not None:
                    self.pid = process.pid
                    self._owner.joined(self.number)
                    self._owner.take(self.number, first)
                    self._read(incoming, self._owner)
            finally:
                self._ended(ours, process, writer)
        level = logging.INFO if self._closing.is_set() else logging.ERROR
        text = "replica %d (process %d) ended with code %d"
        logger.log(level, text, self.number, process.pid, process.returncode)

    def _launched(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """This end of the socket to a new process, and the process. Raises ``ConfigError``."""
        try:
            ours, theirs = socket.socketpair()
            with ExitStack() as unless_launched, theirs:
                unless_launched.enter_context(ours)
                process = self._popen(theirs)
                unless_launched.pop_all()
        except OSError as error:  # such as a limit on processes or open files
            raise ConfigError(f"its process cannot be started: {error}") from error
        return ours, process

    def _loaded(self, info: EngineInfo) -> None:
        """A process has loaded the model; the next one will have as many pages."""
        self._options = {**self._options, "num_pages": info.num_pages}
        if not self.started.done():
            self.started.set_result(info)

    def _ended(
        self, ours: socket.socket, process: subprocess.Popen[bytes], writer: threading.Thread
    ) -> None:
        """End a process unless it has served and ends by itself, and the thread that writes."""
        self.pid = None
        if not (self._has_served and self._closing.is_set()):
            process.kill()
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        self._wait(process)
        self._process = None
        self._outgoing.put(None)
        if writer.ident is not None:  # else it could not be started
            writer.join()

    def _popen(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        own_cores = os.sched_getaffinity(0)  # of this thread; a child inherits them
        try:
            if self._place.cores:
                os.sched_setaffinity(0, self._place.cores)
            return subprocess.Popen(
                [*self._command, *map(str, (self.number, theirs.fileno(), os.getpid()))],
                env={**os.environ, **import_path(), **self._place.environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            os.sched_setaffinity(0, own_cores)

    def _first(self, incoming: Incoming) -> Message:
        """Wait until the process serves. Raises ``ConfigError`` if it cannot."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._closing.is_set():
                raise ConfigError("it was stopped while it loaded")
            try:
                message = incoming.receive(_LOOK_EVERY_S)
            except TimeoutError:
                continue
            if message is None:
                raise ConfigError("its process ended")
            if "error" in message:
                raise ConfigError(message["error"])
            return message
        raise ConfigError(f"it did not load within {_START_S:g} s")

    def _read(self, incoming: Incoming, owner: Owner) -> None:
        """Pass on messages until the process ends or hangs."""
        silent_s = 0.0  # counts looks, not time: a pause of the whole machine is no silence
        while silent_s < _HANG_AFTER_S:
            try:
                message = incoming.receive(_LOOK_EVERY_S)
            except TimeoutError:
                silent_s += _LOOK_EVERY_S
                continue
            if message is None:
                return
            silent_s = message.get("pulse", 0.0)
            owner.take(self.number, message)
        logger.error("replica %d hangs, and is ended", self.number)
        self.kill()

    def _write(self, ours: socket.socket, outgoing: queue.SimpleQueue[Message | None]) -> None:
        with suppress(OSError):
            while (message := outgoing.get()) is not None:
                send(ours, message)
            ours.shutdown(socket.SHUT_WR)  # at this the process ends by itself

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
