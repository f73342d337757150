"""The processes of ranks 1 .. size - 1 on this host, and how they start together with rank 0.

Rank 0 sends each follower its options. Then all ranks meet at a few barriers, so that no rank waits
in a collective for another that is not there yet. After that the same sockets carry plans
(``plan_channel``). Knows processes and sockets. Must not know models, or what the options mean.

Invariants: followers never outlive the process of rank 0, however it ends. A lost follower is not
replaced: all others are ended, and the function given to ``on_lost`` is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.execution.plan_channel import Peer, PlanRing
from minisgl_backend.parallel.place import Place

logger = logging.getLogger(__name__)

_HERE: Final = b"here"
_GO: Final = b"go"
_START_S: Final = 1800.0
"""How long rank 0 waits for a rank that loads its part of the model."""
_END_S: Final = 10.0
"""How long followers have to end by themselves at a stop."""
_MOST_BYTES: Final = 2**16
_LOOK_EVERY_S: Final = 0.5


class Followers:
    """The processes of ranks 1 .. size - 1 on this host: starts, watches and ends them."""

    def __init__(self, place: Place, command: Sequence[str], greeting: bytes):
        """Start each follower by ``command``, and send it ``greeting``.

        The command gets three more arguments: the descriptors of its socket and of the memory for
        plans, and the id of this process.
        """
        self.ring = PlanRing.create()
        self.peers: list[Peer] = []
        self.failure: EngineFailure | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._report_loss: Callable[[EngineFailure], None] = lambda failure: None
        self._complaint: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()
        self._is_closed = False
        self._wake, self._waker = os.pipe()
        started: Future[None] = Future()
        # Linux kills such a child when the thread that started it ends: the thread has to live on
        self._thread = threading.Thread(
            target=self._keep, args=(place, command, greeting, started), name="ranks", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close(patience_s=0)
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def on_lost(self, report: Callable[[EngineFailure], None]) -> None:
        """Call ``report`` once, on another thread, when a follower has ended or hangs.

        Replaces the function given before. If a follower is lost already, it is called at once.
        """
        with self._lock:
            self._report_loss = report
            failure = self.failure
        if failure is not None:
            report(failure)

    def watch_for(self, complaint: Callable[[], str | None]) -> None:
        """Call ``complaint`` twice a second, on another thread; a cause that it returns ends all
        followers (``lose``)."""
        self._complaint = complaint

    def meet(self) -> None:
        """Wait until every follower has called its own ``meet``, then let all of them go on.

        Raises ``ConfigError``, with the cause, if a follower has failed, and ``EngineFailure`` if
        it is gone.
        """
        for peer in self.peers:
            message = peer.receive()
            if message != _HERE:
                raise ConfigError(f"rank {peer.rank}: {message.decode()}")
        for peer in self.peers:
            peer.send(_GO)

    def report(self) -> str | None:
        """Why a follower cannot start, if one has said so."""
        for peer in self.peers:
            peer.socket.setblocking(False)
            with contextlib.suppress(EngineFailure, BlockingIOError):
                while (message := peer.receive()) == _HERE:
                    pass
                return f"rank {peer.rank}: {message.decode()}"
        return None

    def lose(self, cause: str) -> EngineFailure:
        """End all followers because of ``cause``; returns the failure, with the first cause."""
        with self._lock:
            is_first = self.failure is None
            if self.failure is None:
                self.failure = EngineFailure(cause)
            failure, report_loss = self.failure, self._report_loss
        if is_first:
            logger.error("the engine is down: %s", cause)
            for process in self._processes:
                process.kill()
            report_loss(failure)
        return failure

    def close(self, *, patience_s: float = _END_S) -> None:
        """Wait ``patience_s`` for the processes to end by themselves, then kill the others.

        Idempotent.
        """
        with self._lock:
            if self.failure is None:
                self.failure = EngineFailure("the ranks have been ended")
        for peer in self.peers:
            peer.socket.close()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._is_closed:
            self._is_closed = True
            os.write(self._waker, b"close")
            self._thread.join()
            self.ring.close()
            os.close(self._wake)
            os.close(self._waker)

    # --- the thread that owns the processes --------------------------------------------------

    def _keep(
        self, place: Place, command: Sequence[str], greeting: bytes, started: Future[None]
    ) -> None:
        try:
            for rank in range(1, place.size):
                self._start(place.of(rank), command, greeting)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._watch()

    def _start(self, place: Place, command: Sequence[str], greeting: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_START_S)
        self.peers.append(Peer(place.rank, ours))
        descriptors = theirs.fileno(), self.ring.descriptor
        with theirs:
            process = subprocess.Popen(
                [*command, *map(str, descriptors), str(os.getpid())],
                env={**os.environ, **place.environment(), **_import_path()},
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        self._processes.append(process)
        ours.send(greeting)

    def _watch(self) -> None:
        """Watch the processes until ``close`` is called."""
        ranks = {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids, start=1)}
        poll = select.poll()
        for descriptor in (self._wake, *ranks):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                found = [descriptor for descriptor, _ in poll.poll(_LOOK_EVERY_S * 1000)]
                if self._wake in found:
                    return
                for descriptor in found:
                    poll.unregister(descriptor)
                    self.lose(f"rank {ranks[descriptor]} ended")
                complaint = self._complaint()
                if complaint is not None:
                    self.lose(complaint)
        finally:
            for descriptor in ranks:
                os.close(descriptor)


def _import_path() -> dict[str, str]:
    """Variables with which a child imports the same modules as this process, in any folder."""
    folders = map(os.path.abspath, sys.path)
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}


class Leader:
    """Rank 0, as seen by a follower."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.greeting = connection.recv(_MOST_BYTES)

    def meet(self) -> None:
        """Tell rank 0 that this rank is here, and wait until all ranks are."""
        self.connection.send(_HERE)
        if self.connection.recv(len(_GO)) != _GO:
            raise EngineFailure("rank 0 is gone")

    def report(self, error: BaseException) -> None:
        """Tell rank 0 why this rank cannot start."""
        with contextlib.suppress(OSError):  # the reason may be that rank 0 is gone
            self.connection.send(f"{error}".encode()[:_MOST_BYTES] or b"failed")
