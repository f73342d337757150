"""The numeric address and the free ports that a server will listen at.

Must not know tritonserver's process, or what is served at which port.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import replace
from typing import Any

from minisgl_backend.errors import ConfigError, NotNow
from minisgl_backend.server.launch import ServerOptions


def numeric(host: str) -> str:
    """The address that a host's name stands for, since tritonserver takes no names.

    Raises ``ConfigError`` if the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter if the name is not possible
        raise ConfigError(f"--host {host} is neither an address nor the name of one") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def with_ports(options: ServerOptions, held: contextlib.ExitStack) -> ServerOptions:
    """The options with free ports for those that are 0.

    No other process gets these ports until ``held`` is closed: they are bound, but nothing listens
    yet, and the server may bind them as well. Raises ``NotNow`` if one is taken, ``ConfigError`` if
    one is repeated or cannot be used.
    """
    names = ("http_port", "grpc_port", "metrics_port")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    ports: dict[str, Any] = {}
    for name in names:
        port = getattr(options, name)
        probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, port))
        except OSError as error:
            kind = NotNow if error.errno == errno.EADDRINUSE else ConfigError
            raise kind(
                f"{_option(name)} {port} on {options.host} cannot be used: {error.strerror}"
            ) from error
        port = probe.getsockname()[1]
        if port in ports.values():
            raise ConfigError(f"{_option(name)} {port} is that of another endpoint, too")
        # another server could bind the same port, as above, until one of the two listens
        claim = held.enter_context(socket.socket(socket.AF_UNIX))
        try:
            claim.bind(f"\0minisgl {options.host} {port}")
        except OSError:
            raise NotNow(
                f"{_option(name)} {port} on {options.host} is that of another server that starts"
            ) from None
        ports[name] = port
    return replace(options, **ports)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
