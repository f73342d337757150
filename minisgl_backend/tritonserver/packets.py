"""What the two ends of the channel say to each other, and what waits to be said. Pure.

Two kinds of packets: acknowledgements of chunks (detokenizer to engine) and streams that will not
be heard of again (engine to detokenizer). Streams are named by their keys, numbers of 64 bits.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

_ACK: Final = struct.Struct("<QIB")
_KEY: Final = struct.Struct("<Q")
_MAX_ENTRIES: Final = 1000
MAX_PACKET_BYTES: Final = _MAX_ENTRIES * _ACK.size


class Verdict(IntEnum):
    """What an acknowledgement says of the stream."""

    CONTINUE = 0
    STOP = 1
    """A stop string matched; the client has been told."""
    CANCELLED = 2
    """The chunk's own request is cancelled, so nobody reads."""
    FAILED = 3
    """The detokenizer failed on the stream, or does not know it as it was restarted; the client has
    been told."""


@dataclass(frozen=True, slots=True)
class Ack:
    """All chunks of a stream up to ``index`` were taken."""

    key: int
    index: int
    verdict: Verdict


def encode_acks(acks: Iterable[Ack]) -> bytes:
    """A packet of acknowledgements."""
    return b"".join(_ACK.pack(ack.key, ack.index, ack.verdict) for ack in acks)


def decode_acks(packet: bytes) -> list[Ack]:
    """The acknowledgements of a packet; raises ``struct.error`` or ``ValueError`` for no such."""
    return [Ack(key, index, Verdict(verdict)) for key, index, verdict in _ACK.iter_unpack(packet)]


def encode_forgets(keys: Iterable[int]) -> bytes:
    """A packet of streams that will not be heard of again."""
    return b"".join(map(_KEY.pack, keys))


def decode_forgets(packet: bytes) -> list[int]:
    """The streams of a packet; raises ``struct.error`` where it is none."""
    return [key for (key,) in _KEY.iter_unpack(packet)]


class AckQueue:
    """Acknowledgements that wait to be written, one a stream."""

    def __init__(self) -> None:
        self._waiting: dict[int, Ack] = {}

    def put(self, ack: Ack) -> None:
        """Add one, in place of earlier ones of its stream. A last verdict is never undone."""
        earlier = self._waiting.get(ack.key)
        if earlier is not None and earlier.verdict is not Verdict.CONTINUE:
            ack = replace(ack, verdict=earlier.verdict)
        self._waiting[ack.key] = ack

    def packet(self) -> bytes | None:
        """The next packet, or None where nothing waits."""
        if not self._waiting:
            return None
        return encode_acks(itertools.islice(self._waiting.values(), _MAX_ENTRIES))

    def written(self) -> None:
        """The packet was written; what it held does not wait any more."""
        if len(self._waiting) <= _MAX_ENTRIES:
            self._waiting.clear()
        else:
            for key in list(itertools.islice(self._waiting, _MAX_ENTRIES)):
                del self._waiting[key]


class ForgetQueue:
    """Streams to be forgotten that wait to be written."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def put(self, key: int) -> None:
        """Add a stream."""
        self._waiting.append(key)

    def packet(self) -> bytes | None:
        """The next packet, or None where nothing waits."""
        if not self._waiting:
            return None
        return encode_forgets(self._waiting[:_MAX_ENTRIES])

    def written(self) -> None:
        """The packet was written; what it held does not wait any more."""
        del self._waiting[:_MAX_ENTRIES]
