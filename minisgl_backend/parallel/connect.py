"""From the option ``comm`` and a place to a group whose ranks are connected."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from minisgl_backend.errors import ConfigError
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.pynccl import pynccl_group
from minisgl_backend.parallel.rendezvous import Place
from minisgl_backend.parallel.torch_group import gloo_group, nccl_group


def choose_comm(option: str | None, device: torch.device) -> str:
    """The library that ``option`` names, by default the device's own.

    Raises ``ConfigError`` where the device cannot use it.
    """
    offered = ("gloo",) if device.type == "cpu" else ("nccl", "pynccl")
    if option is None:
        return offered[0]
    if option not in offered:
        raise ConfigError(
            f"option comm={option} does not work on {device.type}, which has {', '.join(offered)}"
        )
    return option


def connect(
    place: Place, store: Store, comm: str, device: torch.device, *, timeout_s: float
) -> Group:
    """The group of all ranks that meet in ``store``; returns when each of them is there.

    A collective that waits for a silent rank ends after ``timeout_s`` where the library can tell,
    as gloo can. Raises ``RuntimeError`` where the ranks do not find each other in that time.
    """
    host = gloo_group(place, store, timeout_s)
    if comm == "gloo":
        return host
    if comm == "nccl":
        return nccl_group(place, store, timeout_s, host)
    return pynccl_group(host, device)
