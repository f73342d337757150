"""Turns the option ``comm`` and a place into a group whose ranks are connected.

The ranks find each other through a store, which rank 0 holds. Must not know models, or what the
ranks tell each other.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import permutations
from typing import Final

import torch
from torch._C._distributed_c10d import Store, TCPStore

from minisgl_backend import packages
from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.kernels.dispatch import can_start_early
from minisgl_backend.parallel.group import FusedSum, Group
from minisgl_backend.parallel.place import COMMS, RankPlace, check_comm
from minisgl_backend.parallel.pynccl import pynccl_group
from minisgl_backend.parallel.rendezvous import listen_at
from minisgl_backend.parallel.torch_group import gloo_group, nccl_group

_LEAST_STORE_S: Final = 60.0
"""The shortest timeout: PyTorch looks up each address's name for its log, and a lost answer costs
5 s."""


def choose_comm(option: str | None, device: torch.device, place: RankPlace) -> str:
    """The library that ``option`` names, by default the fastest that is ready for use.

    Sums by this package's kernels are the fastest with two and four ranks on one host; eight have
    not been measured. Raises ``ConfigError`` if the device or the hosts cannot use the library.
    """
    check_comm(option, device.type, place)
    if option is not None:
        return option
    is_small = place.is_one_host and place.size in (2, 4)
    if device.type == "cuda" and is_small and _why_not_cuda_sum(device, place.size) is None:
        return "cuda"
    return COMMS[device.type][0]


def open_store(place: RankPlace, timeout_s: float) -> tuple[RankPlace, Store]:
    """The place with the store's port, and the store of all ranks. Rank 0 is the first to open it.

    Raises ``ConfigError`` if the address is not one of this machine, or its port is taken.
    """
    listener = listen_at(place) if place.rank == 0 else None
    if listener is not None:
        place = replace(place, port=listener.getsockname()[1])
    try:
        store = TCPStore(
            place.host,
            place.port,
            is_master=listener is not None,
            timeout=timedelta(seconds=max(timeout_s, _LEAST_STORE_S)),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except RuntimeError as error:  # torch's DistError and its kin
        cause = str(error).partition("\n")[0]  # frames of PyTorch's code follow
        raise ConfigError(f"the ranks cannot meet at {place.host}:{place.port}: {cause}") from error
    return place, store


def connect(
    place: RankPlace, store: Store, comm: str, device: torch.device, *, timeout_s: float
) -> Group:
    """The group of all ranks that meet in ``store``. Returns when all have connected.

    With gloo, a collective that waits for longer than ``timeout_s`` raises. Raises ``ConfigError``
    if the ranks do not find each other in that time.
    """
    try:
        host = gloo_group(place, store, timeout_s)
        if comm == "gloo":
            return host
        if comm == "pynccl":
            return pynccl_group(host, device, is_one_host=place.is_one_host)
        group = nccl_group(place, store, host)
        if comm == "cuda":
            group.fused = _cuda_sum(host, device)
        return group
    except (RuntimeError, EngineFailure) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError(f"the ranks cannot connect by {comm}: {cause}") from error


def _cuda_sum(host: Group, device: torch.device) -> FusedSum:
    """The sums by this package's kernels; raises ``ConfigError`` if the GPU has none."""
    if (reason := _why_not_cuda_sum(device, host.size)) is not None:
        raise ConfigError(f"comm=cuda needs {reason}")
    from minisgl_backend.parallel.cuda_sum import CudaSum

    return CudaSum(host, device)


def _why_not_cuda_sum(device: torch.device, num_ranks: int) -> str | None:
    """What sums by this package's kernels lack, if anything; the same on all ranks of a host."""
    if not can_start_early(device):
        return "GPUs of compute capability 9.0 or above"
    if (error := packages.import_error("cuda.bindings")) is not None:
        return f"cuda.bindings ({error}): {packages.CUDA_BINDINGS}"
    if not _reach_each_other(num_ranks):
        return "GPUs that reach each other's memory"
    return None


def _reach_each_other(num_gpus: int) -> bool:
    """Whether each of this host's first GPUs can write to the memory of the others."""
    return torch.cuda.device_count() >= num_gpus and all(
        torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(num_gpus), 2)
    )
