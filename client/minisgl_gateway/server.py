"""A gateway listening: uvicorn with our protocol on a socket of our own."""

from __future__ import annotations

import socket
from typing import Final

import uvicorn

from minisgl_gateway.app import create_app
from minisgl_gateway.options import GatewayOptions
from minisgl_gateway.protocol import protocol_of
from minisgl_gateway.telemetry import Telemetry

_SEND_BUFFER_BYTES: Final = 64 * 2**10
"""Small, so that a client that does not read is soon noticed."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one. Raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def make_server(options: GatewayOptions) -> uvicorn.Server:
    """A server, to be run on a socket: ``server.run(sockets=[listener])``."""
    telemetry = Telemetry()
    config = uvicorn.Config(
        create_app(options, telemetry),
        http=protocol_of(options, telemetry),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=options.drain_timeout_s,
    )
    return uvicorn.Server(config)
