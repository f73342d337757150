"""A thread that serves connections of type SOCK_SEQPACKET without ever blocking on a write.

Knows sockets and send queues. Must not know what is in a message: a subclass handles messages, new
connections, and peers that have gone.

Invariants: only the thread reads; only it, and ``stop`` when it has ended, close sockets; a peer
whose socket is closed is ``broken``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from typing import Final, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 2**14
"""A longer message would be cut off, so none is sent."""
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class SendQueue(Protocol):
    """What waits to be written to a peer."""

    def message(self) -> bytes | None:
        """The next message, or None if nothing waits."""

    def written(self) -> None:
        """The message was written: its contents wait no longer."""


Q = TypeVar("Q", bound=SendQueue)


class Peer(Generic[Q]):
    """The other end of a connection. Writing never blocks; safe to use from any thread."""

    def __init__(self, sock: socket.socket, queue: Q) -> None:
        self.socket = sock
        self.queue = queue
        self.lock = threading.Lock()
        self.broken = False
        self.flushed_s = float("-inf")
        """When it was last written to, by ``time.monotonic``."""

    def flush(self) -> bool:
        """Write what waits; False if the socket did not take all of it."""
        with self.lock:
            while not self.broken:
                message = self.queue.message()
                if message is None:
                    break
                try:
                    self.socket.send(message, _SEND_FLAGS)
                except BlockingIOError:
                    return False
                except OSError:  # its end of file is on the way to the reader
                    self.broken = True
                    break
                self.queue.written()
            return True

    def close(self) -> None:
        """Close the socket; nothing more is written."""
        with self.lock:
            self.broken = True
            self.socket.close()


class Reactor(Generic[Q]):
    """A thread that reads from peers, finishes writes that had to wait, and accepts peers."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._stuck: set[Peer[Q]] = set()
        self._later: dict[Peer[Q], float] = {}
        """When to write to peers that wait for a later time."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def on_message(self, peer: Peer[Q], message: bytes) -> None:
        """A peer sent a message. Like the next two, called on the thread."""
        raise NotImplementedError

    def on_gone(self, peer: Peer[Q]) -> None:
        """A peer has gone; its socket is closed."""
        raise NotImplementedError

    def on_connection(self) -> None:
        """A peer connects to a listener that was registered."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self, peer: Peer[Q]) -> None:
        """Read from a peer from now on, and close its socket in the end."""
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def register_listener(self, listener: socket.socket) -> None:
        """Call ``on_connection`` when a peer connects to this socket; it stays the caller's."""
        self._selector.register(listener, selectors.EVENT_READ)

    def flush(self, peer: Peer[Q]) -> None:
        """Write what waits for ``peer``, now or as soon as its socket takes it."""
        peer.flushed_s = time.monotonic()
        if not peer.flush():
            with self._lock:
                self._stuck.add(peer)
            self.wake()

    def flush_later(self, peer: Peer[Q], at_s: float) -> None:
        """Write what waits for ``peer`` at that time, or at the time that an earlier call set."""
        with self._lock:
            if peer in self._later:
                return
            self._later[peer] = at_s
        self.wake()

    def wake(self) -> None:
        """Let the thread look for what has changed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, and close the connections."""
        self._closing = True
        self.wake()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Peer):
                key.data.close()
        self._selector.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._wait_s()):
                if key.fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    self._watch_stuck()
                elif isinstance(key.data, Peer):
                    self._serve(key.data, events)
                else:
                    self.on_connection()
            if self._later:
                self._flush_due()

    def _wait_s(self) -> float | None:
        with self._lock:
            return max(0.0, min(self._later.values()) - time.monotonic()) if self._later else None

    def _flush_due(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            due = [peer for peer, at_s in self._later.items() if at_s <= now_s]
            for peer in due:
                del self._later[peer]
        for peer in due:
            self.flush(peer)

    def _watch_stuck(self) -> None:
        with self._lock:
            stuck, self._stuck = self._stuck, set()
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        for peer in stuck:
            if not peer.broken:  # else it has since gone, and its socket may be closed
                self._selector.modify(peer.socket, both, peer)

    def _serve(self, peer: Peer[Q], events: int) -> None:
        if events & selectors.EVENT_WRITE and peer.flush():
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
        if not events & selectors.EVENT_READ:
            return
        try:
            message = peer.socket.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        try:
            if message:
                self.on_message(peer, message)
                return
            self._selector.unregister(peer.socket)
            peer.close()
            self.on_gone(peer)
        except Exception:
            logger.exception("the channel could not handle a message")
