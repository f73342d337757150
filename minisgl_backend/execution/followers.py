"""The followers of rank 0. Those on its host are started, watched and ended only here.

Followers on other nodes connect by themselves (``node_channel``), from processes that their own
node starts and ends (``server.node``). Knows processes. Must not know models, or the messages of
the ``rank_channel``, of which each follower on this host inherits an end.

Invariants: followers never outlive the process of rank 0, however it ends. A lost follower is not
replaced: all others are ended, and the functions given to ``on_lost`` are called.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Final

from minisgl_backend.child_process import import_path
from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.execution.node_channel import OtherNodes
from minisgl_backend.execution.rank_channel import LeaderEnd
from minisgl_backend.parallel.place import RankPlace

logger = logging.getLogger(__name__)

CANNOT_START: Final = 2
"""The exit code of a follower that could not start on its host, whatever rank 0 does."""
_START_S: Final = 1800.0
"""How long rank 0 waits for a rank to load its part of the model."""
_END_S: Final = 10.0
"""How long followers may take to end by themselves at a stop."""
_LOOK_EVERY_S: Final = 0.5


class Followers:
    """Ranks 1 .. size - 1, and rank 0's end of the channel to them.

    ``failure`` is set once they are lost or ended.
    """

    def __init__(
        self, place: RankPlace, command: Sequence[str], other_nodes: OtherNodes | None = None
    ):
        """Start each follower of this host by ``command``, and wait for those of ``other_nodes``.
        ``place`` is rank 0's, with the port of the store. Raises ``ConfigError`` if one cannot be
        started.

        The command gets three more arguments: the two descriptors of its end of the channel, and
        the id of this process.
        """
        self.channel = LeaderEnd(place.local_size - 1, start_s=_START_S)
        self.failure: EngineFailure | None = None
        self._other_nodes = other_nodes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reports: list[Callable[[EngineFailure], None]] = []
        self._complaint: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()
        self._is_closed = False
        self._wake, self._waker = os.pipe()
        started: Future[None] = Future()
        # Linux kills such a child when the thread that started it ends, so the thread must live on
        self._thread = threading.Thread(
            target=self._keep, args=(place, command, started), name="ranks", daemon=True
        )
        self._thread.start()
        try:
            started.result()
            if other_nodes is not None:
                self.channel.add(other_nodes.gather(place.port, _START_S, self.lose))
        except BaseException:
            self.close(patience_s=0)
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ... of this host."""
        return [process.pid for process in self._processes]

    def on_lost(self, report: Callable[[EngineFailure], None]) -> None:
        """Call ``report`` once, on another thread, when a follower has ended or hangs.

        If there are several functions, the newest is called first. If a follower is already lost,
        ``report`` is called at once.
        """
        with self._lock:
            self._reports.insert(0, report)
            failure = self.failure
        if failure is not None:
            report(failure)

    def watch_for(self, complaint: Callable[[], str | None]) -> None:
        """Call ``complaint`` twice a second, on another thread. If it returns a cause, all
        followers are ended (``lose``)."""
        self._complaint = complaint

    def lose(self, cause: str) -> EngineFailure:
        """End all followers because of ``cause``. Returns the failure, with the first cause."""
        with self._lock:
            if self.failure is not None:
                return self.failure
            self.failure = failure = EngineFailure(cause)
            reports = list(self._reports)
        logger.error("the engine is down: %s", cause)
        for process in self._processes:
            process.kill()
        if self._other_nodes is not None:
            self._other_nodes.end()
        for report in reports:
            report(failure)
        return failure

    def start_steps(self, timeout_s: float) -> None:
        """The start is over: a follower that is silent for this time is lost from now on."""
        self.channel.start_steps(timeout_s)
        if self._other_nodes is not None:
            self._other_nodes.start_steps()

    def close(self, *, patience_s: float = _END_S) -> None:
        """Wait ``patience_s`` for the processes to end by themselves, then kill the others.

        Idempotent.
        """
        with self._lock:
            if self.failure is None:
                self.failure = EngineFailure("the ranks have been ended")
        self.channel.close()
        if self._other_nodes is not None:
            self._other_nodes.close()
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
            os.close(self._wake)
            os.close(self._waker)

    # --- the thread that owns the processes --------------------------------------------------

    def _keep(self, place: RankPlace, command: Sequence[str], started: Future[None]) -> None:
        with ExitStack() as watched:
            try:
                for rank in range(1, place.local_size):
                    self._start(place.of(rank), command)
                ranks = {}
                for rank, pid in enumerate(self.pids, start=1):
                    descriptor = os.pidfd_open(pid)
                    watched.callback(os.close, descriptor)
                    ranks[descriptor] = rank
            except OSError as error:  # such as a limit on processes or open files
                started.set_exception(ConfigError(f"the ranks cannot be started: {error}"))
                return
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._watch(ranks)

    def _start(self, place: RankPlace, command: Sequence[str]) -> None:
        with self.channel.inherited(place.rank) as descriptors:
            process = subprocess.Popen(
                [*command, *map(str, descriptors), str(os.getpid())],
                env={**os.environ, **place.environment(), **import_path()},
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        self._processes.append(process)

    def _watch(self, ranks: Mapping[int, int]) -> None:
        """Watch the processes until ``close`` is called. ``ranks`` are by the descriptors of their
        processes."""
        poll = select.poll()
        for descriptor in (self._wake, *ranks):
            poll.register(descriptor, select.POLLIN)
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
