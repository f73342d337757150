"""How long a client may take to read, with the test's own transport, whose clock is fast."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.protocol import BoundedProtocol, protocol_of
from minisgl_gateway.telemetry import Telemetry
from uvicorn import Config
from uvicorn.server import ServerState

PATIENCE_S = 0.1


class Transport:
    """Holds what has not been read yet; ``read`` is called before each look at it."""

    def __init__(self, num_unread: int, read: Callable[[int], int]) -> None:
        self.num_unread = num_unread
        self._read = read
        self.num_looks = 0
        self.is_cut = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        self.num_unread = self._read(self.num_unread)
        return self.num_unread

    def abort(self) -> None:
        self.is_cut.set()

    def is_closing(self) -> bool:
        return self.is_cut.is_set()

    def close(self) -> None:
        pass

    def get_extra_info(self, name: str) -> Any:
        return None


def connected(transport: Any, telemetry: Telemetry) -> BoundedProtocol:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    config = Config(app, log_config=None)
    config.load()
    kind = protocol_of(GatewayOptions(patience_s=PATIENCE_S), telemetry)
    protocol = kind(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(transport)
    protocol._stop_timer()  # as if a head had come
    return protocol


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_reader_that_is_silent_is_cut(is_closed: bool) -> None:
    telemetry = Telemetry()
    transport = Transport(100, read=lambda left: left)
    protocol = connected(transport, telemetry)
    if is_closed:
        protocol.timeout_keep_alive_handler()
    else:
        protocol.pause_writing()
    await asyncio.wait_for(transport.is_cut.wait(), 30)
    assert b"slow_readers_total 1.0" in telemetry.text()


async def test_a_reader_that_is_slow_is_not() -> None:
    telemetry = Telemetry()
    transport = Transport(1000, read=lambda left: left - 1)
    protocol = connected(transport, telemetry)
    protocol.pause_writing()
    while transport.num_looks < 4:
        await asyncio.sleep(PATIENCE_S / 4)
    assert not transport.is_cut.is_set()
    protocol.resume_writing()
    looks = transport.num_looks
    await asyncio.sleep(3 * PATIENCE_S)
    assert transport.num_looks == looks, "the gateway looks no more"
    protocol.connection_lost(None)
