"""Addresses with a port, as gRPC and URLs have them."""

from __future__ import annotations

from typing import Final

_FROM_HERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""For what stands for all addresses of this machine: one of them."""


def at_port(host: str, port: int | str) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def from_here(host: str, port: int) -> str:
    """HOST:PORT, as it is reached from this machine, if that listens at ``host``."""
    return at_port(_FROM_HERE.get(host, host), port)
