"""The side channel on which the detokenizer acknowledges chunks to the engine.

Knows Unix sockets of type SOCK_SEQPACKET and the ``packets`` on them. Must not know tokens, text or
Triton.

An engine listens in a fresh directory of mode 0700 and writes the socket's path into every chunk;
a detokenizer connects when it sees the path first. Neither side ever blocks on a write: what the
socket does not take waits, and acknowledgements that wait coalesce, as they are cumulative. End of
file means that the peer, and all that it knew, is gone.

Streams are named by a random 64-bit epoch of the engine and a counter. Every packet starts with the
epoch, so that a packet of an earlier life of a path is never mistaken.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from minisgl_backend.tritonserver.packets import (
    MAX_PACKET_BYTES,
    Ack,
    AckQueue,
    ForgetQueue,
    decode_acks,
    decode_forgets,
)

logger = logging.getLogger(__name__)

MAX_PATH_BYTES: Final = 100
"""A Unix socket's path must fit ``sun_path``, of 108 bytes."""

_NAME: Final = "acks"
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Peer:
    """The other end of a connection. Writing never blocks; safe to use from any thread."""

    def __init__(self, sock: socket.socket, queue: AckQueue | ForgetQueue) -> None:
        self.socket = sock
        self.queue = queue
        self.lock = threading.Lock()
        self.broken = False

    def flush(self) -> bool:
        """Write what waits; False where the socket did not take all of it."""
        with self.lock:
            while not self.broken:
                packet = self.queue.packet()
                if packet is None:
                    break
                try:
                    self.socket.send(packet, _SEND_FLAGS)
                except BlockingIOError:
                    return False
                except OSError:  # its end of file is on the way to the reader
                    self.broken = True
                    break
                self.queue.written()
            return True


class _Reactor:
    """A thread that reads from peers, finishes writes that had to wait, and accepts peers."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._stuck: set[Peer] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def on_packet(self, peer: Peer, packet: bytes) -> None:
        raise NotImplementedError

    def on_gone(self, peer: Peer) -> None:
        raise NotImplementedError

    def on_connection(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def register(self, peer: Peer) -> None:
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def register_listener(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, self.on_connection)

    def flush(self, peer: Peer) -> None:
        """Write what waits for ``peer``, now or as soon as its socket takes it."""
        if not peer.flush():
            with self._lock:
                self._stuck.add(peer)
            self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, and close the connections."""
        self._closing = True
        self.wake()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Peer):
                key.data.socket.close()
        self._selector.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                if key.fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    self._watch_stuck()
                elif isinstance(key.data, Peer):
                    self._serve(key.data, events)
                else:
                    self.on_connection()

    def _watch_stuck(self) -> None:
        with self._lock:
            stuck, self._stuck = self._stuck, set()
        for peer in stuck:
            with contextlib.suppress(KeyError):  # gone meanwhile
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(peer.socket, both, peer)

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE and peer.flush():
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
        if not events & selectors.EVENT_READ:
            return
        try:
            packet = peer.socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        try:
            if packet:
                self.on_packet(peer, packet)
                return
            self._selector.unregister(peer.socket)
            with peer.lock:
                peer.broken = True
                peer.socket.close()
            self.on_gone(peer)
        except Exception:
            logger.exception("the channel could not handle a packet")


class EngineChannel(_Reactor):
    """The engine's side: takes acknowledgements, tells which streams to forget.

    ``on_ack`` is called on the channel's thread with each acknowledgement of this engine's streams,
    ``on_detokenizer_gone`` when the detokenizer that sent some has gone.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        on_ack: Callable[[Ack], None],
        on_detokenizer_gone: Callable[[], None],
    ) -> None:
        super().__init__("channel")
        self.epoch = secrets.randbits(64)
        self._on_ack = on_ack
        self._on_detokenizer_gone = on_detokenizer_gone
        self._peers: list[Peer] = []
        self._directory = _fresh_directory(directory)
        self.path = str(self._directory / _NAME)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.register_listener(self._listener)
        self.start()

    def forget(self, counter: int) -> None:
        """Let detokenizers drop what they keep of a stream."""
        for peer in list(self._peers):
            with peer.lock:
                assert isinstance(peer.queue, ForgetQueue)
                peer.queue.put(counter)
            self.flush(peer)

    def close(self) -> None:
        """End the thread, close the connections, remove the socket's directory."""
        self.stop()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer gave up
            return
        sock.setblocking(False)
        peer = Peer(sock, ForgetQueue(self.epoch))
        self._peers.append(peer)
        self.register(peer)

    def on_packet(self, peer: Peer, packet: bytes) -> None:
        epoch, acks = decode_acks(packet)
        if epoch == self.epoch:
            for ack in acks:
                self._on_ack(ack)

    def on_gone(self, peer: Peer) -> None:
        self._peers.remove(peer)
        self._on_detokenizer_gone()


class DetokenizerChannel(_Reactor):
    """The detokenizer's side, for all engines it hears of.

    ``on_forget`` is called on the channel's thread with (epoch, counter), ``on_engine_gone`` with
    the epoch.
    """

    def __init__(
        self,
        *,
        on_forget: Callable[[int, int], None],
        on_engine_gone: Callable[[int], None],
    ) -> None:
        super().__init__("channel")
        self._on_forget = on_forget
        self._on_engine_gone = on_engine_gone
        self._peers: dict[int, Peer] = {}
        self.start()

    @property
    def num_peers(self) -> int:
        """Engines that it is connected to."""
        return len(self._peers)

    def acknowledge(self, path: str, epoch: int, ack: Ack) -> bool:
        """Tell the engine at ``path``, without blocking; False where it is gone."""
        peer = self._peers.get(epoch) or self._connect(path, epoch)
        if peer is None:
            return False
        with peer.lock:
            assert isinstance(peer.queue, AckQueue)
            peer.queue.put(ack)
        self.flush(peer)
        return not peer.broken

    def close(self) -> None:
        """End the thread and close the connections."""
        self.stop()

    def on_connection(self) -> None:
        raise NotImplementedError("nobody connects to a detokenizer")

    def on_packet(self, peer: Peer, packet: bytes) -> None:
        epoch, counters = decode_forgets(packet)
        for counter in counters:
            self._on_forget(epoch, counter)

    def on_gone(self, peer: Peer) -> None:
        for epoch, known in list(self._peers.items()):
            if known is peer:
                del self._peers[epoch]
                self._on_engine_gone(epoch)

    def _connect(self, path: str, epoch: int) -> Peer | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _check_is_ours(path)
            sock.connect(path)
        except OSError as error:
            sock.close()
            logger.warning("no engine answers at its socket: %s", error.strerror)
            return None
        sock.setblocking(False)
        peer = Peer(sock, AckQueue(epoch))
        self._peers[epoch] = peer
        self.register(peer)
        self.wake()  # epoll sees the new socket at once; other selectors need the nudge
        return peer


def _check_is_ours(path: str) -> None:
    """Paths come in chunks, which any client may send: connect to engines of this user only."""
    state = os.stat(os.path.dirname(path))
    if state.st_uid != os.getuid() or state.st_mode & 0o077 or os.path.basename(path) != _NAME:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _fresh_directory(parent: Path | None) -> Path:
    """A new directory, of mode 0700, whose sockets have short paths."""
    parents = [parent, Path(tempfile.gettempdir()), Path("/tmp")]
    for candidate in parents:
        if candidate is not None and len(os.fsencode(candidate)) + 32 <= MAX_PATH_BYTES:
            # the id tells who looks after this process what to remove when it was killed
            return Path(tempfile.mkdtemp(prefix=f"minisgl-{os.getpid()}-", dir=candidate))
    raise AssertionError("/tmp is short enough")
