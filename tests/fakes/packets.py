"""Packets as tests compare them."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.errors import MiniSGLError
from minisgl_backend.request import Failed
from minisgl_backend.wire.packets import Packet


def comparable(packet: Packet) -> tuple[Packet, type[MiniSGLError] | None, str]:
    """All that a packet says; two errors of one class and message are not equal by themselves."""
    if isinstance(packet.terminal, Failed):
        error = packet.terminal.error
        return replace(packet, terminal=None), type(error), str(error)
    return packet, None, ""
