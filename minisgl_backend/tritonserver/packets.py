"""What the two ends of the channel say to each other, and what waits to be said. Pure.

Two kinds of packets: acknowledgements of chunks (detokenizer to engine) and streams that will not
be heard of again (engine to detokenizer). A packet starts with the epoch of the engine; streams are
named by their counters.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

_EPOCH: Final = struct.Struct("<Q")
_ACK: Final = struct.Struct("<QIB")
_COUNTER: Final = struct.Struct("<Q")
_MAX_ENTRIES: Final = 1000
MAX_PACKET_BYTES: Final = _EPOCH.size + _MAX_ENTRIES * _ACK.size


class Verdict(IntEnum):
    """What an acknowledgement says of the stream."""

    CONTINUE = 0
    STOP = 1
    """A stop string matched, or the detokenizer failed on the stream; the client has been told."""
    CANCELLED = 2
    """The chunk's own request is cancelled, so nobody reads."""
    LOST = 3
    """The detokenizer does not know the stream (it was restarted); the client has been told."""


@dataclass(frozen=True, slots=True)
class Ack:
    """All chunks of a stream up to ``index`` were taken."""

    counter: int
    index: int
    verdict: Verdict


def encode_acks(epoch: int, acks: Iterable[Ack]) -> bytes:
    """A packet of acknowledgements."""
    entries = (_ACK.pack(ack.counter, ack.index, ack.verdict) for ack in acks)
    return _EPOCH.pack(epoch) + b"".join(entries)


def decode_acks(packet: bytes) -> tuple[int, list[Ack]]:
    """The epoch and the acknowledgements of a packet; raises ``struct.error`` where it is none."""
    (epoch,) = _EPOCH.unpack_from(packet)
    entries = _ACK.iter_unpack(packet[_EPOCH.size :])
    return epoch, [Ack(counter, index, Verdict(verdict)) for counter, index, verdict in entries]


def encode_forgets(epoch: int, counters: Iterable[int]) -> bytes:
    """A packet of streams that will not be heard of again."""
    return _EPOCH.pack(epoch) + b"".join(map(_COUNTER.pack, counters))


def decode_forgets(packet: bytes) -> tuple[int, list[int]]:
    """The epoch and the streams of a packet; raises ``struct.error`` where it is none."""
    (epoch,) = _EPOCH.unpack_from(packet)
    return epoch, [counter for (counter,) in _COUNTER.iter_unpack(packet[_EPOCH.size :])]


class AckQueue:
    """Acknowledgements that wait to be written, one a stream."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._waiting: dict[int, Ack] = {}

    def put(self, ack: Ack) -> None:
        """Add one; it stands for all of its stream before it. A last verdict is never undone."""
        earlier = self._waiting.get(ack.counter)
        if earlier is not None and earlier.verdict is not Verdict.CONTINUE:
            ack = replace(ack, verdict=earlier.verdict)
        self._waiting[ack.counter] = ack

    def packet(self) -> bytes | None:
        """The next packet, or None where nothing waits."""
        if not self._waiting:
            return None
        return encode_acks(self._epoch, itertools.islice(self._waiting.values(), _MAX_ENTRIES))

    def written(self) -> None:
        """The packet was written; what it held does not wait any more."""
        if len(self._waiting) <= _MAX_ENTRIES:
            self._waiting.clear()
        else:
            for counter in list(itertools.islice(self._waiting, _MAX_ENTRIES)):
                del self._waiting[counter]


class ForgetQueue:
    """Streams to be forgotten that wait to be written."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._waiting: list[int] = []

    def put(self, counter: int) -> None:
        """Add a stream."""
        self._waiting.append(counter)

    def packet(self) -> bytes | None:
        """The next packet, or None where nothing waits."""
        if not self._waiting:
            return None
        return encode_forgets(self._epoch, self._waiting[:_MAX_ENTRIES])

    def written(self) -> None:
        """The packet was written; what it held does not wait any more."""
        del self._waiting[:_MAX_ENTRIES]
