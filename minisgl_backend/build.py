"""The composition root: from options to a running engine.

The one place that names concrete classes. Everything else is handed what it needs. What the
operator asked for is checked first (``resolve``), before anything is loaded or started.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
from torch._C._distributed_c10d import Store

from minisgl_backend.attention.base import KVScale
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.attention.paged import AttentionSetting
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.cache.kv import KVCache, NaiveCache, RadixCache
from minisgl_backend.config import EngineOptions
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.cuda_executor import CudaExecutor
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.graphs import batch_sizes
from minisgl_backend.execution.ranks import LeadingExecutor
from minisgl_backend.execution.storage import KVStorage, bytes_per_page, choose_num_pages
from minisgl_backend.models.build import build_model
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.kv_scales import read_kv_scales
from minisgl_backend.parallel.connect import connect, open_store
from minisgl_backend.parallel.group import Group, OneRank, least_free_memory
from minisgl_backend.parallel.place import Place
from minisgl_backend.resolve import Resolved, resolve
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.runtime.ports import Executor
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)

_LARGE_MEMORY = 80 * 2**30
"""Bytes of a GPU beyond which decode graphs are captured up to a batch of 256, else of 160."""

_FOLLOWER_COMMAND: Final = (sys.executable, "-m", "minisgl_backend.cli.rank")


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
    place = Place.first(options.tensor_parallel_size, options.distributed_address)
    facts = resolve(options, place)
    if place.size > 1:
        return _lead(facts)
    rank = build_rank(facts, OneRank, meet=lambda: None)
    return rank.info, rank.executor


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """One rank's part of an engine."""

    info: EngineInfo
    executor: ModelExecutor | CudaExecutor
    group: Group


def build_rank(facts: Resolved, join: Callable[[], Group], meet: Callable[[], None]) -> Rank:
    """One rank's part of the model, its pages and its executor; every rank calls it.

    ``join`` gives the group of all ranks. ``meet`` returns when every rank has called it, or raises
    where one cannot: so no rank waits in a collective for one that is not there or still loads.
    """
    meet()
    group = join()
    model = build_model(
        facts.spec,
        facts.folder,
        dtype=facts.dtype,
        device=facts.device.torch_device,
        group=group,
        load_format=facts.options.load_format,
        max_sequence_length=facts.context,
        seed=facts.options.seed or 0,
    )
    meet()
    storage = KVStorage(
        facts.shape,
        num_pages=_num_pages(facts, group),
        page_size=facts.page_size,
        dtype=facts.kv_dtype,
        device=facts.device.torch_device,
        scales=_kv_scales(facts),
    )
    executor, attention = _executor(facts, model, storage)
    meet()
    return Rank(_info(facts, attention, storage.num_pages), executor, group)


def build_follower(options: EngineOptions, place: Place, meet: Callable[[], None]) -> Rank:
    """The part of a rank other than 0, in its own process."""
    facts = resolve(options, place)
    timeout_s = options.distributed_timeout_s

    def join() -> Group:
        return _connect(facts, open_store(place, timeout_s)[1])

    return build_rank(facts, join, meet)


def _lead(facts: Resolved) -> tuple[EngineInfo, Executor]:
    """Rank 0 of several, with the processes of the others."""
    options, timeout_s = facts.options, facts.options.distributed_timeout_s
    place, store = open_store(facts.place, timeout_s)
    # what this rank has fetched and chosen goes for all
    told = replace(options, model=str(facts.folder), comm=facts.comm)
    followers = Followers(place, _FOLLOWER_COMMAND, json.dumps(asdict(told)).encode())

    groups: list[Group] = []

    def join() -> Group:
        group = _connect(facts, store)
        groups.append(group)
        followers.on_lost(lambda failure: group.leave())  # or this rank might wait for ever
        return group

    try:
        rank = build_rank(facts, join, followers.meet)
        leader = LeadingExecutor(
            rank.executor,
            rank.group,
            followers,
            timeout_s=timeout_s,
            # gloo ends collectives that wait for too long, NCCL does not
            steps_may_hang=facts.comm != "gloo",
        )
    except BaseException as error:
        report = followers.report()
        followers.close(patience_s=0)
        for group in groups:
            group.leave()
        if report is not None and not isinstance(error, ConfigError):
            raise ConfigError(report) from error
        raise
    logger.info("%d tensor-parallel ranks, processes %s", place.size, followers.pids)
    return rank.info, leader


def _connect(facts: Resolved, store: Store) -> Group:
    timeout_s = facts.options.distributed_timeout_s
    device = facts.device.torch_device
    return connect(facts.place, store, facts.comm, device, timeout_s=timeout_s)


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


def _info(facts: Resolved, attention: str, num_pages: int) -> EngineInfo:
    options, spec = facts.options, facts.spec
    return EngineInfo(
        model=options.model,
        architecture=spec.architecture,
        device=str(facts.device.torch_device),
        dtype=str(facts.dtype).removeprefix("torch."),
        attention_backend=attention,
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(sorted(spec.eos_token_ids)),
        max_sequence_length=facts.context,
        page_size=facts.page_size,
        num_pages=num_pages,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        max_queue_time_s=options.max_queue_time_s,
    )


def _executor(
    facts: Resolved, model: Decoder, storage: KVStorage
) -> tuple[ModelExecutor | CudaExecutor, str]:
    """The executor of the device, and the name of its attention backend."""
    if isinstance(facts.device, CudaDevice):
        return _cuda_executor(facts, facts.device, model, storage)
    executor = ModelExecutor(
        model,
        storage=storage,
        backend=SdpaAttention(
            facts.shape,
            page_size=facts.page_size,
            dtype=facts.dtype,
            device=facts.device.torch_device,
        ),
        device=facts.device,
        max_rows=facts.options.max_running_requests,
        max_sequence_length=facts.context,
    )
    return executor, "sdpa"


def _cuda_executor(
    facts: Resolved, device: CudaDevice, model: Decoder, storage: KVStorage
) -> tuple[CudaExecutor, str]:
    options = facts.options
    most = options.cuda_graph_max_batch_size
    if most is None:
        most = 256 if device.total_memory > _LARGE_MEMORY else 160
    most = min(most, options.max_running_requests)
    attention = choose_attention(
        options.attention_backend,
        AttentionSetting(
            shape=facts.shape,
            page_size=facts.page_size,
            max_sequence_length=facts.context,
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            max_batch_size=options.max_running_requests,
            max_captured_batch_size=most,
            device=device.torch_device,
        ),
    )
    if not attention.can_capture:
        if options.cuda_graph_max_batch_size or options.cuda_graph_batch_sizes:
            raise ConfigError(
                f"attention_backend {attention.name} cannot be captured in CUDA graphs: leave out "
                "cuda_graph_max_batch_size and cuda_graph_batch_sizes, or take another backend"
            )
        logger.warning("attention_backend %s runs without CUDA graphs", attention.name)
        most = 0
    executor = CudaExecutor(
        model,
        storage=storage,
        attention=attention,
        device=device,
        max_rows=options.max_running_requests,
        max_sequence_length=facts.context,
        max_prefill_tokens=options.max_prefill_tokens,
        graph_sizes=batch_sizes(most, options.cuda_graph_batch_sizes),
        fused_experts=options.moe_backend != "torch",
    )
    return executor, attention.name


def _kv_scales(facts: Resolved) -> tuple[KVScale, ...] | None:
    """What the checkpoint says of float8 pages, where there are such."""
    if facts.kv_dtype != torch.float8_e4m3fn or facts.options.load_format == "dummy":
        return None
    return read_kv_scales(facts.folder, facts.spec.num_layers)


def _num_pages(facts: Resolved, group: Group) -> int:
    """Pages of each rank, as many as the one with the least memory can hold."""
    device, options = facts.device, facts.options
    free_bytes, cap_bytes = least_free_memory(group, device.free_memory()), device.kv_bytes_cap
    if cap_bytes is not None:  # a CPU's memory, which the ranks of a host share
        free_bytes //= facts.place.local_size
        cap_bytes //= facts.place.local_size
    if options.num_pages is not None:
        return options.num_pages
    return choose_num_pages(
        page_bytes=bytes_per_page(facts.shape, facts.page_size, facts.kv_dtype),
        page_size=facts.page_size,
        free_bytes=free_bytes,
        memory_ratio=options.memory_ratio,
        cap_bytes=cap_bytes,
        max_rows=options.max_running_requests,
        max_sequence_length=facts.context,
    )
