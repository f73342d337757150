"""The composition root: from options to a running engine.

The one place that names concrete classes. Everything else is handed what it needs. What the
operator asked for and this build does not offer is refused here before anything is loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.cache.kv import KVCache, NaiveCache, RadixCache
from minisgl_backend.config import EngineOptions
from minisgl_backend.device.base import Device
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.storage import KVStorage, bytes_per_page, choose_num_pages
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)


def resolve_checkpoint(options: EngineOptions) -> Path:
    """The model's folder, fetched from its hub where it is an id."""
    return resolve_model(options.model, options.model_source)


def build_engine(options: EngineOptions) -> Engine:
    """Load the model and start the engine; ``ConfigError`` tells what the operator can mend."""
    _refuse_unsupported(options)
    folder = resolve_checkpoint(options)
    spec = load_spec(folder)
    context = _context(options, spec)
    group = OneRank()
    shape = spec.attention_shape(group.size)
    device = CpuDevice()
    dtype = getattr(torch, options.dtype or device.default_dtype or spec.dtype)
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
    num_pages = _num_pages(options, shape, device, dtype, page_size, context)
    info = EngineInfo(
        model=options.model,
        architecture=spec.architecture,
        device=str(device.torch_device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend="sdpa",
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(sorted(spec.eos_token_ids)),
        max_sequence_length=context,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
    )
    executor = ModelExecutor(
        model,
        storage=KVStorage(
            shape,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            device=device.torch_device,
        ),
        backend=SdpaAttention(shape, page_size=page_size, dtype=dtype, device=device.torch_device),
        device=device,
        max_rows=options.max_running_requests,
        max_sequence_length=context,
    )
    logger.info("engine: %s", info)
    return Engine(info, build_scheduler(options, info), executor, overlap=options.overlap)


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


def _refuse_unsupported(options: EngineOptions) -> None:
    refused = {
        "device": options.device not in (None, "cpu"),
        "kv_cache_dtype": options.kv_cache_dtype is not None,
        "attention_backend": options.attention_backend not in (None, "sdpa", "sdpa,sdpa"),
        "moe_backend": options.moe_backend not in (None, "torch"),
        "cuda_graph_max_batch_size": bool(options.cuda_graph_max_batch_size),
        "cuda_graph_batch_sizes": options.cuda_graph_batch_sizes is not None,
        "tensor_parallel_size": options.tensor_parallel_size != 1,
        "comm": options.comm is not None,
        "distributed_address": options.distributed_address is not None,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"option {name}={getattr(options, name)} is not supported: this version runs on "
                "one CPU, with attention_backend sdpa and moe_backend torch"
            )


def _context(options: EngineOptions, spec: ModelSpec) -> int:
    """Tokens that a request may have in all."""
    wanted, most = options.max_sequence_length, spec.max_position_embeddings
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
