"""The CPU as a device: its queue is one worker thread.

PyTorch releases the GIL inside its kernels, so planning and sending go on while a step computes.
With one thread, the steps run in the order of their submission.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.device.base import Graph
from minisgl_backend.errors import InvariantError

T = TypeVar("T")

_KV_BYTES_CAP: Final = 2 * 2**30


class CpuDevice:
    """Tensors in main memory, computed by one worker thread and PyTorch's own pool of threads.

    The memory for KV pages is capped, since free memory is shared with all other programs on the
    machine.
    """

    torch_device = torch.device("cpu")
    is_host = True
    kv_bytes_cap = _KV_BYTES_CAP

    def __init__(self, num_threads: int = 1) -> None:
        """``num_threads`` compute together."""
        self._queue = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="minisgl-cpu-device",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    def free_memory(self) -> int:
        """Bytes of main memory: those that Linux reports as available, or else those unused."""
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``, which runs in inference mode."""
        return self._queue.submit(_in_inference_mode, work)

    def capture(self, work: Callable[[], T]) -> Graph[T]:
        raise InvariantError("a CPU has no graphs")

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        writable = array if array.flags.writeable else array.copy()  # torch warns of others
        return torch.from_numpy(writable)

    def overwrite(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        tensor.copy_(self.upload(array))

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None:
        self._queue.shutdown(wait=True)


def _in_inference_mode(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()
