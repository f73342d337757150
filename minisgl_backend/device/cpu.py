"""The CPU as a device: its queue is one worker thread.

PyTorch releases the GIL inside its kernels, so planning and sending go on while a step computes.
With one thread, steps run in the order in which they are submitted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.device.base import Graph
from minisgl_backend.errors import InvariantError
from minisgl_backend.host_memory import HostMemory

T = TypeVar("T")
_Queue: TypeAlias = SimpleQueue[Callable[[], None] | None]

_KV_BYTES_CAP: Final = 2 * 2**30


class CpuDevice:
    """Tensors in main memory, computed by one worker thread and PyTorch's own pool of threads.

    The memory for KV pages is capped, since all other programs on the machine share the free
    memory.
    """

    torch_device = torch.device("cpu")
    is_host = True
    kv_bytes_cap = _KV_BYTES_CAP

    def __init__(self, num_threads: int = 1) -> None:
        """``num_threads`` threads compute each operation."""
        self._work: _Queue = SimpleQueue()
        # a daemon, so that the process can end even while a long step runs
        self._worker = threading.Thread(
            target=_run, args=(self._work, num_threads), name="minisgl-cpu-device", daemon=True
        )
        self._worker.start()
        # called by close, or when this object is collected, since a failed start closes no device
        self._end = weakref.finalize(self, self._work.put, None)
        self._end.atexit = False  # at exit the engine may still submit work

    def free_memory(self) -> int:
        """Bytes of main memory that this process can still get."""
        return HostMemory.now().free

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``, which runs in inference mode."""
        if not self._end.alive:
            raise InvariantError("the device is closed")
        future: Future[T] = Future()
        self._work.put(partial(_complete, future, work))
        return future

    def capture(self, work: Callable[[], T]) -> Graph[T]:
        raise InvariantError("a CPU has no graphs")

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        writable = array if array.flags.writeable else array.copy()  # torch warns of others
        return torch.from_numpy(writable)

    def staging(self, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.empty(shape, np.int32)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.from_numpy(np.empty(num_bytes, np.uint8))

    def overwrite(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        tensor.copy_(self.upload(array))

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None:
        self._end()
        self._worker.join()


def _run(queue: _Queue, num_threads: int) -> None:
    """The worker. It holds no reference to the device, so that the device can be collected."""
    torch.set_num_threads(num_threads)
    while (work := queue.get()) is not None:
        work()
        del work  # otherwise it would keep its references alive until the next work comes


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        with torch.inference_mode():
            result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
