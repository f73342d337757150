"""`minisgl bench kernels`: kernels compared with the bandwidth bound, a twin or a library.

Times are of one call inside a CUDA graph of many calls that rotate through enough buffers to keep
their data out of the L2 cache: the median of several replays, divided by the number of calls. The
bound is the bytes that must move (weights and KV once, activations if they matter) over the rate
that a large copy reaches on this GPU. A kernel that hardly writes may exceed it a little, since
memory is read faster than it is copied. With many rows per expert, arithmetic is the bound instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.dispatch import has_triton
from minisgl_backend.kernels.small_batch import MAX_TOKENS
from minisgl_bench.kernel_adapters import adapter_cases
from minisgl_bench.kernel_attention import attention_cases, layer_cases
from minisgl_bench.kernel_cases import (
    ATTENTION_MODELS,
    MODELS,
    Call,
    Case,
    elementwise_cases,
    linear_cases,
    quantized_cases,
    sampling_cases,
)
from minisgl_bench.kernel_experts import EXPERT_MODELS, expert_cases
from minisgl_bench.kernel_indexer import INDEXERS, indexer_cases
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option

_ALL_MODELS: Final = [*MODELS, *ATTENTION_MODELS, *EXPERT_MODELS, *INDEXERS]
_WARM_UPS: Final = 2
_REPEATS: Final = 15
_SIZES_HELP: Final = "[default: 1 8 64 256, of experts also 1024 4096, of indexers 1 64 2048]"
_CONTEXT_HELP: Final = "positions a row attends to  [default: 1024, of indexers 4096 and 32768]"


def time_us(calls: Sequence[Call]) -> float:
    """Median microseconds of one call, all captured in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are made there
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(_WARM_UPS + _REPEATS):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return float(statistics.median(times[_WARM_UPS:]) * 1e3 / len(calls))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy within the GPU's memory."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(2 * source.numel() / (statistics.median(times) * 1e-3))


def cases(model: str, batch_size: int, context: int) -> Iterator[Case]:
    """All lines of one model and batch size; of some models only experts, attention or indexers."""
    if model in INDEXERS:
        yield from indexer_cases(INDEXERS[model], batch_size, context)
        return
    if model in EXPERT_MODELS:
        yield from expert_cases(model, batch_size)
        return
    if model in ATTENTION_MODELS:
        yield from attention_cases(ATTENTION_MODELS[model], batch_size, context)
        return
    shape = MODELS[model]
    yield from linear_cases(shape, batch_size)
    yield from quantized_cases(shape, batch_size)
    yield from elementwise_cases(shape, batch_size)
    yield from adapter_cases(shape, batch_size)
    yield from attention_cases(shape, batch_size, context)
    if batch_size <= MAX_TOKENS:
        yield from layer_cases(shape, batch_size, context)
    if model == "qwen3-0.6b":
        yield from sampling_cases(shape, batch_size)


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(_ALL_MODELS))
@click.option("--batch-size", "batch_sizes", multiple=True, type=POSITIVE_INT, help=_SIZES_HELP)
@click.option("--context", type=POSITIVE_INT, help=_CONTEXT_HELP)
@click.option("--only", help="kernels whose names contain this")
@json_option
def kernels(
    models: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    context: int | None,
    only: str | None,
    json_path: Path | None,
) -> None:
    """Time of each GPU kernel, its twin and a library's kernel if there is one, and the bound."""
    if not (torch.cuda.is_available() and has_triton()):
        raise ConfigError("bench kernels needs an NVIDIA GPU and Triton")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    info = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_s": round(bandwidth / 1e12, 2),
    }
    report = Report("kernels, microseconds a call", info=info)
    for model in models or _ALL_MODELS:
        sizes, contexts = _defaults(model)
        for batch_size in batch_sizes or sizes:
            for of_row in contexts if context is None else (context,):
                for case in cases(model, batch_size, of_row):
                    if only is None or only in case.kernel:
                        click.echo(f"{model}, batch {batch_size}: {case.kernel}", err=True)
                        report.add(model=model, batch=batch_size, **_measure(case, bandwidth))
                torch.cuda.empty_cache()
    if not report.rows:
        raise ConfigError("there is no such kernel of these models on this GPU")
    report.emit(json_path)


def _defaults(model: str) -> tuple[Sequence[int], Sequence[int]]:
    """The batch sizes and the contexts of a model's lines."""
    if model in INDEXERS:
        return (1, 64, 2048), (4096, 32768)
    return (1, 8, 64, 256, *((1024, 4096) if model in EXPERT_MODELS else ())), (1024,)


def _measure(case: Case, bandwidth: float) -> dict[str, Any]:
    bound = case.num_bytes / bandwidth * 1e6
    times = {
        name: time_us(calls) if calls else None
        for name, calls in (("us", case.ours), ("twin", case.twin), ("library", case.library))
    }
    best = times["us"]
    return {
        "kernel": case.kernel,
        **times,
        "bound": bound,
        "of_bound": f"{bound / best:.0%}" if best else None,
    }
