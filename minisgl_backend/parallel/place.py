"""The places of one engine's ranks, in the terms of PyTorch's launcher ``torchrun``.

A rank reads its place from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. These are set by whatever
starts its process: rank 0 for the ranks of its host, ``server.node`` on another host. Nothing here
assumes that the ranks share one host.

By default rank 0 takes a free port of the loopback interface, so that two servers on one host never
mix. Must not import torch, since ``precheck`` reads places before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from minisgl_backend.errors import ConfigError

_LOOPBACK: Final = "127.0.0.1"
COMMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": ("gloo",), "cuda": ("nccl", "pynccl", "cuda")}
)
"""The libraries with which ranks can communicate, by type of device, the default first."""


def check_comm(option: str | None, device_type: str, place: RankPlace) -> None:
    """Raise ``ConfigError`` if the device, or ranks on several hosts, cannot use the library that
    the option ``comm`` names."""
    offered = COMMS[device_type]
    if option not in (None, *offered):
        raise ConfigError(
            f"option comm={option} does not work on {device_type}, which has {', '.join(offered)}"
        )
    if option == "cuda" and not place.is_one_host:
        raise ConfigError("option comm=cuda is for the GPUs of one machine: nnodes must be 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank's place among all. ``port`` 0 stands for a free port, which only rank 0 can take.

    ``local_rank`` is the rank's number on its host, and the index of its GPU. ``own_address`` is
    the address by which the others reach this host; None if it is that of ``host``.
    """

    rank: int
    size: int
    host: str = _LOOPBACK
    port: int = 0
    local_rank: int
    local_size: int
    own_address: str | None = None

    @classmethod
    def first(cls, size: int, address: str | None, num_nodes: int = 1) -> RankPlace:
        """Rank 0's place among ``size`` ranks, spread evenly over ``num_nodes`` hosts; ``address``
        is HOST:PORT."""
        place = cls(rank=0, size=size, local_rank=0, local_size=size // num_nodes)
        if address is None:
            return place
        host, port = host_and_port(address)
        return replace(place, host=host, port=port)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankPlace:
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

    def of(self, rank: int) -> RankPlace:
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
    def is_one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT or [ADDRESS]:PORT. Raises ``ConfigError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"rendezvous must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)
