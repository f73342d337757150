"""Profiles of measured runs: ``--profile`` writes a Chrome trace, ``--nvtx`` marks phases.

Neither affects the figures unless asked for: a trace is of one more run, after the figures were
taken, and marks are set by wrappers of planner and executor (``running_engine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from minisgl_backend.errors import ConfigError
from minisgl_backend.plan import Pending, SampledTokens, StepPlan
from minisgl_backend.runtime import ports
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_bench.trace_table import report_trace
from minisgl_kit.report import writable
from minisgl_kit.wrappers import ExecutorWrapper, PendingWrapper, SchedulerWrapper

if TYPE_CHECKING:
    from minisgl_backend.execution.ranks import RankExecutor
    from minisgl_backend.parts import Parts

Range: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""Makes a context that marks what runs inside it with a name."""

_SHOWN: Final = 20

profile_option = click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    help="write a Chrome trace of one more run (with several batches or lengths, one of each); on"
    " a GPU also print its kernels",
)
nvtx_option = click.option(
    "--nvtx",
    is_flag=True,
    help="mark planning, launches, waits and commits, and in steps that are not captured layers and"
    " sampling",
)


@contextmanager
def profiled(path: Path, *, step: str | None = None) -> Iterator[None]:
    """Trace the block to ``path``: a GPU's kernels, or the operations of all threads.

    On a GPU the table of ``report_trace`` is printed, and written next to the trace.
    """
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    # on a CPU an engine computes on a thread of its own
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=kinds, experimental_config=threads) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
    if torch.cuda.is_available():
        try:
            report_trace(path, top=_SHOWN, step=step).emit(labelled(path, "table"))
        except click.ClickException as error:  # must not lose the figures
            error.show()


def labelled(path: Path, label: str) -> Path:
    """The path of one trace of several: ``trace.json`` becomes ``trace-LABEL.json``."""
    return path.with_stem(f"{path.stem}-{label}")


def nvtx_range() -> Range:
    """NVTX's ranges; raises ``ConfigError`` without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--nvtx needs an NVIDIA GPU")
    return torch.cuda.nvtx.range


def marked(mark: Range) -> Parts:
    """The parts of an engine whose planner and steps are marked; in steps that are not captured, so
    are layers and sampling."""
    from minisgl_backend.execution.executor import ModelExecutor
    from minisgl_backend.parts import Parts

    def executor(of_rank: RankExecutor) -> RankExecutor:
        if isinstance(of_rank, ModelExecutor):
            of_rank.mark(mark)
        return MarkedExecutor(of_rank, mark)

    return Parts(
        scheduler=lambda cache, config: MarkedScheduler(Scheduler(cache, config), mark),
        executor=executor,
    )


class MarkedScheduler(SchedulerWrapper):
    """A planner whose work is marked."""

    def __init__(self, scheduler: ports.Scheduler, mark: Range) -> None:
        super().__init__(scheduler)
        self._mark = mark

    def plan(self, lookahead: Lookahead | None = None) -> StepPlan | None:
        with self._mark("plan"):
            return super().plan(lookahead)

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        with self._mark(f"commit {described(plan)}"):
            return super().commit(plan, tokens)


class MarkedExecutor(ExecutorWrapper):
    """An executor whose launches and waits are marked."""

    def __init__(self, executor: RankExecutor, mark: Range) -> None:
        super().__init__(executor)
        self._mark = mark

    def launch(self, plan: StepPlan) -> Pending:
        with self._mark(f"launch {described(plan)}"):
            return _MarkedStep(super().launch(plan), f"wait {described(plan)}", self._mark)


class _MarkedStep(PendingWrapper):
    """A launched step whose wait is marked."""

    def __init__(self, step: Pending, name: str, mark: Range) -> None:
        super().__init__(step)
        self._name = name
        self._mark = mark

    def tokens(self) -> SampledTokens:
        with self._mark(self._name):
            return super().tokens()


def described(plan: StepPlan) -> str:
    """A step by what it computes, as ``decode 64`` or ``prefill 8192 + decode 3``."""
    counts = {
        "prefill": len(plan.chunks.tokens),
        "check": len(plan.checks.tokens),
        "decode": len(plan.decodes.rows),
    }
    return " + ".join(f"{what} {count}" for what, count in counts.items() if count) or "nothing"
