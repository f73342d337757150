"""detokenizer -> llm_engine: acknowledgements of packets; and back, the streams to be forgotten.

Both go over a Unix socket (``tritonserver.channel``), in binary, any number of them in a message.
An acknowledgement is for all packets of a stream up to one. A stream that ends without a last
packet is one to be forgotten. Must not know what is in a packet, or when a message is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

_ACK: Final = struct.Struct("<QIBQ")
_KEY: Final = struct.Struct("<Q")
ACK_BYTES: Final = _ACK.size
"""The length of an acknowledgement in a message; that of a key is shorter."""


class Verdict(IntEnum):
    """What an acknowledgement says about the stream."""

    CONTINUE = 0
    STOP = 1
    """Stop strings matched in all samples that had not ended; the client has its last answer."""
    CANCELLED = 2
    """The client has cancelled, or is gone."""
    FAILED = 3
    """The detokenizer failed on the stream, or does not know it since it was restarted; the client
    has the error."""


@dataclass(frozen=True, slots=True)
class Ack:
    """All packets of a stream up to ``index`` were processed.

    ``stopped`` has a bit for each sample in which a stop string has matched, bit 0 for the first:
    the client gets nothing more from these. Redundant with a verdict other than ``CONTINUE``.
    """

    key: int
    index: int
    verdict: Verdict
    stopped: int = 0

    def has_stopped(self, sample: int) -> bool:
        """Whether the bit of a sample is set."""
        return bool(self.stopped >> sample & 1)


def encode_acks(acks: Iterable[Ack]) -> bytes:
    """A message of acknowledgements."""
    return b"".join(_ACK.pack(ack.key, ack.index, ack.verdict, ack.stopped) for ack in acks)


def decode_acks(message: bytes) -> list[Ack]:
    """The acknowledgements of a message; raises ``struct.error`` or ``ValueError`` if malformed."""
    return [
        Ack(key, index, Verdict(verdict), stopped)
        for key, index, verdict, stopped in _ACK.iter_unpack(message)
    ]


def encode_keys(keys: Iterable[int]) -> bytes:
    """A message that names streams to be forgotten."""
    return b"".join(map(_KEY.pack, keys))


def decode_keys(message: bytes) -> list[int]:
    """The streams that a message names; raises ``struct.error`` if it is malformed."""
    return [key for (key,) in _KEY.iter_unpack(message)]
