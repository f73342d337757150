"""What an executor needs from a device: the few things in which a CPU and a GPU differ.

A device has memory and one queue. Work runs in the order in which it was queued, and queueing never
waits for the work. How work is queued differs by device, and only the device's executor knows it.
Must not know models, plans or requests.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor


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

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy an array to the device. It must not be written to until the queue has used it."""

    def download(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. Its values are valid once the queue has come so far."""

    def close(self) -> None:
        """Wait for the queue and end it. Idempotent."""
