"""The side channel on which the detokenizer acknowledges packets to the engine.

Knows Unix sockets, and the messages of ``wire.acks``. Must not know tokens, text or Triton.

An engine listens in a fresh directory of mode 0700 and writes the socket's path into every packet;
a detokenizer connects when it sees the path first. Neither side ever blocks on a write: what the
socket does not take waits, and acknowledgements that wait coalesce, as they are cumulative. End of
file means that the peer, and all that it knew, is gone.

Streams are named by random keys of 64 bits. A client that calls the inner models by itself learns
the path, and the keys of its own streams; to speak for a stream, one must know its key.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from minisgl_backend.tritonserver.reactor import MAX_MESSAGE_BYTES, Peer, Reactor
from minisgl_backend.wire.acks import (
    ACK_BYTES,
    Ack,
    Verdict,
    decode_acks,
    decode_keys,
    encode_acks,
    encode_keys,
)

logger = logging.getLogger(__name__)

MAX_PATH_BYTES: Final = 100
"""A Unix socket's path must fit ``sun_path``, of 108 bytes."""

_NAME: Final = "acks"
_PAUSE_S: Final = 0.05
MAX_ENTRIES: Final = MAX_MESSAGE_BYTES // ACK_BYTES
"""The most acknowledgements in one message; also the most keys, which are shorter."""


class AckQueue:
    """The send queue of acknowledgements, at most one per stream."""

    def __init__(self) -> None:
        self._waiting: dict[int, Ack] = {}

    def put(self, ack: Ack) -> None:
        """Add one. It replaces an earlier one of its stream, whose stopped samples it includes.

        A verdict other than ``CONTINUE`` is never undone.
        """
        earlier = self._waiting.get(ack.key)
        if earlier is not None and earlier.verdict is not Verdict.CONTINUE:
            ack = replace(ack, verdict=earlier.verdict)
        self._waiting[ack.key] = ack

    def message(self) -> bytes | None:
        """The next message, or None if nothing waits."""
        if not self._waiting:
            return None
        return encode_acks(itertools.islice(self._waiting.values(), MAX_ENTRIES))

    def written(self) -> None:
        """The message was written: its contents wait no longer."""
        if len(self._waiting) <= MAX_ENTRIES:
            self._waiting.clear()
        else:
            for key in list(itertools.islice(self._waiting, MAX_ENTRIES)):
                del self._waiting[key]


class ForgetQueue:
    """The send queue of streams to be forgotten."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def put(self, key: int) -> None:
        """Add a stream."""
        self._waiting.append(key)

    def message(self) -> bytes | None:
        """The next message, or None if nothing waits."""
        if not self._waiting:
            return None
        return encode_keys(self._waiting[:MAX_ENTRIES])

    def written(self) -> None:
        """The message was written: its contents wait no longer."""
        del self._waiting[:MAX_ENTRIES]


class EngineChannel(Reactor[ForgetQueue]):
    """The engine's side: takes acknowledgements, tells which streams to forget.

    ``on_ack`` is called on the channel's thread with each acknowledgement, ``on_detokenizer_gone``
    when the detokenizer that sent some has gone.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        on_ack: Callable[[Ack], None],
        on_detokenizer_gone: Callable[[], None],
    ) -> None:
        super().__init__("channel")
        self._on_ack = on_ack
        self._on_detokenizer_gone = on_detokenizer_gone
        self._peers: list[Peer[ForgetQueue]] = []
        self._directory = _fresh_directory(directory)
        self.path = str(self._directory / _NAME)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.register_listener(self._listener)
        self.start()

    def forget(self, key: int) -> None:
        """Let detokenizers drop what they keep of a stream."""
        for peer in list(self._peers):
            with peer.lock:
                peer.queue.put(key)
            self.flush(peer)

    def close(self) -> None:
        """End the thread, close the connections, remove the socket's directory."""
        self.stop()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer gave up
            return
        except OSError:  # such as too few descriptors; the peer waits, and this is called again
            time.sleep(_PAUSE_S)
            return
        sock.setblocking(False)
        peer = Peer(sock, ForgetQueue())
        self._peers.append(peer)
        self.register(peer)

    def on_message(self, peer: Peer[ForgetQueue], message: bytes) -> None:
        for ack in decode_acks(message):
            self._on_ack(ack)

    @property
    def num_peers(self) -> int:
        """Detokenizers that are connected, or whose departure is not dealt with yet."""
        return len(self._peers)

    def on_gone(self, peer: Peer[ForgetQueue]) -> None:
        try:
            self._on_detokenizer_gone()
        finally:
            self._peers.remove(peer)


class DetokenizerChannel(Reactor[AckQueue]):
    """The detokenizer's side, for all engines it hears of.

    ``on_forget`` is called on the channel's thread with a stream's key.
    """

    def __init__(self, *, on_forget: Callable[[int], None]) -> None:
        super().__init__("channel")
        self._on_forget = on_forget
        self._peers: dict[str, Peer[AckQueue]] = {}
        self._connecting = threading.Lock()
        self.start()

    @property
    def num_peers(self) -> int:
        """Engines to which it is connected."""
        return len(self._peers)

    def acknowledge(self, path: str, ack: Ack, *, every_s: float = 0.0) -> bool:
        """Tell the engine at ``path``, without blocking; False if it is gone. From any thread.

        If less than ``every_s`` have passed since the last message, it waits for others, unless it
        ends something: each message wakes a thread of the engine, which needs the time for tokens.
        """
        peer = self._peers.get(path)
        if peer is None:
            with self._connecting:  # only once
                peer = self._peers.get(path) or self._connect(path)
        if peer is None:
            return False
        with peer.lock:
            peer.queue.put(ack)
        due_s = peer.flushed_s + every_s
        is_plain = ack.verdict is Verdict.CONTINUE and not ack.stopped
        if every_s and is_plain and time.monotonic() < due_s:
            self.flush_later(peer, due_s)
        else:
            self.flush(peer)
        return not peer.broken

    def close(self) -> None:
        """End the thread and close the connections."""
        self.stop()

    def on_message(self, peer: Peer[AckQueue], message: bytes) -> None:
        for key in decode_keys(message):
            self._on_forget(key)

    def on_gone(self, peer: Peer[AckQueue]) -> None:
        for path, known in list(self._peers.items()):
            if known is peer:
                del self._peers[path]

    def _connect(self, path: str) -> Peer[AckQueue] | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _check_is_ours(path)
            sock.connect(path)
        except (OSError, ValueError) as error:  # a path may have a NUL in it
            sock.close()
            logger.warning("no engine answers at its socket: %s", type(error).__name__)
            return None
        sock.setblocking(False)
        peer = Peer(sock, AckQueue())
        self._peers[path] = peer
        self.register(peer)
        self.wake()  # epoll sees the new socket at once; other selectors need the nudge
        return peer


def _check_is_ours(path: str) -> None:
    """Raise ``PermissionError`` unless the path is that of a socket that this user owns, in its
    only spelling: any client may send packets with paths in them."""
    folder, name = os.path.split(path)
    state = os.stat(folder)
    is_private = state.st_uid == os.getuid() and not state.st_mode & 0o077
    if not is_private or name != _NAME or os.path.realpath(path) != path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _fresh_directory(parent: Path | None) -> Path:
    """A new directory, of mode 0700, whose sockets have short paths without links."""
    parents = [parent, Path(tempfile.gettempdir()), Path("/tmp")]
    for candidate in (path.resolve() for path in parents if path is not None):
        if len(os.fsencode(candidate)) + 32 <= MAX_PATH_BYTES:
            # by the id, a supervisor knows what to remove if this process was killed
            return Path(tempfile.mkdtemp(prefix=f"minisgl-{os.getpid()}-", dir=candidate))
    raise AssertionError("/tmp is short enough")
