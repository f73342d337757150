"""An NVIDIA GPU as a device: its queue is one CUDA stream.

Work is queued on the thread that launches it: that takes as long as its launches take, and never
waits for the GPU. Copies to and from the host go through pinned memory of PyTorch's caching
allocator, which hands a block out again only after the copies that use it have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError


class CudaDevice:
    """Tensors in a GPU's memory, computed in the order of one stream."""

    default_dtype = None
    kv_bytes_cap = None

    def __init__(self, index: int = 0) -> None:
        """Raises ``ConfigError`` if there is no such GPU."""
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device cuda:{index} is not there: {torch.cuda.device_count()} GPUs")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)  # else a rank's pinned memory and events would use GPU 0
        self.stream = torch.cuda.Stream(self.torch_device)
        self._closed = False

    @property
    def total_memory(self) -> int:
        """All bytes of the GPU's memory, used or free."""
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def free_memory(self) -> int:
        """Bytes of the GPU's memory that are free, including unused blocks of PyTorch."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Launch what is inside on the stream, in inference mode."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            yield

    def catch_up(self) -> None:
        """Let the stream wait for what this thread has launched outside of ``queue``."""
        self.stream.wait_stream(torch.cuda.current_stream(self.torch_device))

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        writable = array if array.flags.writeable else array.copy()  # torch warns of others
        return torch.from_numpy(writable).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stream.synchronize()
