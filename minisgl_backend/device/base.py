"""What an executor needs from a device: the few things in which a CPU and a GPU differ.

A device has memory and one queue. Work is submitted to the queue and runs in the order of its
submission; to submit work never waits for it. Must not know models, plans or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Submission(Protocol[T_co]):
    """Work that was submitted to the queue."""

    def result(self) -> T_co:
        """Wait for the work and its copies to the host. Raises what the work raised."""


class Device(Protocol):
    """One device and its queue."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are made."""

    @property
    def default_dtype(self) -> str | None:
        """The dtype that ``auto`` stands for, or None if it is that of the checkpoint."""

    @property
    def kv_bytes_cap(self) -> int | None:
        """The most bytes that KV pages take if their number is ``auto``; None for no cap."""

    def free_memory(self) -> int:
        """How many bytes can still be allocated."""

    def submit(self, work: Callable[[], T]) -> Submission[T]:
        """Queue ``work``, which runs in inference mode. It reads tensors by ``download`` only."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy an array to the device. It must not be written to until the submission is done."""

    def download(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. Its values are valid once the submission has its result."""

    def close(self) -> None:
        """Wait for the queue and end it. Idempotent."""
