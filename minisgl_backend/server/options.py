"""How a server listens and talks, and tritonserver's command line for it.

Knows Triton's options, and which of its doors are for the operator alone. Must not start anything.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from minisgl_backend.errors import ConfigError

ADMIN_KEY_HEADER: Final = "minisgl-admin-key"
"""The HTTP header that opens what is restricted; its value is random, and told to nobody."""

_RESTRICTED: Final = "model-repository,shared-memory,trace,logging"
"""What could unload models, map memory or fill the disk: none of a client's business."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """``host`` is a numeric address; a port of 0 stands for a free one."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    log_verbose: int = 0
    exit_timeout_s: int = 40
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(self.host).is_loopback

    def address(self, port: int) -> str:
        """HOST:PORT, as gRPC and URLs have it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def numeric(host: str) -> str:
    """The address that a host's name stands for, since tritonserver takes no names.

    Raises ``ConfigError`` where nobody knows the name.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter where no host can have such a name
        raise ConfigError(f"--host {host} is neither an address nor the name of one") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def with_ports(options: ServerOptions, held: contextlib.ExitStack) -> ServerOptions:
    """The options with free ports for those that are 0.

    Nobody else gets these ports until ``held`` is closed: they are bound, but nothing listens yet,
    and the server may bind them as well. Raises ``ConfigError`` if one is taken, or given twice.
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
            raise ConfigError(
                f"{_option(name)} {port} on {options.host} cannot be used: {error.strerror}"
            ) from error
        port = probe.getsockname()[1]
        if port in ports.values():
            raise ConfigError(f"{_option(name)} {port} is that of another endpoint, too")
        # what is bound as above another server could bind, too, until one of them listens
        claim = held.enter_context(socket.socket(socket.AF_UNIX))
        try:
            claim.bind(f"\0minisgl {options.host} {port}")
        except OSError:
            raise ConfigError(
                f"{_option(name)} {port} on {options.host} is that of another server that starts"
            ) from None
        ports[name] = port
    return replace(options, **ports)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def command_line(options: ServerOptions, admin_key: str) -> list[str]:
    """tritonserver's arguments, except those that name files."""
    host = options.host
    grpc_host, http_host = (f"[{host}]", f"ipv6:{host}") if ":" in host else (host, host)
    return [
        "--model-control-mode=explicit",
        "--load-model=*",
        "--disable-auto-complete-config",
        "--strict-readiness=true",
        "--exit-on-error=true",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--http-address={http_host}",
        f"--http-port={options.http_port}",
        f"--grpc-address={grpc_host}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={http_host}",
        f"--metrics-port={options.metrics_port}",
        f"--http-restricted-api={_RESTRICTED}:{ADMIN_KEY_HEADER}={admin_key}",
        f"--grpc-restricted-protocol={_RESTRICTED}:{ADMIN_KEY_HEADER}={admin_key}",
        f"--log-verbose={options.log_verbose}",
    ]
