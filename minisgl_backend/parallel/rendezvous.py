"""The address at which rank 0 awaits the others, and a socket that listens there.

Must not import torch, like ``place``, and must not know what is said at the meeting.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.parallel.place import RankPlace

_BACKLOG: Final = 128
_LOOK_UP_S: Final = 5.0
"""How long looking up a host's name may take."""
_NAMED_WITHIN_S: Final = 60.0
_LOOK_UP_EVERY_S: Final = 0.5


def is_loopback(host: str) -> bool:
    """Whether only processes on this machine can reach this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(place: RankPlace) -> socket.socket:
    """A socket that listens at the place's host and port, and at no other address.

    Returns or raises ``ConfigError`` within seconds, or within a minute if there are several hosts.
    PyTorch would look for a missing host for two minutes, and then show frames of its own code.
    """
    where = f"rendezvous {place.host}:{place.port}"
    code = 0
    for family, address in _addresses(place):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            code = error.errno or errno.EADDRNOTAVAIL
            listener.close()
        else:
            return listener
    if code == errno.EADDRINUSE:
        raise ConfigError(f"{where} cannot be used: the port is taken")
    if code == errno.EACCES:
        raise ConfigError(f"{where} cannot be used: this user may not listen at the port")
    raise ConfigError(
        f"{where} is not an address of this machine: rank 0 listens there, so it must be one"
    )


def _addresses(place: RankPlace) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The addresses that the place's host and port stand for.

    In a cluster, a machine may be running before others can resolve its name. So with several
    hosts, this waits for a name that is not known yet.
    """
    found: list[tuple[socket.AddressFamily, tuple[Any, ...]]] = []
    patience_s = _LOOK_UP_S if place.is_one_host else _NAMED_WITHIN_S
    until_s = time.monotonic() + patience_s
    cause = f"its name was not found within {patience_s:g} s"

    def look_up() -> None:
        nonlocal cause
        while not found:
            try:
                entries = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
                found.extend((family, address) for family, _, _, _, address in entries)
            except (OSError, UnicodeError):  # the latter if no host can have such a name
                cause = "there is no host of this name"
                if place.is_one_host or time.monotonic() > until_s:
                    return
                time.sleep(_LOOK_UP_EVERY_S)

    thread = threading.Thread(target=look_up, name="look up", daemon=True)
    thread.start()
    thread.join(patience_s)
    if not found:
        raise ConfigError(f"rendezvous {place.host}:{place.port} cannot be used: {cause}")
    return found
