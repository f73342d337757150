"""The device seam: the few things in which a CPU and a GPU differ for the executor.

A device has memory and one queue. Work is submitted to the queue and runs in the order of
submission; submitting never waits for it. Must not know models, plans or requests.
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
    """Work in the queue."""

    def result(self) -> T_co:
        """Wait for the work, its copies to the host included; raises what the work raised."""


class Device(Protocol):
    """One device and its queue."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are made."""

    @property
    def default_dtype(self) -> str | None:
        """The dtype that ``auto`` stands for; None where it is the checkpoint's own."""

    @property
    def default_page_size(self) -> int:
        """The page size that ``auto`` stands for."""

    @property
    def kv_bytes_cap(self) -> int | None:
        """The most that KV pages take when their number is ``auto``; None for no cap."""

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""

    def submit(self, work: Callable[[], T]) -> Submission[T]:
        """Queue ``work``, which runs in inference mode and reads results with ``download`` only."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device; it must not be written to until the submission is done."""

    def download(self, tensor: Tensor) -> Tensor:
        """The tensor on the host; its values are valid once the submission's result is there."""

    def close(self) -> None:
        """Wait for the queue and end it. Idempotent."""
