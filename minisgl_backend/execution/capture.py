"""Capture of CUDA graphs: the same work once for each of several sizes, largest first.

All graphs of a capture share one memory pool, so that the smaller ones reuse the blocks of the
larger. Must not know what is captured.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def capture(
    device: CudaDevice,
    what: str,
    sizes: Sequence[int],
    work: Callable[[int], T],
    *,
    prepare: Callable[[int], None],
    option: str,
) -> dict[int, tuple[torch.cuda.CUDAGraph, T]]:
    """A graph of ``work`` for each size, with what it returned: tensors that replays fill anew.

    ``prepare`` enqueues what the host does before work of that size, and is not captured. The work
    is then enqueued once uncaptured, which compiles kernels and makes libraries allocate, then
    captured; and the graph is replayed once, since the first replay uploads it. For messages to the
    operator ``what`` names the sizes, and ``option`` the option that limits them. Raises
    ``ConfigError`` if the remaining memory is too small.
    """
    pool, stream = torch.cuda.graph_pool_handle(), device.stream
    graphs = {}
    with device.queue(), _progress(what, len(sizes)) as advance:
        for size in sorted(sizes, reverse=True):
            graph = torch.cuda.CUDAGraph()
            try:
                prepare(size)
                work(size)
                stream.synchronize()
                with torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    output = work(size)
            except torch.cuda.OutOfMemoryError as error:
                raise ConfigError(
                    f"the CUDA graph of {what} {size} does not fit beside the KV pages, with "
                    f"{device.free_memory() / 2**30:.1f} GiB free: lower memory_ratio, num_pages "
                    f"or {option}"
                ) from error
            graphs[size] = graph, output
            graph.replay()
            advance(size, torch.cuda.mem_get_info(device.torch_device)[0])
        stream.synchronize()
    return graphs


@contextmanager
def _progress(what: str, num_graphs: int) -> Iterator[Callable[[int, int], None]]:
    """A callable for each graph's size and the free bytes after it; a bar on a terminal."""
    if not sys.stderr.isatty():
        logger.info("capturing %d CUDA graphs by %s", num_graphs, what)

        def log(size: int, free: int) -> None:
            logger.debug("captured %s %d, %.1f GiB free", what, size, free / 2**30)

        yield log
        return
    columns = (
        TextColumn("capturing CUDA graphs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]} {task.fields[size]}, {task.fields[free]:.1f} GiB free"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_graphs, what=what, size=0, free=0.0)
        yield lambda size, free: progress.update(task, advance=1, size=size, free=free / 2**30)
