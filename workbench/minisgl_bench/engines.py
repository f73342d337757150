"""A benchmark's own engines, in this process: how to start, ask and describe one.

Must not know what is measured. Imports torch only when an engine is started, for which the help of
benchmarks need not wait.
"""

from __future__ import annotations

import gc
import importlib.metadata
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl_backend.cli.interrupt import ended_by_ctrl_c
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, MiniSGLError
from minisgl_backend.request import (
    Adapter,
    Admitted,
    Event,
    Failed,
    Finished,
    Generated,
    IntArray,
    PromptLogprobs,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineBase, EngineInfo
from minisgl_backend.server.options import options_as_text
from minisgl_bench.profiling import marked, nvtx_range

if TYPE_CHECKING:
    from minisgl_backend.execution.ranks import RankExecutor
    from minisgl_backend.parts import Parts


@contextmanager
def running_engine(
    options: EngineOptions, *, nvtx: bool = False, parts: Parts | None = None
) -> Iterator[tuple[Engine, RankExecutor]]:
    """An engine and the executor of its rank 0, closed when the block ends.

    ``parts`` by default are the standard ones; ``nvtx`` marks their phases instead. Raises
    ``ConfigError`` if ``options`` ask for several replicas.
    """
    with ended_by_ctrl_c():
        import torch

        from minisgl_backend.build import build_engine_alone
        from minisgl_backend.parts import STANDARD

    if options.data_parallel_size > 1:
        raise ConfigError("option data_parallel_size: this looks into one engine")
    if torch.cuda.is_available():  # free the memory of an engine before this one
        gc.collect()
        torch.cuda.empty_cache()
    made = marked(nvtx_range()) if nvtx else parts or STANDARD
    built: list[RankExecutor] = []

    def executor(of_rank: RankExecutor) -> RankExecutor:
        built.append(of_rank)
        return made.executor(of_rank)

    engine = build_engine_alone(options, replace(made, executor=executor))
    try:
        yield engine, built[0]
    finally:
        engine.close(drain_s=0)


def check_batches(sizes: Sequence[int], options: EngineOptions) -> None:
    """Raise ``ConfigError`` if the engine would not decode the largest of these batches at once."""
    if max(sizes) > options.max_running_requests:
        raise ConfigError(f"a batch of {max(sizes)} needs max_running_requests of as many")


@contextmanager
def running_engine_or_replicas(
    options: EngineOptions, *, nvtx: bool = False, traced: bool = False
) -> Iterator[EngineBase]:
    """One engine, or the replicas that ``options`` ask for; closed when the block ends. Replicas
    are other processes, which can be neither marked nor ``traced`` here."""
    with ended_by_ctrl_c():
        from minisgl_backend.build import build_engine

    if options.data_parallel_size == 1 or nvtx or traced:
        with running_engine(options, nvtx=nvtx) as (engine, _):
            yield engine
        return
    replicas = build_engine(options)
    try:
        yield replicas
    finally:
        replicas.close(drain_s=0)


@dataclass(slots=True)
class Collector:
    """The sink of one request: its tokens, and when they came, by ``time.perf_counter``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: MiniSGLError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    sent_s: float = field(default_factory=time.perf_counter)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Generated):
            self.times_s.append(time.perf_counter())
            self.tokens.append(event.token_id)
            self.logprobs.append(event.logprobs)
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs.append(event)
        elif isinstance(event, Admitted):
            self.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Failed):
            self.error = event.error
            self.done.set()
        elif isinstance(event, Finished):
            self.done.set()

    def wait(self) -> None:
        """Wait until the request has ended; raises its error if it failed."""
        self.done.wait()
        if self.error is not None:
            raise self.error


def submitted(
    engine: EngineBase, prompt: IntArray, sampling: SamplingParams, adapter: Adapter | None = None
) -> Collector:
    """Submit a request; returns its sink."""
    sink = Collector()
    request = Request(id=engine.new_id(), prompt=prompt, sampling=sampling, adapter=adapter)
    engine.submit(request, sink)
    return sink


_PACKAGES: Final = {
    "minisgl": "minisgl-triton",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
    "cuda_bindings": "cuda-bindings",
    "numpy": "numpy",
}
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def engine_facts(info: EngineInfo, options: EngineOptions) -> dict[str, Any]:
    """Facts about the engine and its packages, for the ``info`` of a report. Call this while the
    engine runs."""
    import torch

    given = {**options_as_text(options), "model": Path(info.model).name}
    facts: dict[str, Any] = {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "attention": info.attention_backend,
        "page_size": info.page_size,
        "pages": info.num_pages,
        "options": " ".join(f"{name}={value}" for name, value in given.items()),
        "torch": torch.__version__,
    }
    for name, distribution in _PACKAGES.items():
        try:
            facts[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if info.device.startswith("cuda"):
        facts |= _gpu_facts(options)
    if options.tensor_parallel_size > 1:
        facts["ranks"] = options.tensor_parallel_size
    return facts


def _gpu_facts(options: EngineOptions) -> dict[str, Any]:
    """Facts about this host's GPUs of all ranks and replicas, with the memory used on each by all
    processes."""
    import torch

    ranks = options.tensor_parallel_size
    num_gpus = options.data_parallel_size * ranks // (options.nnodes or 1)
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    if _DRIVER.exists() and (found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER.read_text())):
        facts["driver"] = found.group()
    if num_gpus > 1:
        facts["gpus"] = ", ".join(map(torch.cuda.get_device_name, range(num_gpus)))
    if ranks > 1:
        nccl: Any = torch.cuda.nccl
        facts["nccl"] = ".".join(map(str, nccl.version()))
    try:
        taken = [torch.cuda.device_memory_used(index) / 2**30 for index in range(num_gpus)]
    except (ModuleNotFoundError, RuntimeError):  # needs NVIDIA's management library
        return facts
    return {**facts, "gpu_memory_gib": ", ".join(f"{gib:.1f}" for gib in taken)}
