"""The composition root: from options to a running engine.

The one place that names concrete classes. Everything else is handed what it needs. What the
operator asked for and this build does not offer is refused here before anything is loaded.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch._C._distributed_c10d import Store

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
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.graphs import batch_sizes
from minisgl_backend.execution.ranks import LeadingExecutor
from minisgl_backend.execution.storage import KVStorage, bytes_per_page, choose_num_pages
from minisgl_backend.kernels.dispatch import has_triton
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.connect import choose_comm, connect
from minisgl_backend.parallel.group import Group, OneRank, least_free_memory
from minisgl_backend.parallel.rendezvous import Place
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.runtime.ports import Executor
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)

_LARGE_MEMORY = 80 * 2**30
"""Bytes of a GPU beyond which decode graphs are captured up to a batch of 256, else of 160."""

_FOLLOWER_COMMAND: Final = (sys.executable, "-m", "minisgl_backend.cli.rank")


def resolve_checkpoint(options: EngineOptions) -> Path:
    """The model's folder, fetched from its hub where it is an id."""
    return resolve_model(options.model, options.model_source)


def build_engine(options: EngineOptions) -> Engine:
    """Load the model and start the engine; ``ConfigError`` tells what the operator can mend."""
    info, executor = build_executor(options)
    logger.info("engine: %s", info)
    engine = Engine(info, build_scheduler(options, info), executor, overlap=options.overlap)
    if isinstance(executor, LeadingExecutor):
        executor.on_lost(engine.fail)
    return engine


def build_executor(options: EngineOptions) -> tuple[EngineInfo, Executor]:
    """Load the model onto its devices, with pages for its keys and values.

    With tensor parallelism this process is rank 0; the executor owns the others' processes.
    """
    size = options.tensor_parallel_size
    if size > 1:
        return _lead(options, Place.first(size, options.distributed_address))
    alone = Place.first(1, None)
    built = build_rank(options, alone, meet=lambda: None)
    return built.info, built.executor


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """One rank's part of an engine."""

    info: EngineInfo
    executor: ModelExecutor | CudaExecutor
    group: Group


def build_rank(
    options: EngineOptions, place: Place, meet: Callable[[], None], store: Store | None = None
) -> Rank:
    """This rank's part of the model; all ranks call it with the same options.

    ``meet`` returns when every rank has called it, or raises where one cannot: so no rank waits in
    a collective for one that is not there or still loads. Rank 0 brings the ``store``.
    """
    device = _device(options, place)
    _refuse_unsupported(options, device)
    comm = choose_comm(options.comm, device.torch_device)
    meet()
    group = _connect(options, place, store, comm, device)
    folder = resolve_checkpoint(options)
    spec = load_spec(folder)
    context = _context(options, spec)
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
    meet()
    free_bytes = least_free_memory(group, device.free_memory())
    if isinstance(device, CpuDevice):
        free_bytes //= place.local_size  # the ranks of a host share its memory
    storage = KVStorage(
        shape,
        num_pages=_num_pages(options, shape, device, free_bytes, kv_dtype, page_size, context),
        page_size=page_size,
        dtype=kv_dtype,
        device=device.torch_device,
    )
    executor: ModelExecutor | CudaExecutor
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
    meet()
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
    return Rank(info, executor, group)


def _lead(options: EngineOptions, place: Place) -> tuple[EngineInfo, Executor]:
    """Rank 0 of several, with the processes of the others."""
    local = replace(options, model=str(resolve_checkpoint(options)))  # fetched once, for all
    timeout_s = options.distributed_timeout_s
    place, store = place.open_store(timeout_s)
    greeting = json.dumps(asdict(local)).encode()
    followers = Followers(place, _FOLLOWER_COMMAND, greeting, timeout_s)
    try:
        rank = build_rank(local, place, followers.meet, store)
        leader = LeadingExecutor(
            rank.executor,
            rank.group,
            followers,
            # gloo ends collectives that wait for too long, NCCL does not
            step_timeout_s=timeout_s if isinstance(rank.executor, CudaExecutor) else None,
        )
    except BaseException:
        followers.close(patience_s=0)
        raise
    logger.info("%d tensor-parallel ranks, processes %s", place.size, followers.pids)
    return replace(rank.info, model=options.model), leader


def _connect(
    options: EngineOptions, place: Place, store: Store | None, comm: str, device: Device
) -> Group:
    if place.size == 1:
        return OneRank()
    timeout_s = options.distributed_timeout_s
    if store is None:
        place, store = place.open_store(timeout_s)
    return connect(place, store, comm, device.torch_device, timeout_s=timeout_s)


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


def _device(options: EngineOptions, place: Place) -> CpuDevice | CudaDevice:
    """The device asked for; by default a GPU where there is one and Triton for its kernels."""
    can_cuda = torch.cuda.is_available() and has_triton()
    if options.device == "cuda" and not can_cuda:
        missing = "Triton (pip install triton)" if torch.cuda.is_available() else "an NVIDIA GPU"
        raise ConfigError(f"device cuda needs {missing}")
    if can_cuda and options.device != "cpu":
        return CudaDevice(place.local_rank)
    if place.size == 1:
        return CpuDevice()
    return CpuDevice(max(1, torch.get_num_threads() // place.local_size))


def _cuda_executor(
    options: EngineOptions,
    model: Decoder,
    shape: AttentionShape,
    storage: KVStorage,
    device: CudaDevice,
    context: int,
) -> tuple[CudaExecutor, str]:
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
    refused: dict[str, bool] = {}
    if options.tensor_parallel_size == 1:
        for name in ("comm", "distributed_address"):
            if getattr(options, name) is not None:
                raise ConfigError(f"option {name} is for tensor_parallel_size of 2 and more")
    if isinstance(device, CudaDevice):
        refused |= {
            "dtype": options.dtype == "float64",
            "moe_backend": options.moe_backend not in (None, "fused"),
        }
        where = "GPUs, in at most 32 bits, with moe_backend fused"
    else:
        refused |= {
            "kv_cache_dtype": options.kv_cache_dtype is not None,
            "attention_backend": options.attention_backend not in (None, "sdpa", "sdpa,sdpa"),
            "moe_backend": options.moe_backend not in (None, "torch"),
            "cuda_graph_max_batch_size": bool(options.cuda_graph_max_batch_size),
            "cuda_graph_batch_sizes": options.cuda_graph_batch_sizes is not None,
        }
        where = "CPUs, with attention_backend sdpa and moe_backend torch"
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
    free_bytes: int,
    dtype: torch.dtype,
    page_size: int,
    context: int,
) -> int:
    if options.num_pages is not None:
        return options.num_pages
    return choose_num_pages(
        page_bytes=bytes_per_page(shape, page_size, dtype),
        page_size=page_size,
        free_bytes=free_bytes,
        memory_ratio=options.memory_ratio,
        cap_bytes=device.kv_bytes_cap,
        max_rows=options.max_running_requests,
        max_sequence_length=context,
    )
