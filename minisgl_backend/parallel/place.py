"""Where the ranks of one engine meet, in the words of PyTorch's launcher ``torchrun``.

A rank reads its place from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by rank 0 for the
processes that it starts, or by a launcher on another host. Nothing here assumes that the ranks
share one host.

By default rank 0 takes a free port of the loopback interface, so that two servers on one host never
meet.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError

_LOOPBACK: Final = "127.0.0.1"
_LOOK_UP_S: Final = 5.0
"""How long the look-up of a host's name may take."""
COMMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("gloo",), "cuda": ("nccl", "pynccl", "flashinfer")}
)
"""The libraries by which ranks can communicate, by type of device; the default first."""


def check_comm(option: str | None, device_type: str) -> None:
    """Raise ``ConfigError`` if the device cannot use the library that the option ``comm`` names."""
    offered = COMMS[device_type]
    if option not in (None, *offered):
        raise ConfigError(
            f"option comm={option} does not work on {device_type}, which has {', '.join(offered)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place among all. ``port`` 0 stands for a free one, which only rank 0 can take.

    ``local_rank`` is the rank's number on its host, and the index of its GPU.
    """

    rank: int
    size: int
    host: str = _LOOPBACK
    port: int = 0
    local_rank: int
    local_size: int

    @classmethod
    def first(cls, size: int, address: str | None) -> Place:
        """Rank 0's place if all ranks are on this host; ``address`` is HOST:PORT."""
        place = cls(rank=0, size=size, local_rank=0, local_size=size)
        if address is None:
            return place
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"distributed_address must be HOST:PORT, got {address!r}")
        return replace(place, host=host.strip("[]"), port=int(port))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place:
        """The place that a launcher gave this process; ``ConfigError`` if it gave none."""

        def number(name: str) -> int:
            try:
                return int(environment[name])
            except (KeyError, ValueError):
                raise ConfigError(f"a rank needs a number in the variable {name}") from None

        return cls(
            rank=number("RANK"),
            size=number("WORLD_SIZE"),
            host=environment.get("MASTER_ADDR", _LOOPBACK),
            port=number("MASTER_PORT"),
            local_rank=number("LOCAL_RANK"),
            local_size=number("LOCAL_WORLD_SIZE"),
        )

    def of(self, rank: int) -> Place:
        """The place of another rank on this host."""
        return replace(self, rank=rank, local_rank=self.local_rank + rank - self.rank)

    def environment(self) -> dict[str, str]:
        """The variables from which ``from_environment`` reads this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }

    @property
    def is_loopback(self) -> bool:
        """Whether the ranks can only be those of this host."""
        return self.host in (_LOOPBACK, "localhost", "::1")


def check_address(place: Place) -> None:
    """Raise ``ConfigError`` if rank 0 cannot listen at its place's host and port.

    Returns or raises within seconds. PyTorch would look for a host that is not there for two
    minutes, and then show the frames of its own code.
    """
    where = f"distributed_address {place.host}:{place.port}"
    code = 0
    for family, address in _addresses(place):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                code = error.errno or errno.EADDRNOTAVAIL
            else:
                return
    if code == errno.EADDRINUSE:
        raise ConfigError(f"{where} cannot be used: the port is taken")
    if code == errno.EACCES:
        raise ConfigError(f"{where} cannot be used: this user may not listen at the port")
    raise ConfigError(
        f"{where} is not an address of this machine: rank 0 listens there, so it must be one"
    )


def _addresses(place: Place) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The addresses that the place's host and port stand for."""
    found: list[tuple[socket.AddressFamily, tuple[Any, ...]]] = []
    cause = f"its name was not found within {_LOOK_UP_S:g} s"

    def look_up() -> None:
        nonlocal cause
        try:
            entries = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # the latter if no host can have such a name
            cause = "there is no host of this name"
        else:
            found.extend((family, address) for family, _, _, _, address in entries)

    thread = threading.Thread(target=look_up, name="look up", daemon=True)
    thread.start()
    thread.join(_LOOK_UP_S)
    if not found:
        raise ConfigError(f"distributed_address {place.host}:{place.port} cannot be used: {cause}")
    return found
