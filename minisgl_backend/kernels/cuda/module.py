"""Compiles a CUDA C++ source of this package for a GPU, once, and launches its kernels.

The compiler is NVRTC, a library that comes with torch: no CUDA toolkit is needed. Machine code is
kept (``code_cache``) under a hash of source, headers, options and compiler.

Must not know what kernels compute.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.cuda.code_cache import kept


class CudaModule:
    """A source, compiled with constants for one GPU.

    ``source`` names a file beside this one, which may include the headers (.cuh) next to it;
    ``constants`` are its macros. Raises ``ConfigError`` if it does not compile or load.
    """

    def __init__(self, source: str, constants: Mapping[str, int], device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            binary = _machine_code(Path(__file__).with_name(source), constants, device)
            self._module = checked(driver.cuModuleLoadData(binary))

    def kernel(self, name: str, *, shared_bytes: int, most_shared: bool = False) -> CudaKernel:
        """One of its kernels, with ``shared_bytes`` of dynamic shared memory. ``most_shared``: a
        multiprocessor that runs it has the most shared memory it can have, and less L1 cache."""
        with torch.cuda.device(self._device):
            function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
            if most_shared:
                kinds = driver.CUfunction_attribute
                carveout = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                checked(driver.cuFuncSetAttribute(function, carveout, 100))
        return CudaKernel(function, self._device, shared_bytes)


class CudaKernel:
    """A kernel of a loaded module."""

    def __init__(self, function: Any, device: torch.device, shared_bytes: int) -> None:
        self._function = function
        self._device = device
        self._shared_bytes = shared_bytes

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        *,
        cluster: tuple[int, int, int] = (1, 1, 1),
        pdl: bool = False,
    ) -> None:
        """Enqueue it on the device's current stream. Its only parameter is ``arguments``, by value.

        ``cluster``: the number of neighbouring thread blocks that run together. ``pdl``: it may
        start before its predecessor ends, and then waits for it itself.
        """
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        attributes = []
        if cluster != (1, 1, 1):
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = together.value.clusterDim
            size.x, size.y, size.z = cluster
            attributes.append(together)
        if pdl:
            early = driver.CUlaunchAttribute()
            early.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config.attrs, config.numAttrs = attributes, len(attributes)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0))


def _machine_code(source: Path, constants: Mapping[str, int], device: torch.device) -> bytes:
    """The compiled source, from the cache if it is there."""
    major, minor = torch.cuda.get_device_capability(device)
    # "a": with the instructions that only this architecture has
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", "-default-device"]
    options += [f"-D{name}={int(value)}" for name, value in sorted(constants.items())]
    text = source.read_bytes()
    headers = {path.name: path.read_bytes() for path in sorted(source.parent.glob("*.cuh"))}
    version = checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((text, headers, options, version)).encode()).hexdigest()
    name = f"{source.stem}-{key[:32]}.cubin"
    return kept(name, lambda: _compile(text, source.name, headers, options))


def _compile(text: bytes, name: str, headers: Mapping[str, bytes], options: list[str]) -> bytes:
    names = [header.encode() for header in headers]
    program = checked(
        nvrtc.nvrtcCreateProgram(text, name.encode(), len(names), list(headers.values()), names)
    )
    encoded = [option.encode() for option in options]
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise ConfigError(f"{name} does not compile: {log.decode(errors='replace').strip()}")
        binary: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        checked(nvrtc.nvrtcDestroyProgram(program))
    return binary


def checked(returned: tuple[Any, ...]) -> Any:
    """The value that a call of ``cuda.bindings`` returned after its status."""
    status, *values = returned
    if int(status):
        raise ConfigError(f"CUDA says {status.name} ({int(status)})")
    return values[0] if values else None


def address(tensor: Tensor | None) -> int | None:
    """A tensor's address as a kernel argument; None is the null pointer."""
    return None if tensor is None else tensor.data_ptr()


class TensorMap(ctypes.Structure):
    """The TMA's description of a tensor, as a kernel takes it (``tensor_map``)."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(
    tensor: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> TensorMap:
    """The TMA's map of a tensor of bfloat16 or of bytes. ``shape`` starts from the innermost
    dimension, ``strides`` are those of the other dimensions; both are in elements.

    Elements outside are read as zeros. The rows of a box, of 128 or 64 bytes, are swizzled for the
    tensor cores and for ``ldmatrix``.
    """
    item = tensor.element_size()
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle

    def longs(values: Sequence[int]) -> list[Any]:
        return [driver.cuuint64_t(value) for value in values]

    def ints(values: Sequence[int]) -> list[Any]:
        return [driver.cuuint32_t(value) for value in values]

    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if item == 2
            else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(shape),
            tensor.data_ptr(),
            longs(shape),
            longs([item * stride for stride in strides]),
            ints(box),
            ints([1] * len(shape)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B
            if box[0] * item == 128
            else swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap((ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque)))
