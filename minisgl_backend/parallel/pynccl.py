"""NCCL by its C interface, without PyTorch in between: a call is one launch on the current stream.

So launches are cheap, and CUDA graphs capture collectives like any kernel. The ranks get the
communicator's id through their group for tensors in main memory.

Sums of a few MB go through a buffer that is registered with NCCL as symmetric memory. NCCL's
kernels then reach the other GPUs' buffers directly, which more than pays for copying in and out.
The buffer is used only by ranks on one host, and only if NCCL_NVLS_ENABLE is 0, since otherwise
NCCL would set up NVLink multicast for it.

The communicator belongs to one GPU. All calls but ``leave`` come from the threads that launch on
that GPU. The communicator is aborted, not destroyed, since destroying waits for other ranks.
Must not know what is summed or sent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.parallel.group import FusedSum, Group
from minisgl_backend.parallel.leaving import Leaving
from minisgl_backend.parallel.torch_group import keep_multicast_off

logger = logging.getLogger(__name__)

ID_BYTES: Final = 128
_SUM: Final = 0
_DTYPES: Final = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""``ncclDataType_t`` of nccl.h."""
_LIBRARY: Final = "libnccl.so.2"
_SYMMETRIC: Final = 1
"""``NCCL_WIN_COLL_SYMMETRIC`` of nccl.h."""
_LEAST_REGISTERED: Final = 2**20
_MOST_REGISTERED: Final = 2**24
"""The most bytes of a sum that takes the registered buffer."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class Nccl:
    """The functions of libnccl that are needed. A call that fails raises ``RuntimeError``."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        number = ctypes.c_int
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetErrorString.argtypes = [number]
        library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
        library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        library.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
        library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        library.ncclCommAbort.argtypes = [pointer]

    def new_id(self) -> bytes:
        """The id of a new communicator."""
        unique = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def connect(self, name: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """The communicator of that id on the current GPU. Waits for all ranks."""
        communicator = ctypes.c_void_p()
        unique = _UniqueId.from_buffer_copy(name)
        self.call("ncclCommInitRank", ctypes.byref(communicator), size, unique, rank)
        return communicator

    def allocate(self, num_bytes: int) -> int:
        """The address of GPU memory that can be registered."""
        address = ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        return address.value

    def register(self, communicator: ctypes.c_void_p, buffer: Tensor) -> None:
        """Make a buffer of each rank symmetric memory, all of equal size. Waits for all ranks."""
        address, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes)
        window = ctypes.byref(ctypes.c_void_p())  # only needed to undo this, as the abort does too
        self.call("ncclCommWindowRegister", communicator, address, size, window, _SYMMETRIC)

    def call(self, function: str, *arguments: object) -> None:
        """Call a function that returns an ``ncclResult_t``."""
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            text = self._library.ncclGetErrorString(result).decode()
            raise RuntimeError(f"{function}: {text}")


class PyNcclGroup:
    """A group with its own NCCL communicator, on the current GPU."""

    fused: FusedSum | None = None

    def __init__(self, nccl: Nccl, host: Group, stream: Callable[[], int]):
        """``host`` is the group of the same ranks for tensors in main memory. ``stream`` returns
        the CUDA stream on which a collective is to run."""
        self.rank, self.size = host.rank, host.size
        self._nccl = nccl
        self._host = host
        self._stream = stream
        self._leaving = Leaving(self._abort)
        name = torch.zeros(ID_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            name = torch.frombuffer(bytearray(nccl.new_id()), dtype=torch.uint8)
        name = host.broadcast(name)
        self._communicator = nccl.connect(name.numpy().tobytes(), self.rank, self.size)
        self._buffer: Tensor | None = None

    def register_buffer(self, allocate: Callable[[int], Tensor]) -> None:
        """Sum through registered memory from now on, if all ranks can. Every rank calls it.

        ``allocate`` returns uint8 [num_bytes] from ``Nccl.allocate``, which live as long as the
        process.
        """
        buffers: list[Tensor] = []
        steps: tuple[Callable[[], None], ...] = (
            lambda: buffers.append(allocate(_MOST_REGISTERED)),
            lambda: self._nccl.register(self._communicator, buffers[0]),
        )
        for step in steps:
            cause = "another rank has none"
            try:
                step()
                can = 1
            except (AttributeError, RuntimeError) as error:  # an old library lacks the functions
                can, cause = 0, str(error)
            if not min(self.least([can])):
                logger.warning("sums without registered memory: %s", cause)
                return
        (self._buffer,) = buffers

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        if self._buffer is None or not _LEAST_REGISTERED <= x.nbytes <= len(self._buffer):
            self._sum(x)
            return x
        registered = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        self._sum(registered.copy_(x))
        return x.copy_(registered)

    def _sum(self, x: Tensor) -> None:
        data = x.data_ptr()
        self._launch("ncclAllReduce", data, data, x.numel(), _DTYPES[x.dtype], _SUM)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        self._launch("ncclAllGather", x.data_ptr(), parts.data_ptr(), x.numel(), _DTYPES[x.dtype])
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        data, root = x.data_ptr(), 0
        self._launch("ncclBroadcast", data, data, x.numel(), _DTYPES[x.dtype], root)
        return x

    def least(self, numbers: Sequence[int]) -> list[int]:
        return self._host.least(numbers)

    def leave(self, *, patience_s: float = 0.0) -> None:
        self._leaving.begin(patience_s)

    def _abort(self) -> None:
        self._nccl.call("ncclCommAbort", self._communicator)

    def _launch(self, function: str, *arguments: int) -> None:
        if self._leaving.has_begun:
            raise EngineFailure("the ranks have parted")
        try:
            self._nccl.call(function, *arguments, self._communicator, self._stream())
        except RuntimeError as error:
            raise EngineFailure(f"a rank is lost: {error}") from error


def pynccl_group(host: Group, device: torch.device, *, is_one_host: bool) -> PyNcclGroup:
    """The group of the ranks of ``host`` for tensors on their GPUs. Raises ``ConfigError`` without
    libnccl."""
    keep_multicast_off()
    nccl = Nccl(load_nccl())
    with torch.cuda.device(device):
        group = PyNcclGroup(nccl, host, lambda: int(torch.cuda.current_stream(device).cuda_stream))
        if is_one_host and os.environ["NCCL_NVLS_ENABLE"] == "0":
            group.register_buffer(
                lambda size: torch.as_tensor(_Memory(nccl.allocate(size), size), device=device)
            )
    return group


class _Memory:
    """GPU memory at an address, in the form that PyTorch and others take."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def load_nccl() -> ctypes.CDLL:
    """The libnccl that came with PyTorch, otherwise the system's."""
    folders: list[str] = []
    if importlib.util.find_spec("nvidia") is not None:
        spec = importlib.util.find_spec("nvidia.nccl")
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for name in (*(f"{folder}/lib/{_LIBRARY}" for folder in folders), _LIBRARY):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(f"comm=pynccl needs {_LIBRARY}: pip install nvidia-nccl-cu12 (or -cu13)")
