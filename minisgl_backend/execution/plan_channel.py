"""Sends plans from rank 0 to the other ranks of its host: one a step, in a few dozen µs.

Rank 0 writes the plan's words once, into a ring of cells in shared memory. Then it sends each rank
their place in a short message, on a socket per rank. A rank answers when it has copied the words.
So a waiting rank sleeps in the kernel, each side sees the end of the other's process as the end of
the stream, and a cell is reused only after every rank has copied it.

A message with zero words is a question: the rank answers with the number of steps that it has run.

The memory has no name in any folder and is inherited together with the socket. So no other process
can reach it, and nothing is left behind. Before the first plan, the same socket carries the
messages of the start (``followers``).

Only this module assumes that the ranks share a host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl_backend.errors import EngineFailure
from minisgl_backend.request import IntArray

_NUM_CELLS: Final = 4
"""An overlapping loop has two steps in flight; two more cells are spare."""
_CELL_WORDS: Final = 2**16
_WORD_BYTES: Final = 4
_WHERE: Final = struct.Struct("<QQQ")  # words per cell, number of the cell, words of the plan
_TAKEN: Final = b"taken"
_DONE: Final = struct.Struct("<Q")  # how many steps the rank has run


class PlanRing:
    """The shared memory: ``_NUM_CELLS`` cells of ``cell_words`` words each."""

    def __init__(self, descriptor: int, cell_words: int):
        self.descriptor = descriptor
        self.cell_words = cell_words
        memory = mmap.mmap(descriptor, _NUM_CELLS * cell_words * _WORD_BYTES)
        self._words = np.frombuffer(memory, np.int32).reshape(_NUM_CELLS, cell_words)

    @classmethod
    def create(cls) -> PlanRing:
        descriptor = os.memfd_create("minisgl-plans")
        os.ftruncate(descriptor, _NUM_CELLS * _CELL_WORDS * _WORD_BYTES)
        return cls(descriptor, _CELL_WORDS)

    def grown(self, num_words: int) -> PlanRing:
        """The same memory, with room for ``num_words`` in each cell. All old cells must be free."""
        cell_words = 2 ** (num_words - 1).bit_length()
        os.ftruncate(self.descriptor, _NUM_CELLS * cell_words * _WORD_BYTES)
        return PlanRing(self.descriptor, cell_words)

    def close(self) -> None:
        """Give the memory up. It exists until the last process that has it mapped ends."""
        os.close(self.descriptor)

    def write(self, cell: int, words: IntArray) -> None:
        self._words[cell, : len(words)] = words

    def read(self, cell: int, num_words: int) -> IntArray:
        """A copy of the first ``num_words`` words of a cell."""
        return self._words[cell, :num_words].copy()


@dataclass(slots=True)
class Peer:
    """Another rank, as seen by rank 0.

    ``num_untaken``: plans sent that it has not copied. ``num_unanswered``: questions that it has
    not answered. ``num_done``: its last answer, how many steps it had run.
    """

    rank: int
    socket: socket.socket
    num_untaken: int = 0
    num_unanswered: int = 0
    num_done: int = 0

    def receive(self) -> bytes:
        """The rank's next message. Raises ``EngineFailure`` if it is gone or silent for too long.

        If the socket does not block and there is no message, it raises ``BlockingIOError``.
        """
        try:
            message = self.socket.recv(2**16)
        except BlockingIOError:
            raise
        except TimeoutError:
            raise EngineFailure(f"rank {self.rank} does not answer") from None
        except OSError:
            message = b""
        if not message:
            raise EngineFailure(f"rank {self.rank} is gone")
        return message

    @property
    def has_spoken(self) -> bool:
        """Whether ``receive`` would return or raise at once."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def listen(self) -> None:
        """Wait for the rank's next message about plans, and count it."""
        message = self.receive()
        if message == _TAKEN:
            self.num_untaken -= 1
        else:
            (self.num_done,) = _DONE.unpack(message)
            self.num_unanswered -= 1

    def send(self, message: bytes) -> None:
        """Send a message. Raises ``EngineFailure`` if the rank is gone or does not receive."""
        try:
            self.socket.send(message)
        except TimeoutError:
            raise EngineFailure(f"rank {self.rank} does not answer") from None
        except OSError:
            raise EngineFailure(f"rank {self.rank} is gone") from None


class PlanSender:
    """Rank 0's end."""

    def __init__(self, peers: Sequence[Peer], ring: PlanRing, *, timeout_s: float):
        """A rank that takes no plan for ``timeout_s`` is lost."""
        for peer in peers:
            peer.socket.settimeout(timeout_s)
        self._peers = list(peers)
        self._ring = ring
        self._count = 0

    def send(self, words: IntArray) -> None:
        """Send an encoded plan, int32[num_words], to all ranks.

        Waits only for ranks that are ``_NUM_CELLS`` plans behind. Raises ``EngineFailure`` if a
        rank is lost.
        """
        if len(words) > self._ring.cell_words:
            self.wait_taken()
            self._ring = self._ring.grown(len(words))
        self._wait_until_at_most(_NUM_CELLS - 1)
        cell = self._count % _NUM_CELLS
        self._count += 1
        self._ring.write(cell, words)
        where = _WHERE.pack(self._ring.cell_words, cell, len(words))
        for peer in self._peers:
            peer.send(where)
            peer.num_untaken += 1

    def wait_taken(self) -> None:
        """Wait until every rank has taken all plans."""
        self._wait_until_at_most(0)

    def ask(self) -> None:
        """Ask every rank how many steps it has run."""
        for peer in self._peers:
            peer.send(_WHERE.pack(self._ring.cell_words, 0, 0))
            peer.num_unanswered += 1

    def have_answered(self) -> bool:
        """Whether every rank has answered. Does not wait. ``EngineFailure`` if a rank is lost."""
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
        for peer in self._peers:
            while peer.num_untaken > num_untaken:
                peer.listen()


class PlanReceiver:
    """The end of a rank other than 0."""

    def __init__(self, connection: socket.socket, descriptor: int):
        self._connection = connection
        self._ring = PlanRing(descriptor, _CELL_WORDS)

    def __iter__(self) -> Iterator[IntArray]:
        """Encoded plans in the order of sending, until rank 0 closes its end or dies.

        A plan without words is a question, to be answered by ``answer``.
        """
        while where := self._next():
            yield self._take(where)

    def answer(self, num_done: int) -> None:
        """Tell rank 0 how many steps this rank has run."""
        self._send(_DONE.pack(num_done))

    def _next(self) -> bytes:
        try:
            return self._connection.recv(_WHERE.size)
        except ConnectionError:
            return b""

    def _take(self, where: bytes) -> IntArray:
        cell_words, cell, num_words = _WHERE.unpack(where)
        if num_words == 0:
            return np.empty(0, np.int32)
        if cell_words != self._ring.cell_words:
            self._ring = PlanRing(self._ring.descriptor, cell_words)
        words = self._ring.read(cell, num_words)
        self._send(_TAKEN)
        return words

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # rank 0 has ended; the next read will tell
            self._connection.send(message)
