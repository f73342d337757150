"""An NVIDIA GPU as a device: its queue is one CUDA stream.

Work is launched on the thread that submits it, which takes only as long as the launches and never
waits for the GPU. Copies to and from the host go through pinned memory of PyTorch's caching
allocator, which reuses a block only after the copies from or to it have run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.device.base import Graph, Submission
from minisgl_backend.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Launched(Generic[T]):
    """Work whose kernels are in the stream (``Submission``); ``done`` comes after them."""

    value: T
    done: torch.cuda.Event

    def result(self) -> T:
        self.done.synchronize()
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class _CudaGraph(Generic[T]):
    """``Graph``."""

    graph: torch.cuda.CUDAGraph
    output: T

    def replay(self) -> None:
        self.graph.replay()


class CudaDevice:
    """Tensors in a GPU's memory, computed in the order of one stream."""

    is_host = False
    kv_bytes_cap = None

    def __init__(self, index: int = 0) -> None:
        """Raises ``ConfigError`` if there is no such GPU."""
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device cuda:{index} is not there: {torch.cuda.device_count()} GPUs")
        self.torch_device = torch.device("cuda", index)
        # otherwise a rank's pinned memory and events would use GPU 0
        torch.cuda.set_device(index)
        self.stream = torch.cuda.Stream(self.torch_device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._closed = False

    def free_memory(self) -> int:
        """Bytes of the GPU's memory that are free, including unused blocks of PyTorch."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def submit(self, work: Callable[[], T]) -> Submission[T]:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            value = work()
            done = torch.cuda.Event()
            done.record(self.stream)
        return _Launched(value, done)

    def capture(self, work: Callable[[], T]) -> Graph[T]:
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(
            graph, pool=self._graph_pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            output = work()
        graph.replay()  # the first replay uploads it
        return _CudaGraph(graph, output)

    def catch_up(self) -> None:
        """Make the stream wait for everything that this thread has launched outside ``submit``."""
        self.stream.wait_stream(torch.cuda.current_stream(self.torch_device))

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        writable = array if array.flags.writeable else array.copy()  # torch warns of others
        return torch.from_numpy(writable).pin_memory().to(self.torch_device, non_blocking=True)

    def staging(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        pinned: npt.NDArray[np.int32] = torch.empty(
            shape, dtype=torch.int32, pin_memory=True
        ).numpy()
        return pinned

    def host_memory(self, num_bytes: int) -> Tensor:
        # PyTorch's allocator of pinned memory would round the size up to a power of two
        memory = np.empty(num_bytes, np.uint8)
        address, runtime = memory.ctypes.data, torch.cuda.cudart()
        if error := int(runtime.cudaHostRegister(address, num_bytes, 0)):
            raise MemoryError(f"CUDA cannot pin {num_bytes:,} bytes of main memory: error {error}")
        # before the memory is freed; at exit nothing needs to be done
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(memory)

    def overwrite(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stream.synchronize()
