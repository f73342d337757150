"""Groups by PyTorch's own communication libraries: gloo for CPUs, NCCL for NVIDIA GPUs.

The backends are used as objects, not through ``init_process_group``. So there is no global state,
and two engines, or several ranks as threads, may share a process. Gloo ends a collective that waits
longer than the group's timeout. NCCL's collectives run on the GPU, where only ``leave`` ends them.
Gloo cannot be aborted: with ranks on other hosts, ``leave`` closes its connections, which has the
same effect as the end of the other ranks. Must not know what is summed or sent.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    Store,
)

from minisgl_backend.errors import EngineFailure
from minisgl_backend.parallel.group import FusedSum
from minisgl_backend.parallel.leaving import Leaving
from minisgl_backend.parallel.place import RankPlace

_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""PyTorch's variable for the network interface that gloo uses."""
_NO_TIMEOUT: Final = timedelta(days=365)
"""PyTorch would end the whole process if a collective on a GPU took longer than its timeout."""


class TorchGroup:
    """A group with one backend of ``torch.distributed``, for tensors on its device.

    ``host`` is the group of the same ranks for tensors in main memory; by default this one.
    """

    fused: FusedSum | None = None

    def __init__(
        self,
        backend: Any,
        host: TorchGroup | None = None,
        connections: frozenset[int] | None = None,
    ):
        """``connections`` are gloo's, by inode; None if they end with the peers' processes."""
        self._backend = backend
        self._host = host
        self._connections = connections
        self._leaving = Leaving(self._abort)
        self.rank: int = backend.rank()
        self.size: int = backend.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        _run(self._backend.allreduce, [x], _in_line(AllreduceOptions()))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        options = _in_line(AllgatherOptions())
        _run(self._backend._allgather_base, parts.flatten(0, 1), x.contiguous(), options)
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        _run(self._backend.broadcast, [x], _in_line(BroadcastOptions()))
        return x

    def least(self, numbers: Sequence[int]) -> list[int]:
        if self._host is not None:
            return self._host.least(numbers)
        found = torch.tensor(numbers, dtype=torch.int64)
        _run(self._backend.allreduce, found, ReduceOp.MIN)
        return [int(number) for number in found.tolist()]

    def leave(self, *, patience_s: float = 0.0) -> None:
        if self.fused is not None:
            self.fused.let_go()
        # otherwise gloo's collectives end with the process of a lost peer, or by their timeout
        if self._host is not None or self._connections is not None:
            self._leaving.begin(patience_s)

    def _abort(self) -> None:
        if self._host is not None:
            self._host.leave()
            self._backend.abort()
        elif self._connections is not None:
            for inode, connection in _tcp_connections():
                if inode in self._connections:
                    with suppress(OSError):  # the peer has closed it
                        connection.shutdown(socket.SHUT_RDWR)


def _in_line(options: Any) -> Any:
    """Make NCCL launch on the current stream, not on its own, if PyTorch can do so (2.8)."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _run(collective: Callable[..., Any], *arguments: Any) -> None:
    """Wait for a collective, or make the current stream wait unless the collective runs on it."""
    try:
        work = collective(*arguments)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise EngineFailure(f"a rank is lost: {error}") from error


def gloo_group(place: RankPlace, store: Store, timeout_s: float) -> TorchGroup:
    """The group of all ranks for tensors in main memory. Returns when all are connected."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    interface = os.environ.get(_INTERFACE)
    options._devices = [
        gloo.create_device(interface=interface)
        if interface and not place.is_one_host
        # not the address of this host's own name, which may be one of the loopback interface
        else gloo.create_device(hostname=place.own_address or place.host)
    ]
    before = {inode for inode, _ in _tcp_connections()}
    backend = gloo(PrefixStore("gloo", store), place.rank, place.size, options)
    if place.is_one_host:
        return TorchGroup(backend)
    after = {inode for inode, _ in _tcp_connections()}
    return TorchGroup(backend, connections=frozenset(after - before))


def _tcp_connections() -> Iterator[tuple[int, socket.socket]]:
    """The TCP connections of this process, each with its inode, to be used one at a time."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it has been closed, or is not connected
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    yield os.fstat(connection.fileno()).st_ino, connection


def nccl_group(place: RankPlace, store: Store, host: TorchGroup) -> TorchGroup:
    """The group of all ranks for tensors on their GPUs, by PyTorch's NCCL."""
    keep_multicast_off()
    # the engine decides what happens if a peer is lost, not PyTorch's watchdog
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NO_TIMEOUT
    group = nccl(PrefixStore("nccl", store), place.rank, place.size, options)
    return TorchGroup(group, host)


def keep_multicast_off() -> None:
    """NVLink multicast gains nothing for messages of a few MB, and fails on shared hosts."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
