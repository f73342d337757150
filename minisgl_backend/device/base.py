"""A device as the executor sees it: the few operations that differ between a CPU and a GPU.

A device has memory and one queue. Work runs in the order in which it is submitted, and submitting
never waits for the work. A device may have graphs: work that is recorded once and then replayed.
Must not know models, plans or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArray: TypeAlias = npt.NDArray[np.int64]
"""Indices on the host, in the type that PyTorch expects for indices."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Submission(Protocol[T_co]):
    """Work in the queue of a device."""

    def result(self) -> T_co:
        """Wait until the device has done the work. Returns its result or raises its error."""


class Graph(Protocol[T_co]):
    """Recorded work. Its result, ``output``, is tensors that each replay overwrites."""

    @property
    def output(self) -> T_co: ...

    def replay(self) -> None:
        """Queue the work again, on the same memory. Allowed only within submitted work."""


class Device(Protocol):
    """One device and its queue."""

    @property
    def torch_device(self) -> torch.device:
        """The device of its tensors."""

    @property
    def is_host(self) -> bool:
        """Whether tensors are in main memory. If so, submitted work may read their values, and
        nothing needs to be compiled before the first step."""

    @property
    def kv_bytes_cap(self) -> int | None:
        """The most bytes that KV pages may take if their number is ``auto``; None for no cap."""

    def free_memory(self) -> int:
        """Number of bytes that can still be allocated."""

    def submit(self, work: Callable[[], T]) -> Submission[T]:
        """Queue ``work``, in inference mode. On a GPU this launches its kernels at once, and launch
        errors are raised here; on a CPU a worker thread runs it."""

    def capture(self, work: Callable[[], T]) -> Graph[T]:
        """Record ``work``, whose kernels must have run before. All graphs of a device share one
        memory pool. Allowed only within submitted work, and not on a CPU."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy an array to the device. The array must not change before the queue has used it."""

    def staging(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Uninitialized host memory, int32, that ``upload`` reads without another copy."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Main memory, uint8[num_bytes], uninitialized, that copies to and from the device use
        directly. Raises ``MemoryError``."""

    def overwrite(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        """Copy an array into a contiguous tensor of the device, in the order of the queue."""

    def download(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. Its values are valid once the queue has run the copy."""

    def close(self) -> None:
        """Wait for the queue, then end it. Idempotent."""
