"""Resolves options into facts: device, dtype, model and context of one rank on this machine.

Loads nothing and starts no process, so mistakes are found at once: an option that the device or the
model does not allow raises a ``ConfigError`` that names it. ``precheck`` and ``model_check``
make the checks that need no torch; the rest are here. Must not know what depends on a loaded model,
such as the number of pages (``rank_memory``).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.config import EngineOptions
from minisgl_backend.device.base import Device
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.device.processor import LARGE_MODEL, default_dtype, has_bfloat16
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.dispatch import has_triton
from minisgl_backend.model_check import checked_spec, context_of, state_dtype_name
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.models.kernel_choice import has_hopper_kernels
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.connect import choose_comm
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.precheck import check_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """The facts of one rank. Of an EAGLE-3 layer ``options`` name the folder.

    ``shape`` counts the heads of this rank. ``context`` is the most tokens that a request may have.
    ``state_dtype`` is that of recurrent states, if there are any.
    """

    options: EngineOptions
    place: RankPlace
    device: CpuDevice | CudaDevice
    comm: str
    folder: Path
    spec: ModelSpec
    shape: AttentionShape
    context: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    state_dtype: torch.dtype

    @property
    def layer_folder(self) -> Path | None:
        """The folder of an EAGLE-3 layer, if the options name one."""
        layer_folder = self.options.speculative_mtp_model
        return None if layer_folder is None else Path(layer_folder)

    @property
    def weights_per_layer(self) -> int:
        """The rank's weights that a token is multiplied by in a layer, on average."""
        num_layers = len(self.spec.all_layers)
        return self.spec.num_active_parameters // num_layers // self.place.size


def resolve(options: EngineOptions, place: RankPlace) -> Resolved:
    """The facts of the rank at ``place``. Fetches the model's files if they are not there yet.

    Raises ``ConfigError``.
    """
    kind = device_kind(options, place.local_size)
    check_options(options, kind)
    folder = resolve_model(options.model, options.model_source)
    if options.speculative_mtp_model is not None:
        layer_folder = resolve_model(options.speculative_mtp_model, options.model_source)
        options = replace(options, speculative_mtp_model=str(layer_folder))
    spec = checked_spec(options, folder, kind)
    device = (
        CudaDevice(place.local_rank)
        if kind == "cuda"
        else CpuDevice(num_cpu_threads(place, spec.num_parameters))
    )
    comm = choose_comm(options.comm, device.torch_device, place)
    dtype = dtype_of(options, device, spec)
    if place.rank == 0:
        _warn_of_slow_dtype(dtype, options, device, spec)
    return Resolved(
        options=options,
        place=place,
        device=device,
        comm=comm,
        folder=folder,
        spec=spec,
        shape=spec.attention_shape(place.size).for_context(context_of(options, spec)),
        context=context_of(options, spec),
        dtype=dtype,
        kv_dtype=dtype if options.kv_cache_dtype is None else torch.float8_e4m3fn,
        state_dtype=getattr(torch, state_dtype_name(options, spec)),
    )


def device_kind(options: EngineOptions, num_ranks: int) -> str:
    """The kind of device, ``cuda`` or ``cpu``, for ``num_ranks`` ranks on this host: the option's,
    or by default ``cuda`` if there is a GPU and Triton to compile kernels. Raises ``ConfigError``.
    """
    can_cuda = torch.cuda.is_available() and has_triton()
    if options.device == "cuda" and not can_cuda:
        missing = "Triton (pip install triton)" if torch.cuda.is_available() else "an NVIDIA GPU"
        raise ConfigError(f"device cuda needs {missing}")
    if can_cuda and options.device != "cpu":
        num_gpus = torch.cuda.device_count()
        if num_ranks > num_gpus:
            raise ConfigError(f"{num_ranks} ranks need a GPU each, and there are {num_gpus}")
        return "cuda"
    return "cpu"


def num_cpu_threads(place: RankPlace, num_weights: int) -> int:
    """Number of CPU threads that compute a rank's steps.

    A single rank leaves one core for planning, tokenizing and sending. Otherwise, on two cores,
    these would compete with the second compute thread, for which the first waits in every
    operation: short steps took 1.5 times as long. Only the steps of large models gain from all
    cores. If the variable OMP_NUM_THREADS is set, all threads that it allows are used.
    """
    num_threads = torch.get_num_threads()
    if place.size > 1:
        return max(1, num_threads // place.local_size)
    if "OMP_NUM_THREADS" in os.environ or num_weights >= LARGE_MODEL:
        return num_threads
    return max(1, num_threads - 1)


def dtype_of(options: EngineOptions, device: Device, spec: ModelSpec) -> torch.dtype:
    """The type of weights and activations: the option's, or a default for device and checkpoint.

    The default on a GPU is the checkpoint's type, or bfloat16 if that has more than 16 bits. It is
    also bfloat16 if weights are quantized and there are kernels for these: most checkpoints in four
    bits say float16, for which there are none.
    """
    if options.dtype is not None:
        name = options.dtype
    elif device.is_host:
        name = default_dtype(spec.dtype, spec.num_parameters)
    else:
        keeps = spec.dtype == "float16" and not _is_bfloat16_needed(options, device, spec)
        name = "float16" if keeps else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _is_bfloat16_needed(options: EngineOptions, device: Device, spec: ModelSpec) -> bool:
    """Whether weights are quantized, and the GPU has kernels for these in bfloat16 alone."""
    is_quantized = spec.weights is not None or options.quantization is not None
    return is_quantized and has_hopper_kernels(device.torch_device, torch.bfloat16)


def _warn_of_slow_dtype(
    dtype: torch.dtype, options: EngineOptions, device: Device, spec: ModelSpec
) -> None:
    if not device.is_host:
        if dtype == torch.float16 and _is_bfloat16_needed(options, device, spec):
            logger.warning(
                "dtype=float16: the kernels for quantized weights take bfloat16 alone; "
                "steps of few tokens take several times as long"
            )
        return
    if dtype.itemsize == 2 and not has_bfloat16():
        logger.warning(
            "dtype=%s on a processor without AVX512-BF16 or AMX: a prompt can take minutes; "
            "dtype=float32 is many times faster here",
            str(dtype).removeprefix("torch."),
        )
