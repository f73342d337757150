"""Packets of one-sample streams, and packets in the form that tests compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minisgl_backend.errors import MiniSGLError
from minisgl_backend.request import Finished, TokenId, TokenLogprobs
from minisgl_backend.wire.packets import Packet, SampleDelta


def make_packet(
    reply_to: str,
    key: int,
    index: int,
    token_ids: Sequence[TokenId] = (),
    *,
    logprobs: Sequence[TokenLogprobs] = (),
    finish: Finished | None = None,
    **more: Any,
) -> Packet:
    """A packet; the last one if it has a ``finish`` or an ``error``."""
    deltas = [SampleDelta(list(token_ids), tuple(logprobs), finish)] if token_ids or finish else []
    is_last = finish is not None or more.get("error") is not None
    return Packet(reply_to, key, index, deltas, is_last=is_last, **more)


def token_ids_of(packet: Packet) -> list[TokenId]:
    """All tokens of a packet."""
    return [token_id for delta in packet.deltas for token_id in delta.token_ids]


def finish_of(packet: Packet) -> Finished | None:
    """The end that a packet reports, if any."""
    return next((delta.finish for delta in packet.deltas if delta.finish is not None), None)


def comparable(packet: Packet) -> tuple[Packet, type[MiniSGLError] | None, str]:
    """Everything a packet says; two errors of the same class and message are not equal by
    themselves."""
    packet = replace(
        packet, deltas=[replace(one, logprobs=tuple(one.logprobs)) for one in packet.deltas]
    )
    if packet.error is not None:
        return replace(packet, error=None), type(packet.error), str(packet.error)
    return packet, None, ""
