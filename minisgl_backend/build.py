"""The composition root: from options to a running engine.

The one place that names concrete classes. Everything else is handed what it needs. What the
operator asked for and this build does not offer is refused here before anything is loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.cache.kv import KVCache, NaiveCache, RadixCache
from minisgl_backend.config import EngineOptions
from minisgl_backend.device.base import Device
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.cuda_executor import CudaExecutor
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.graphs import batch_sizes
from minisgl_backend.execution.storage import KVStorage, bytes_per_page, choose_num_pages
from minisgl_backend.kernels.dispatch import has_triton
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.runtime.ports import Executor
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)

_LARGE_MEMORY = 80 * 2**30
"""Bytes of a GPU beyond which decode graphs are captured up to a batch of 256, else of 160."""


def resolve_checkpoint(options: EngineOptions) -> Path:
    """The model's folder, fetched from its hub where it is an id."""
    return resolve_model(options.model, options.model_source)


def build_engine(options: EngineOptions) -> Engine:
    """Load the model and start the engine; ``ConfigError`` tells what the operator can mend."""
    info, executor = build_executor(options)
    logger.info("engine: %s", info)
    return Engine(info, build_scheduler(options, info), executor, overlap=options.overlap)


def build_executor(options: EngineOptions) -> tuple[EngineInfo, Executor]:
    """Load the model onto its device, with pages for its keys and values."""
    device = _device(options)
    _refuse_unsupported(options, device)
    folder = resolve_checkpoint(options)
    spec = load_spec(folder)
    context = _context(options, spec)
    group = OneRank()
    shape = spec.attention_shape(group.size)
    dtype = _dtype(options, device, spec)
    kv_dtype = torch.float8_e4m3fn if options.kv_cache_dtype == "fp8_e4m3" else dtype
    page_size = options.page_size or device.default_page_size
    model = build_model(
        spec,
        folder,
        dtype=dtype,
        device=device.torch_device,
        group=group,
        load_format=options.load_format,
        max_sequence_length=context,
        seed=options.seed or 0,
    )
    storage = KVStorage(
        shape,
        num_pages=_num_pages(options, shape, device, kv_dtype, page_size, context),
        page_size=page_size,
        dtype=kv_dtype,
        device=device.torch_device,
    )
    if isinstance(device, CudaDevice):
        executor, backend = _cuda_executor(options, model, shape, storage, device, context)
    else:
        backend = "sdpa"
        executor = ModelExecutor(
            model,
            storage=storage,
            backend=SdpaAttention(
                shape, page_size=page_size, dtype=dtype, device=device.torch_device
            ),
            device=device,
            max_rows=options.max_running_requests,
            max_sequence_length=context,
        )
    info = EngineInfo(
        model=options.model,
        architecture=spec.architecture,
        device=str(device.torch_device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=backend,
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(sorted(spec.eos_token_ids)),
        max_sequence_length=context,
        page_size=page_size,
        num_pages=storage.num_pages,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
    )
    return info, executor


def build_scheduler(options: EngineOptions, info: EngineInfo) -> Scheduler:
    """The planner for an engine of these facts."""
    cache_class = RadixCache if options.cache == "radix" else NaiveCache
    cache: KVCache = cache_class(info.num_pages, info.page_size)
    config = SchedulerConfig(
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens,
        max_sequence_length=info.max_sequence_length,
        page_size=info.page_size,
        num_pages=info.num_pages,
        policy=options.schedule_policy,
    )
    return Scheduler(cache, config)


def _device(options: EngineOptions) -> CpuDevice | CudaDevice:
    """The device asked for; by default a GPU where there is one and Triton for its kernels."""
    can_cuda = torch.cuda.is_available() and has_triton()
    if options.device == "cuda" and not can_cuda:
        missing = "Triton (pip install triton)" if torch.cuda.is_available() else "an NVIDIA GPU"
        raise ConfigError(f"device cuda needs {missing}")
    return CudaDevice() if can_cuda and options.device != "cpu" else CpuDevice()


def _cuda_executor(
    options: EngineOptions,
    model: Decoder,
    shape: AttentionShape,
    storage: KVStorage,
    device: CudaDevice,
    context: int,
) -> tuple[Executor, str]:
    """The executor of a GPU, and the name of its attention backend."""
    attention = choose_attention(
        options.attention_backend,
        shape,
        page_size=storage.page_size,
        kv_dtype=storage.pages.dtype,
        max_batch_size=options.max_running_requests,
        device=device.torch_device,
    )
    most = options.cuda_graph_max_batch_size
    if most is None:
        most = 256 if device.total_memory > _LARGE_MEMORY else 160
    most = min(most, options.max_running_requests)
    executor = CudaExecutor(
        model,
        storage=storage,
        attention=attention,
        device=device,
        max_rows=options.max_running_requests,
        max_sequence_length=context,
        max_prefill_tokens=options.max_prefill_tokens,
        graph_sizes=batch_sizes(most, options.cuda_graph_batch_sizes),
    )
    return executor, attention.name


def _refuse_unsupported(options: EngineOptions, device: Device) -> None:
    refused = {
        "tensor_parallel_size": options.tensor_parallel_size != 1,
        "comm": options.comm is not None,
        "distributed_address": options.distributed_address is not None,
    }
    if isinstance(device, CudaDevice):
        refused |= {
            "dtype": options.dtype == "float64",
            "moe_backend": options.moe_backend not in (None, "fused"),
        }
        where = "one GPU, in at most 32 bits, with moe_backend fused"
    else:
        refused |= {
            "kv_cache_dtype": options.kv_cache_dtype is not None,
            "attention_backend": options.attention_backend not in (None, "sdpa", "sdpa,sdpa"),
            "moe_backend": options.moe_backend not in (None, "torch"),
            "cuda_graph_max_batch_size": bool(options.cuda_graph_max_batch_size),
            "cuda_graph_batch_sizes": options.cuda_graph_batch_sizes is not None,
        }
        where = "one CPU, with attention_backend sdpa and moe_backend torch"
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"option {name}={getattr(options, name)} is not supported: this version runs on "
                + where
            )


def _dtype(options: EngineOptions, device: Device, spec: ModelSpec) -> torch.dtype:
    """Of weights and activations: that asked for, the device's own, or the checkpoint's.

    On a GPU a checkpoint of more than 16 bits is computed in bfloat16 unless asked otherwise.
    """
    name = options.dtype or device.default_dtype or spec.dtype
    if isinstance(device, CudaDevice):
        if options.dtype is None and name not in ("bfloat16", "float16"):
            name = "bfloat16"
        if spec.head_dim & (spec.head_dim - 1):
            raise ConfigError(f"head_dim {spec.head_dim} is not a power of two, as GPUs need it")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _context(options: EngineOptions, spec: ModelSpec) -> int:
    """Tokens that a request may have in all."""
    wanted, most = options.max_sequence_length, spec.context
    if wanted is not None and wanted > most:
        raise ConfigError(f"max_sequence_length {wanted} exceeds the model's context of {most}")
    return wanted or most


def _num_pages(
    options: EngineOptions,
    shape: AttentionShape,
    device: Device,
    dtype: torch.dtype,
    page_size: int,
    context: int,
) -> int:
    if options.num_pages is not None:
        return options.num_pages
    return choose_num_pages(
        page_bytes=bytes_per_page(shape, page_size, dtype),
        page_size=page_size,
        free_bytes=device.free_memory(),
        memory_ratio=options.memory_ratio,
        cap_bytes=device.kv_bytes_cap,
        max_rows=options.max_running_requests,
        max_sequence_length=context,
    )
