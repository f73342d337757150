"""The part of the channel that leads to ranks on other nodes: TCP connections to rank 0.

A connection begins with a handshake (``node_handshake``). Then come messages, each preceded by its
length in 4 bytes; none may be longer than its kind can be. A plan is one message. It is encoded
once, and handed to the kernel by one call per connection, which sends it at once (TCP_NODELAY).

Both ends are authenticated; nothing is encrypted. A follower sends a sign of life, which is an
empty message, several times a second, whatever its steps do. So rank 0 notices a cut cable or a
stopped process. A follower learns of a cut cable from its kernel, when these messages are not
acknowledged.

Knows sockets. Must not know processes, or what options and plans mean.

Invariants: rank 0 listens only until all ranks are there. A connection that has not proved its
identity can cause log lines, and nothing else.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.execution.node_handshake import (
    HANDSHAKE_S,
    NodePlace,
    Reply,
    Welcome,
    answer,
    prepare,
)
from minisgl_backend.execution.rank_channel import MOST_BYTES, FollowerEnd, Peer
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.parallel.rendezvous import listen_at
from minisgl_backend.request import IntArray

logger = logging.getLogger(__name__)

_START_SILENCE_S: Final = 120.0
"""Replaces ``SILENCE_S`` during the start, when a rank's process may spend long on imports."""
_BEAT_EVERY_S: Final = 0.25
"""The shortest timeout of ranks is a second."""
_LOOK_EVERY_S: Final = 0.5
_MOST_HANDSHAKES: Final = 16
"""The most handshakes at the same time; further callers wait in the kernel's queue."""
_TELL_EVERY_S: Final = 15.0
_MOST_PLAN_BYTES: Final = 2**28
_LENGTH: Final = struct.Struct("<I")
_LIFE: Final = b""


# --- rank 0 ----------------------------------------------------------------------------------


class NodePeer(Peer):
    """A follower on another node. Its messages are read by the thread of ``OtherNodes``."""

    def __init__(self, rank: int, node: int, connection: socket.socket) -> None:
        super().__init__(rank)
        self.node = node
        self.connection = connection
        self.silent_s = 0.0
        self.is_lost = False
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._partial = bytearray()
        self._timeout_s: float | None = None

    def receive(self) -> bytes:
        try:
            message = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise EngineFailure(f"rank {self.rank} does not answer") from None
        if message is None:
            self._inbox.put(None)
            raise EngineFailure(f"rank {self.rank} is gone")
        return message

    @property
    def has_spoken(self) -> bool:
        return not self._inbox.empty()

    def send(self, message: bytes | memoryview) -> None:
        length, sent = _LENGTH.pack(len(message)), 0
        try:
            sent = self.connection.sendmsg([length, message])
            if sent < len(length) + len(message):  # larger than the kernel's buffer
                rest = memoryview(length + bytes(message))[sent:]
                self.connection.sendall(rest)
        except BlockingIOError:
            raise EngineFailure(f"rank {self.rank} does not answer") from None
        except OSError:
            raise EngineFailure(f"rank {self.rank} is gone") from None

    def start_steps(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # not by settimeout, which makes two system calls for each message
        whole, part = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(whole), int(part * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def take(self) -> bool:
        """Read what has come, without waiting. False if the rank is gone or its message invalid."""
        try:
            piece = self.connection.recv(MOST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not piece:
            return False
        self.silent_s = 0.0
        self._partial += piece
        while len(self._partial) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._partial)
            if length > MOST_BYTES:
                logger.error("rank %d sent a message that is too long", self.rank)
                return False
            end = _LENGTH.size + length
            if len(self._partial) < end:
                break
            message = bytes(self._partial[_LENGTH.size : end])
            del self._partial[:end]
            if message != _LIFE:
                self._inbox.put(message)
        return True

    def end(self) -> None:
        """Mark the rank as lost, wake what waits for it, and end the connection."""
        self.is_lost = True
        self._inbox.put(None)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class OtherNodes:
    """Gathers the ranks of all other nodes, and then watches over them, on a thread."""

    def __init__(self, place: RankPlace, secret: bytes, *, silence_s: float) -> None:
        """``place`` is rank 0's, at whose host and port the nodes meet. A rank that is silent for
        ``silence_s`` is lost. Raises ``ConfigError`` if it is impossible to listen there."""
        self._place = place
        self._secret = secret
        self._silence_s = silence_s
        self._limit_s = _START_SILENCE_S
        self._peers: dict[int, NodePeer] = {}
        self._welcomed: dict[socket.socket, int] = {}  # ranks that are not in ``_peers`` yet
        self._store_port = 0
        self._changed = threading.Condition()
        self._handshakes = threading.Semaphore(_MOST_HANDSHAKES)
        self._report: Callable[[str], object] | None = None
        self._is_closed = False
        self._listener: socket.socket | None = listen_at(place)
        self._listener.setblocking(False)  # a caller may be gone before it is accepted
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="other nodes", daemon=True)

    def gather(
        self, store_port: int, timeout_s: float, report: Callable[[str], object]
    ) -> list[NodePeer]:
        """Wait until all ranks of the other nodes are there. Returns the ranks in order.

        From then on ``report`` is called, on another thread, with the cause when one is lost.
        Raises ``ConfigError`` if they do not come in time.
        """
        self._store_port = store_port
        self._thread.start()
        deadline_s, told_s = time.monotonic() + timeout_s, float("-inf")
        ranks = range(self._place.local_size, self._place.size)
        where = f"{self._place.host}:{self._place.port}"
        with self._changed:
            while missing := sorted(
                {rank // self._place.local_size for rank in ranks if rank not in self._peers}
            ):
                names = ", ".join(map(str, missing))
                now_s = time.monotonic()
                if now_s > deadline_s:
                    raise ConfigError(f"node {names} did not come to {where} in {timeout_s:g} s")
                if now_s - told_s > _TELL_EVERY_S:
                    told_s = now_s
                    logger.info("waiting at %s for node %s", where, names)
                self._changed.wait(_LOOK_EVERY_S)
            self._report = report
            peers = [self._peers[rank] for rank in ranks]
        os.write(self._waker, b"gathered")
        logger.info("all nodes are there")
        return peers

    def start_steps(self) -> None:
        """The start is over: from now on silence is judged by the shorter limit."""
        for peer in self._peers.values():
            peer.silent_s = 0.0
        self._limit_s = self._silence_s

    def end(self) -> None:
        """End all connections; the other nodes then end their processes. Does not wait."""
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            peer.end()

    def close(self) -> None:
        """End all connections, stop listening, and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.end()
        os.write(self._waker, b"close")
        if self._thread.ident is not None:
            self._thread.join()
        self._stop_listening()
        for peer in self._peers.values():
            peer.connection.close()
        os.close(self._wake)
        os.close(self._waker)

    # --- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._is_closed:
            with self._changed:
                peers = {
                    peer.connection.fileno(): peer
                    for peer in self._peers.values()
                    if not peer.is_lost
                }
                is_complete = self._report is not None
            if is_complete:
                self._stop_listening()
            poll = select.poll()
            listener = self._listener
            listening = [] if listener is None else [listener.fileno()]
            for descriptor in (self._wake, *peers, *listening):
                poll.register(descriptor, select.POLLIN)
            found = {descriptor for descriptor, _ in poll.poll(_LOOK_EVERY_S * 1000)}
            if self._wake in found:
                os.read(self._wake, MOST_BYTES)
            if listener is not None and not found.isdisjoint(listening):
                self._accept(listener)
            # adds up looks, not time: if this whole machine pauses, the others are not silent
            passed_s = min(time.monotonic() - looked_s, _LOOK_EVERY_S)
            looked_s = time.monotonic()
            for descriptor, peer in peers.items():
                peer.silent_s += passed_s
                if descriptor in found and not peer.take():
                    self._lose(peer, "is gone")
                elif peer.silent_s > self._limit_s:
                    self._lose(peer, f"is silent for {self._limit_s:g} s")

    def _lose(self, peer: NodePeer, how: str) -> None:
        text = f"rank {peer.rank}, on node {peer.node}, {how}"
        with self._changed:
            report = self._report
            if report is None:  # no other thread has it yet
                del self._peers[peer.rank]
        peer.end()
        if report is None:
            peer.connection.close()
            logger.warning("%s: it may come again", text)
        elif not self._is_closed:
            report(text)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it has gone already
            connection, address = listener.accept()
            if not self._handshakes.acquire(timeout=HANDSHAKE_S):
                connection.close()
                return
            threading.Thread(
                target=self._greet, args=(connection, address[0]), name="handshake", daemon=True
            ).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            place = answer(connection, self._secret, partial(self._judge, connection))
            if place is not None:
                prepare(connection)
                self._enter(place, connection)
                return
        except OSError as error:
            logger.warning("a caller from %s was sent away: %s", host, error)
        finally:
            with self._changed:
                self._welcomed.pop(connection, None)
            self._handshakes.release()
        connection.close()

    def _judge(self, connection: socket.socket, place: NodePlace) -> Reply | Welcome:
        local_size = self._place.local_size
        num_nodes = self._place.size // local_size
        fits = 0 < place.node < num_nodes and place.index < local_size
        if place.num_nodes != num_nodes or not fits:
            return Reply.WRONG_PLACE
        rank = self._rank(place)
        with self._changed:
            is_taken = rank in self._peers or rank in self._welcomed.values()
            if is_taken or self._report is not None:
                return Reply.TAKEN
            self._welcomed[connection] = rank
        return Welcome(self._place.size, local_size, self._store_port)

    def _rank(self, place: NodePlace) -> int:
        return place.node * self._place.local_size + place.index

    def _enter(self, place: NodePlace, connection: socket.socket) -> None:
        peer = NodePeer(self._rank(place), place.node, connection)
        with self._changed:
            is_late = self._report is not None or self._is_closed
            if not is_late:
                self._peers[peer.rank] = peer
                self._changed.notify_all()
                os.write(self._waker, b"new")  # ``close`` takes the lock before it closes this
        if is_late:
            connection.close()
        else:
            logger.info("rank %d, of node %d, is there", peer.rank, peer.node)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


# --- followers -------------------------------------------------------------------------------


class NodeFollowerEnd(FollowerEnd):
    """The end of a rank on a node other than rank 0's."""

    def __init__(self, connection: socket.socket) -> None:
        """``connection`` has had its handshake."""
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self._sending = threading.Lock()

    @property
    def own_address(self) -> str:
        """The address of this host by which rank 0 reaches it."""
        return str(self._connection.getsockname()[0])

    def give_signs_of_life(self, on_lost: Callable[[], object]) -> None:
        """Keep telling rank 0 that this process lives, on another thread, which calls ``on_lost``
        when the connection has broken."""
        threading.Thread(target=self._beat, args=(on_lost,), name="life", daemon=True).start()

    def _beat(self, on_lost: Callable[[], object]) -> None:
        try:
            while True:
                with self._sending:
                    self._connection.sendall(_LENGTH.pack(0))
                time.sleep(_BEAT_EVERY_S)
        except OSError:
            on_lost()

    def _receive(self) -> bytearray | None:
        try:
            head = self._incoming.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            if length > _MOST_PLAN_BYTES:
                raise EngineFailure("rank 0 sent a message that is too long")
            message = bytearray(length)
            return message if self._incoming.readinto(message) == length else None
        except OSError:
            return None

    def _send(self, message: bytes) -> None:
        with suppress(OSError), self._sending:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def _words(self, message: bytes | bytearray) -> IntArray:
        return np.frombuffer(message, np.int32)
