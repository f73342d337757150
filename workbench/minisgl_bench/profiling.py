"""Traces of what is measured: ``--profile`` writes a Chrome trace, ``--nvtx`` marks phases.

Neither costs anything where it is not asked for: a trace is made of one more run, after the figures
were taken, and marks are set by stand-ins for planner and executor (``running_engine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import click

from minisgl_backend.errors import ConfigError
from minisgl_backend.plan import Pending, SampledTokens, StepPlan, StepResult
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.runtime.ports import Executor, Scheduler
from minisgl_backend.scheduling.stats import SchedulerStats
from minisgl_bench.trace_table import report_trace

Range: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""Marks what runs inside it with a name."""

_SHOWN: int = 20

profile_option = click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="write a Chrome trace of one more run (with several batches or lengths, one of each); on"
    " a GPU also print its kernels",
)
nvtx_option = click.option(
    "--nvtx",
    is_flag=True,
    help="mark planning, launches, waits and commits; with a single rank layers, too",
)


@contextmanager
def profiled(path: Path, *, step: str | None = None) -> Iterator[None]:
    """Trace what runs inside to ``path``: a GPU's kernels, or the operations of this thread.

    On a GPU the table of ``report_trace`` is printed, and written beside the trace.
    """
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
    if torch.cuda.is_available():
        try:
            report_trace(path, top=_SHOWN, step=step).emit(labelled(path, "table"))
        except click.ClickException as error:  # must not cost the figures
            error.show()


def labelled(path: Path, label: str) -> Path:
    """The path of one trace of several: ``trace.json`` becomes ``trace-LABEL.json``."""
    return path.with_stem(f"{path.stem}-{label}")


def nvtx_range() -> Range:
    """NVTX's own; raises ``ConfigError`` where torch was built without."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--nvtx needs an NVIDIA GPU")
    return torch.cuda.nvtx.range


class MarkedScheduler:
    """A planner whose work is marked (``Scheduler``)."""

    def __init__(self, scheduler: Scheduler, mark: Range) -> None:
        self._scheduler = scheduler
        self._mark = mark

    def add(self, request: Request, generated: IntArray = EMPTY) -> None:
        self._scheduler.add(request, generated)

    def abort(self, request_id: RequestId) -> bool:
        return self._scheduler.abort(request_id)

    def plan(self) -> StepPlan | None:
        with self._mark("plan"):
            return self._scheduler.plan()

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        with self._mark(f"commit {described(plan)}"):
            return self._scheduler.commit(plan, tokens)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def renewed(self) -> Scheduler:
        return MarkedScheduler(self._scheduler.renewed(), self._mark)


class MarkedExecutor:
    """An executor whose launches and waits are marked (``Executor``)."""

    def __init__(self, executor: Executor, mark: Range) -> None:
        self._executor = executor
        self._mark = mark

    def launch(self, plan: StepPlan) -> Pending:
        with self._mark(f"launch {described(plan)}"):
            return _MarkedStep(self._executor.launch(plan), f"wait {described(plan)}", self._mark)

    def close(self) -> None:
        self._executor.close()


class _MarkedStep:
    """A launched step (``Pending``)."""

    def __init__(self, step: Pending, name: str, mark: Range) -> None:
        self._step = step
        self._name = name
        self._mark = mark

    def tokens(self) -> SampledTokens:
        with self._mark(self._name):
            return self._step.tokens()


def described(plan: StepPlan) -> str:
    """A step by what it computes, as ``decode 64`` or ``prefill 8192 + decode 3``."""
    parts = []
    if len(plan.prefill_rows):
        parts.append(f"prefill {len(plan.prefill_tokens)}")
    if len(plan.decode_rows):
        parts.append(f"decode {len(plan.decode_rows)}")
    return " + ".join(parts) or "nothing"
