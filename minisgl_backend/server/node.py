"""A node other than 0: it joins the group of node 0, starts its ranks and watches them.

Knows processes, the connections to node 0 (``node_channel``) and the options of this machine. Must
not know tritonserver, which only node 0 runs, or models. The ranks talk to rank 0 directly; this
process gives each of them a connection after the handshake.

When a rank ends for any reason, the others on this machine are ended, too: the group is lost, and
node 0 reloads its engine. Then this node joins the new group, as it does when node 0 starts later
or is replaced. It ends only when it is told to, or when it can never follow node 0.

Invariants: ranks never outlive this process, however it ends. This node runs all of its ranks of a
group, or none.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

from minisgl_backend.child_process import import_path
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.followers import CANNOT_START
from minisgl_backend.execution.node_handshake import NodePlace, NotYet, Welcome, knock
from minisgl_backend.parallel.place import RankPlace, host_and_port
from minisgl_backend.server.stop_event import StopEvent
from minisgl_backend.server.supervisor import Health, Phase

logger = logging.getLogger(__name__)

_RANK: Final = "minisgl_backend.tensor_parallel"
_CONNECT_S: Final = 5.0
_KNOCK_EVERY_S: Final = 0.5
_TELL_EVERY_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.1
_END_S: Final = 5.0
"""How long ranks have to end by themselves when the group has ended."""
_SERVED_LONG_S: Final = 60.0
_MOST_PAUSE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Group:
    """The connections of this node's ranks, by their numbers on the node. Only the ranks use them;
    they show this process that the group has ended, even if a rank is stuck."""

    welcome: Welcome
    connections: Sequence[socket.socket]

    def has_ended(self) -> bool:
        """Whether rank 0 has ended a connection, or does not acknowledge what was sent."""
        poll = select.poll()
        for connection in self.connections:
            poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


class FollowingNode:
    """Joins one group after another. ``run`` belongs to one thread, the rest to any."""

    def __init__(
        self, address: str, num_nodes: int, node: int, secret: bytes, options: Mapping[str, str]
    ) -> None:
        """``address`` is the HOST:PORT at which nodes meet; ``options`` are those that this machine
        was given, as text."""
        self._host, self._port = host_and_port(address)
        self._num_nodes = num_nodes
        self._node = node
        self._secret = secret
        self._options = json.dumps(dict(options))
        self._phase = Phase.STARTING
        self._reason = "node 0 has not been reached yet"
        self._num_groups = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, stopping: StopEvent, drain_s: float) -> None:
        """Follow until ``stopping`` is set, and then as long as node 0 still serves, but at most
        for ``drain_s``.

        Raises ``ConfigError`` if this node could not follow whatever node 0 does.
        """
        pause_s = 0.0
        try:
            while not stopping.wait(pause_s):
                group = self._join(stopping)
                if group is None:
                    return
                began_s = time.monotonic()
                try:
                    self._follow(group, stopping, drain_s)
                finally:
                    self._end_ranks()
                has_lasted = time.monotonic() - began_s > _SERVED_LONG_S
                pause_s = 0.0 if has_lasted else min(_MOST_PAUSE_S, 2 * pause_s or _KNOCK_EVERY_S)
        finally:
            self._phase = Phase.STOPPING
            self._reason = "this node is told to stop"

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self._processes:
            process.kill()

    def health(self) -> Health:
        """``ready`` while the ranks serve."""
        ready = self._phase is Phase.SERVING
        return Health(ready=ready, phase=self._phase, reasons=() if ready else (self._reason,))

    def stats(self) -> Mapping[str, Any]:
        """What this node does, for operators and tests."""
        return {
            "phase": self._phase.value,
            "node_rank": self._node,
            "num_groups": self._num_groups,
            "ranks": [process.pid for process in self._processes],
        }

    # --- joining -----------------------------------------------------------------------------

    def _join(self, stopping: StopEvent) -> _Group | None:
        """Wait until node 0 takes the ranks of this node; None if ``stopping`` is set first."""
        told_s = float("-inf")
        while not stopping.is_set():
            try:
                return self._knock_for_all()
            except (OSError, NotYet) as error:
                self._reason = f"node 0 does not take this node yet: {error}"
                if time.monotonic() - told_s > _TELL_EVERY_S:
                    told_s = time.monotonic()
                    logger.info("waiting for node 0 at %s:%d: %s", self._host, self._port, error)
            stopping.wait(_KNOCK_EVERY_S)
        return None

    def _knock_for_all(self) -> _Group:
        with ExitStack() as undo:
            first, welcome = self._knock(0)
            undo.callback(first.close)
            connections = [first]
            for index in range(1, welcome.local_size):
                connection, same = self._knock(index)
                undo.callback(connection.close)
                if same != welcome:  # another group by now
                    raise NotYet("node 0 has just begun again")
                connections.append(connection)
            undo.pop_all()
        return _Group(welcome, connections)

    def _knock(self, index: int) -> tuple[socket.socket, Welcome]:
        where = (self._host, self._port)
        connection = socket.create_connection(where, timeout=_CONNECT_S)
        try:
            place = NodePlace(self._num_nodes, self._node, index)
            return connection, knock(connection, self._secret, place)
        except BaseException:
            connection.close()
            raise

    # --- ranks -------------------------------------------------------------------------------

    def _follow(self, group: _Group, stopping: StopEvent, drain_s: float) -> None:
        """Start the ranks of a group, and wait until one ends. Raises ``ConfigError``."""
        self._num_groups += 1
        self._phase = Phase.STARTING if self._num_groups == 1 else Phase.RECOVERING
        self._reason = "the ranks are being loaded"
        ranks = self._ranks(group.welcome)
        logger.info("in the group: ranks %d to %d are being loaded", ranks[0], ranks[-1])
        signs: list[int] = []
        end_s = float("inf")
        try:
            places = self._places(group.welcome)
            for place, connection in zip(places, group.connections, strict=True):
                signs.append(self._start(place, connection))
            while not (ended := [p for p in self._processes if p.poll() is not None]):
                is_told = stopping.wait(_LOOK_EVERY_S)
                self._look(signs)  # after the wait, else ranks that just began to serve are ended
                if is_told and self._phase is not Phase.SERVING:
                    return
                if is_told:
                    end_s = min(end_s, time.monotonic() + drain_s)
                    time.sleep(_LOOK_EVERY_S)
                if group.has_ended():
                    end_s = min(end_s, time.monotonic() + _END_S)
                if time.monotonic() > end_s:
                    logger.warning("the group has ended, and its ranks have not: they are killed")
                    return
        finally:
            for sign in signs:
                if sign >= 0:
                    os.close(sign)
            self._phase, self._reason = Phase.RECOVERING, "the group has ended"
            group.close()
        self._judge(ended, stopping)

    def _look(self, signs: list[int]) -> None:
        """Note which ranks have said that they serve."""
        if self._phase is Phase.SERVING:
            return
        waiting = [sign for sign in signs if sign >= 0]
        readable, _, _ = select.select(waiting, [], [], 0)
        for sign in readable:
            if os.read(sign, 16):  # else its process has ended
                signs[signs.index(sign)] = -1
                os.close(sign)
        if not any(sign >= 0 for sign in signs):
            self._phase = Phase.SERVING
            logger.info("serving: the ranks of this node follow node 0")

    def _judge(self, ended: Sequence[subprocess.Popen[bytes]], stopping: StopEvent) -> None:
        codes = sorted({process.returncode for process in ended})
        if CANNOT_START in codes:
            raise ConfigError("the ranks of this node cannot start: see above")
        if not stopping.is_set():
            logger.warning("the group has ended (ranks by code %s)", ", ".join(map(str, codes)))

    def _ranks(self, welcome: Welcome) -> range:
        first = self._node * welcome.local_size
        return range(first, first + welcome.local_size)

    def _places(self, welcome: Welcome) -> list[RankPlace]:
        return [
            RankPlace(
                rank=rank,
                size=welcome.size,
                host=self._host,
                port=welcome.store_port,
                local_rank=index,
                local_size=welcome.local_size,
            )
            for index, rank in enumerate(self._ranks(welcome))
        ]

    def _start(self, place: RankPlace, connection: socket.socket) -> int:
        """Start a rank; returns the descriptor from which it can be read that the rank serves."""
        sign, theirs = os.pipe()
        numbers = (connection.fileno(), theirs, os.getpid())
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _RANK, *map(str, numbers), self._options],
                env={**os.environ, **place.environment(), **import_path()},
                stdin=subprocess.DEVNULL,
                pass_fds=[connection.fileno(), theirs],
                start_new_session=True,  # Ctrl-C in the terminal is for this process alone
            )
        except BaseException:
            os.close(sign)
            raise
        finally:
            os.close(theirs)
        self._processes.append(process)
        return sign

    def _end_ranks(self) -> None:
        self.kill()
        for process in self._processes:
            with suppress(OSError):
                process.wait()
        self._processes.clear()
