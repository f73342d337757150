"""Captures CUDA graphs: the same work once for each of several sizes, largest first.

The graphs of a device share one memory pool, so that smaller graphs reuse the blocks of larger
ones. Must not know what is captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from minisgl_backend.device.base import Device, Graph
from minisgl_backend.execution.fitting import must_fit
from minisgl_backend.progress import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StepKind(Enum):
    """The kinds of steps that have graphs of their own; the values are parts of messages."""

    PLAIN = ""
    GROUPED = ", grouped"
    CHECKING = ", with guesses"


@dataclass(frozen=True, slots=True, eq=False)
class Captured(Generic[T]):
    """The graphs by size, and their cost: the ``seconds`` that capturing took, and the
    ``num_bytes`` of device memory that they keep."""

    graphs: dict[int, Graph[T]]
    seconds: float
    num_bytes: int


def capture(
    device: Device,
    what: str,
    sizes: Sequence[int],
    work: Callable[[int], T],
    *,
    prepare: Callable[[int], None],
    option: str,
    progress: Progress,
) -> Captured[T]:
    """Capture ``work`` for each size.

    ``prepare`` enqueues what the host does before the work, and is not captured. Then the work runs
    once uncaptured, which compiles kernels and lets libraries allocate memory, and then it is
    captured. In messages, ``what`` names the sizes, and ``option`` the option that limits them.
    Raises ``ConfigError`` if the remaining memory is too small.
    """
    started_s, free_bytes = time.monotonic(), device.free_memory()
    graphs = {}
    with progress(f"capturing CUDA graphs by {what}", len(sizes)) as advance:
        for size in sorted(sizes, reverse=True):
            options = f"memory_ratio, num_pages or {option}"
            with must_fit(device, f"the CUDA graph of {what} {size}", options=options):
                prepare(size)
                work(size)
                graphs[size] = device.capture(partial(work, size))
            advance(f"{what} {size}")
    left_bytes = device.free_memory()
    captured = Captured(graphs, time.monotonic() - started_s, free_bytes - left_bytes)
    logger.info(
        "captured %d CUDA graphs by %s in %.1f s, which take %.2f GiB; %.2f GiB free",
        len(graphs),
        what,
        captured.seconds,
        captured.num_bytes / 2**30,
        left_bytes / 2**30,
    )
    return captured
