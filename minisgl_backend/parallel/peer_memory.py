"""Memory of each rank's GPU that the other ranks of its host write to (CUDA's IPC handles).

It takes the driver's C interface, since PyTorch's symmetric memory needs PyTorch's own process
groups and may set up NVLink multicast. Knows addresses, but not what is written there. The memory
is never freed: a peer may still be writing to it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from minisgl_backend.parallel.group import Group

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_LIBRARY: Final = "libcuda.so.1"


class _Handle(ctypes.Structure):
    """``CUipcMemHandle`` of cuda.h, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class PeerMemory:
    """``num_bytes`` on each rank, filled with a 16-bit ``pattern``.

    ``addresses`` are the addresses of all ranks' memory in this process. All ranks of ``host``, a
    group for tensors in main memory, make theirs at the same time, each with its GPU as the current
    device.
    """

    def __init__(self, host: Group, num_bytes: int, pattern: int):
        torch.cuda.current_stream().synchronize()  # the driver's functions need PyTorch's context
        self._driver = ctypes.CDLL(_LIBRARY)
        self._num_words = num_bytes // 2
        own = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
        self._own = own
        self.fill(pattern)
        torch.cuda.synchronize()
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), own)
        mine = torch.frombuffer(bytearray(bytes(handle)), dtype=torch.uint8)
        handles = host.all_gather(mine)
        self.addresses = [
            own.value if rank == host.rank else self._open(handles[rank].numpy().tobytes())
            for rank in range(host.size)
        ]
        host.least([0])  # a barrier: no rank writes before all are filled

    def fill(self, pattern: int, stream: int | None = None) -> None:
        """Fill this rank's own memory, on the CUDA stream of that number or on the default one."""
        arguments = self._own, ctypes.c_ushort(pattern), ctypes.c_size_t(self._num_words)
        if stream is None:
            self._call("cuMemsetD16_v2", *arguments)
        else:
            self._call("cuMemsetD16Async", *arguments, ctypes.c_void_p(stream))

    def _open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return address.value

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._driver, function)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'unknown error').decode()}")
