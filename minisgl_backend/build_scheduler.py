"""The planner of an engine, from options and what is known about its model.

Chooses the concrete classes of the planner. Must not know tensors: an engine with a fake model is
built without PyTorch.
"""

from __future__ import annotations

from typing import Final

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.host_windows import HostWindows
from minisgl_backend.cache.kv import KVCache
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.cache.tree_watch import TreeWatch
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.config import EngineOptions
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.runtime.ports import Scheduler
from minisgl_backend.scheduling.scheduler import SchedulerConfig

_OVERTAKEN_BY_LPM: Final = 64
_OVERTAKEN_ON_CPU: Final = 256
_OVERTAKEN_ON_GPU: Final = 1024
_GROUP_COST_ON_CPU: Final = 64
_GROUP_COST_ON_GPU: Final = 128


def build_scheduler(
    options: EngineOptions,
    info: EngineInfo,
    parts: Parts = STANDARD,
    *,
    watch: TreeWatch | None = None,
    host_watch: TreeWatch | None = None,
) -> Scheduler:
    """The planner for an engine with this model and this number of pages. ``watch`` follows its
    prefix cache, ``host_watch`` the prefixes in main memory."""
    cache: KVCache
    windows = None
    if info.num_window_pages is not None and info.window is not None:
        windows = WindowPages(
            info.num_window_pages,
            num_pages=info.num_pages,
            page_size=info.page_size,
            window=info.window,
        )
    host = None
    if info.num_host_slots:
        of_windows = None
        if windows is not None:
            of_windows = HostWindows(
                info.num_window_slots, num_slots=info.num_host_slots, span=windows.span
            )
        host = HostCache(
            info.num_host_slots,
            info.page_size,
            num_state_slots=None if info.num_snapshots is None else info.num_state_slots,
            windows=of_windows,
            watch=host_watch,
        )
    if options.cache == "naive":
        cache = NaiveCache(info.num_pages, info.page_size, windows=windows)
    elif info.num_snapshots is None:
        cache = RadixCache(info.num_pages, info.page_size, watch=watch, windows=windows, host=host)
    else:
        cache = SnapshotCache(
            info.num_pages, info.page_size, info.num_snapshots, watch=watch, host=host
        )
    on_cpu = info.device == "cpu"
    config = SchedulerConfig(
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens,
        policy=options.schedule_policy,
        max_overtaken=_max_overtaken(options, info),
        names_groups=info.reads_groups,
        group_cost_tokens=_GROUP_COST_ON_CPU if on_cpu else _GROUP_COST_ON_GPU,
        has_states=info.num_snapshots is not None,
        section=info.section,
        num_adapter_slots=options.max_loras if options.enable_lora else 0,
        speculative_tokens=options.speculative_tokens,
        mtp_tokens=options.speculative_mtp_tokens,
        speculative_max_requests=options.speculative_max_requests,
        speculative_recent_tokens=options.speculative_recent_tokens,
    )
    return parts.scheduler(cache, config)


def _max_overtaken(options: EngineOptions, info: EngineInfo) -> int:
    """The option, or what suits the cache, the policy and the device."""
    if options.max_overtaken is not None:
        return options.max_overtaken
    if options.cache == "naive":
        return 0  # overtaking gains nothing
    if options.schedule_policy == "lpm":
        return _OVERTAKEN_BY_LPM
    if info.device == "cpu":
        return _OVERTAKEN_ON_CPU
    return _OVERTAKEN_ON_GPU if info.reads_groups else 0
