"""Engines of a benchmark's own, in this process, one after the other.

Knows how to start and end one; must not know what is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from minisgl_backend.bench.profiling import MarkedExecutor, MarkedScheduler, nvtx_range
from minisgl_backend.config import EngineOptions
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.ports import Executor


@contextmanager
def running_engine(
    options: EngineOptions, *, nvtx: bool = False
) -> Iterator[tuple[Engine, Executor]]:
    """An engine and its executor for as long as the block lasts; ``nvtx`` marks its phases."""
    import torch

    from minisgl_backend.build import build_executor, build_scheduler
    from minisgl_backend.execution.cuda_executor import CudaExecutor
    from minisgl_backend.execution.ranks import LeadingExecutor

    if torch.cuda.is_available():  # what an engine before this one held
        gc.collect()
        torch.cuda.empty_cache()
    mark = nvtx_range() if nvtx else None
    info, executor = build_executor(options)
    scheduler = build_scheduler(options, info)
    if mark is None:
        engine = Engine(info, scheduler, executor, overlap=options.overlap)
    else:
        if isinstance(executor, CudaExecutor):
            executor.mark_layers(mark)
        engine = Engine(
            info,
            MarkedScheduler(scheduler, mark),
            MarkedExecutor(executor, mark),
            overlap=options.overlap,
        )
    if isinstance(executor, LeadingExecutor):
        executor.on_lost(engine.fail)
    try:
        yield engine, executor
    finally:
        engine.close(drain_s=0)
