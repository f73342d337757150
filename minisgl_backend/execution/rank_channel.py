"""The channel between rank 0 and its followers: everything that they tell each other.

At the start rank 0 sends each follower its options. Then all ranks meet at a few barriers, so that
no rank waits in a collective for another that is not there yet. A follower that cannot start says
why instead. After that rank 0 sends plans, one per step, in a few dozen µs. A question asks a
follower how many steps it has run.

Each follower has a socket to rank 0. For the followers on rank 0's host, the words of a plan are
written once, into a ring of cells in shared memory, and a short message tells each follower where
they are. The follower answers when it has copied the words. So a waiting rank sleeps in the kernel,
each side sees the end of the other's process as the end of the stream, and a cell is reused only
after every follower has copied it. Followers on other hosts get the words over TCP
(``node_channel``).

The memory has no name in any folder, and is inherited together with the socket. So no other process
can reach it, and nothing is left behind. Knows sockets and memory. Must not know processes, or what
options and plans mean.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.request import IntArray

_NUM_CELLS: Final = 4
"""An overlapping loop has two steps in flight; the other two cells are spare."""
_CELL_WORDS: Final = 2**16
_WORD_BYTES: Final = 4
MOST_BYTES: Final = 2**16
"""The longest message other than plans: options, or why a follower cannot start."""
_HERE: Final = b"here"
_GO: Final = b"go"
_WHERE: Final = struct.Struct("<QQQ")  # words per cell, number of the cell, words of the plan
_TAKEN: Final = b"taken"
_DONE: Final = struct.Struct("<Q")  # how many steps the rank has run


class _Ring:
    """The shared memory: ``_NUM_CELLS`` cells of ``cell_words`` words each."""

    def __init__(self, descriptor: int, cell_words: int):
        self.descriptor = descriptor
        self.cell_words = cell_words
        memory = mmap.mmap(descriptor, _NUM_CELLS * cell_words * _WORD_BYTES)
        self._words = np.frombuffer(memory, np.int32).reshape(_NUM_CELLS, cell_words)

    @classmethod
    def create(cls) -> _Ring:
        descriptor = os.memfd_create("minisgl-plans")
        os.ftruncate(descriptor, _NUM_CELLS * _CELL_WORDS * _WORD_BYTES)
        return cls(descriptor, _CELL_WORDS)

    def grown(self, num_words: int) -> _Ring:
        """The same memory, with room for ``num_words`` in each cell. All old cells must be free."""
        cell_words = 2 ** (num_words - 1).bit_length()
        os.ftruncate(self.descriptor, _NUM_CELLS * cell_words * _WORD_BYTES)
        return _Ring(self.descriptor, cell_words)

    def write(self, cell: int, words: IntArray) -> None:
        self._words[cell, : len(words)] = words

    def read(self, cell: int, num_words: int) -> IntArray:
        """A copy of the first ``num_words`` words of a cell."""
        return self._words[cell, :num_words].copy()


class Peer(ABC):
    """A follower, as rank 0 sees it.

    ``num_untaken``: plans sent that it has not copied. ``num_unanswered``: questions that it has
    not answered. ``num_done``: its last answer, which is how many steps it had run.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_untaken = 0
        self.num_unanswered = 0
        self.num_done = 0

    @abstractmethod
    def receive(self) -> bytes:
        """The rank's next message. Raises ``EngineFailure`` if it is gone or silent too long."""

    @property
    @abstractmethod
    def has_spoken(self) -> bool:
        """Whether ``receive`` would return or raise at once."""

    @abstractmethod
    def send(self, message: bytes | memoryview) -> None:
        """Send a message. Raises ``EngineFailure`` if the rank is gone or does not receive."""

    @abstractmethod
    def start_steps(self, timeout_s: float) -> None:
        """The start is over: from now on, ``timeout_s`` limits how long the rank may be silent."""

    def listen(self) -> None:
        """Wait for the rank's next message about plans, and count it."""
        message = self.receive()
        if message == _TAKEN:
            self.num_untaken -= 1
        elif len(message) == _DONE.size:
            (self.num_done,) = _DONE.unpack(message)
            self.num_unanswered -= 1
        else:
            raise EngineFailure(f"rank {self.rank} sent a message that is no answer")


class _HostPeer(Peer):
    """A follower on rank 0's host."""

    def __init__(self, rank: int, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(rank)
        self._connection = connection
        connection.settimeout(timeout_s)

    def receive(self) -> bytes:
        try:
            message = self._connection.recv(MOST_BYTES)
        except TimeoutError:
            raise EngineFailure(f"rank {self.rank} does not answer") from None
        except OSError:
            message = b""
        if not message:
            raise EngineFailure(f"rank {self.rank} is gone")
        return message

    @property
    def has_spoken(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, message: bytes | memoryview) -> None:
        try:
            self._connection.send(message)
        except TimeoutError:
            raise EngineFailure(f"rank {self.rank} does not answer") from None
        except OSError:
            raise EngineFailure(f"rank {self.rank} is gone") from None

    def start_steps(self, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)


class LeaderEnd:
    """Rank 0's end.

    Everything that sends or waits raises ``EngineFailure`` if a follower is gone, or silent for too
    long: during the start for ``start_s``, which includes loading a model, afterwards for the time
    given to ``start_steps``.
    """

    def __init__(self, num_followers: int, *, start_s: float):
        """``num_followers`` counts those on this host, which come first."""
        self._opened = contextlib.ExitStack()
        self._ring = _Ring.create()
        # the memory exists until the last process that has it mapped ends
        self._opened.callback(os.close, self._ring.descriptor)
        self._of_host: list[Peer] = []
        self._of_nodes: list[Peer] = []
        self._theirs: list[socket.socket] = []
        self._count = 0
        for rank in range(1, num_followers + 1):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._opened.enter_context(ours)
            self._of_host.append(_HostPeer(rank, ours, start_s))
            self._theirs.append(self._opened.enter_context(theirs))

    def add(self, peers: Sequence[Peer]) -> None:
        """Add the followers on other hosts, in order. Called before anything is sent."""
        self._of_nodes += peers

    @property
    def _peers(self) -> list[Peer]:
        return self._of_host + self._of_nodes

    @contextmanager
    def inherited(self, rank: int) -> Iterator[tuple[int, int]]:
        """The two descriptors from which ``rank`` makes its ``FollowerEnd``.

        Its process must be started inside the context; afterwards only it has that end of the
        socket.
        """
        with self._theirs[rank - 1] as theirs:
            yield theirs.fileno(), self._ring.descriptor

    # --- the start ---------------------------------------------------------------------------

    def greet(self, options: bytes) -> None:
        """Send every follower its options."""
        for peer in self._peers:
            peer.send(options)

    def meet(self) -> None:
        """Wait until every follower has called its own ``meet``, then let all of them go on.

        Raises ``ConfigError``, with the cause, if a follower cannot start.
        """
        for peer in self._peers:
            message = peer.receive()
            if message != _HERE:
                raise ConfigError(_cause(peer, message))
        for peer in self._peers:
            peer.send(_GO)

    def report(self) -> str | None:
        """Why a follower cannot start, if one has said so. Does not wait."""
        for peer in self._peers:
            with contextlib.suppress(EngineFailure):
                while peer.has_spoken:
                    message = peer.receive()
                    if message != _HERE:
                        return _cause(peer, message)
        return None

    # --- steps -------------------------------------------------------------------------------

    def start_steps(self, timeout_s: float) -> None:
        """The start is over: from now on there are plans, with this timeout."""
        for peer in self._peers:
            peer.start_steps(timeout_s)

    def send(self, words: IntArray) -> None:
        """Send an encoded plan, int32[num_words], to all followers.

        Waits only for ranks of this host that are ``_NUM_CELLS`` plans behind, and for connections
        that are full.
        """
        for peer in self._of_nodes:  # first, since they are farther away
            peer.send(words.data.cast("B"))
        if self._of_host:
            self._send_here(words)

    def _send_here(self, words: IntArray) -> None:
        if len(words) > self._ring.cell_words:
            self.wait_taken()
            self._ring = self._ring.grown(len(words))
        self._wait_until_at_most(_NUM_CELLS - 1)
        cell = self._count % _NUM_CELLS
        self._count += 1
        self._ring.write(cell, words)
        where = _WHERE.pack(self._ring.cell_words, cell, len(words))
        for peer in self._of_host:
            peer.send(where)
            peer.num_untaken += 1

    def wait_taken(self) -> None:
        """Wait until every rank of this host has taken all plans."""
        self._wait_until_at_most(0)

    def ask(self) -> None:
        """Ask every rank how many steps it has run."""
        for peer in self._of_host:
            peer.send(_WHERE.pack(self._ring.cell_words, 0, 0))
        for peer in self._of_nodes:
            peer.send(b"")
        for peer in self._peers:
            peer.num_unanswered += 1

    def have_answered(self) -> bool:
        """Whether every rank has answered. Does not wait."""
        for peer in self._peers:
            while peer.num_unanswered and peer.has_spoken:
                peer.listen()
        return not any(peer.num_unanswered for peer in self._peers)

    def wait_answers(self) -> list[int]:
        """Wait for the answers: how many steps each rank had run when it was asked."""
        for peer in self._peers:
            while peer.num_unanswered:
                peer.listen()
        return [peer.num_done for peer in self._peers]

    def _wait_until_at_most(self, num_untaken: int) -> None:
        for peer in self._of_host:
            while peer.num_untaken > num_untaken:
                peer.listen()

    def close(self) -> None:
        """Close the sockets and the memory; followers then end by themselves. Idempotent."""
        self._opened.close()


def _cause(peer: Peer, message: bytes) -> str:
    return f"rank {peer.rank}: " + message.decode(errors="replace")


class FollowerEnd(ABC):
    """The end of a rank other than 0."""

    # --- the start ---------------------------------------------------------------------------

    def options(self) -> bytes:
        """What rank 0 has sent with ``greet``. Raises ``EngineFailure`` if rank 0 is gone."""
        options = self._receive()
        if options is None:
            raise EngineFailure("rank 0 is gone")
        return bytes(options)

    def meet(self) -> None:
        """Tell rank 0 that this rank is here, and wait until all ranks are.

        Raises ``EngineFailure`` if rank 0 is gone.
        """
        self._send(_HERE)
        if self._receive() != _GO:
            raise EngineFailure("rank 0 is gone")

    def report(self, error: BaseException) -> None:
        """Tell rank 0 why this rank cannot start."""
        self._send(f"{error}".encode(errors="backslashreplace")[:MOST_BYTES] or b"failed")

    # --- steps -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[IntArray]:
        """Encoded plans in the order of sending, until rank 0 closes its end or dies.

        A plan without words is a question, to be answered by ``answer``.
        """
        while (message := self._receive()) is not None:
            yield self._words(message)

    def answer(self, num_done: int) -> None:
        """Tell rank 0 how many steps this rank has run."""
        self._send(_DONE.pack(num_done))

    @abstractmethod
    def _receive(self) -> bytes | bytearray | None:
        """The next message; None if rank 0 has closed its end, or has ended."""

    @abstractmethod
    def _send(self, message: bytes) -> None:
        """Send a message. If rank 0 has ended, the next read will tell."""

    @abstractmethod
    def _words(self, message: bytes | bytearray) -> IntArray:
        """The encoded plan, int32[num_words], that a message brings; empty if it is a question."""


class HostFollowerEnd(FollowerEnd):
    """The end of a rank on rank 0's host."""

    def __init__(self, connection: socket.socket, memory: int):
        """Both come from the descriptors that the process has inherited."""
        self._connection = connection
        self._ring = _Ring(memory, _CELL_WORDS)

    def _words(self, message: bytes | bytearray) -> IntArray:
        cell_words, cell, num_words = _WHERE.unpack(message)
        if num_words == 0:
            return np.empty(0, np.int32)
        if cell_words != self._ring.cell_words:
            self._ring = _Ring(self._ring.descriptor, cell_words)
        words = self._ring.read(cell, num_words)
        self._send(_TAKEN)
        return words

    def _receive(self) -> bytes | None:
        try:
            return self._connection.recv(MOST_BYTES) or None
        except ConnectionError:
            return None

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._connection.send(message)
