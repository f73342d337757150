"""CUDA graphs of decode steps: from the rows' state to the rows' state, sampling included.

A graph holds a whole step for one batch size: look up the rows, run the layers, sample, write
tokens and lengths back (``kernels.rows``). Between two replays the host writes nothing but the
inbox, and that only when rows changed or pages were granted.

Batches are padded to the next captured size with the dummy row. Where kernels follow a schedule of
the host's (``attention.paged.ScheduledDecode``), it is written before each replay.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.capture import capture
from minisgl_backend.kernels.rows import RowTable, StepInbox
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step leaves on the GPU until the next one: ``tokens`` int32 [num_samples] and
    ``logits`` [num_samples, vocab_size]; of a captured decode step those of padding, too."""

    tokens: Tensor
    logits: Tensor


def batch_sizes(most: int, chosen: str | None) -> list[int]:
    """Sizes to capture, ascending: 1, 2, 4, then every eighth up to ``most``; or those ``chosen``.

    ``chosen`` is the option cuda_graph_batch_sizes; raises ``ConfigError`` where it is malformed,
    or given although there are to be no graphs.
    """
    if most == 0:
        if chosen is not None:
            raise ConfigError(
                f"cuda_graph_batch_sizes={chosen} does not go with cuda_graph_max_batch_size=0, "
                "which turns all CUDA graphs off"
            )
        return []
    if chosen is None:
        return sorted({size for size in (1, 2, 4, *range(8, most, 8), most) if size <= most})
    try:
        sizes = sorted({int(word) for word in chosen.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] > most:
        raise ConfigError(
            f"cuda_graph_batch_sizes must be numbers of 1..{most} as 1,2,4, got {chosen!r}"
        )
    return sizes


class DecodeGraphs:
    """The captured steps, and the inbox they read."""

    def __init__(
        self,
        device: CudaDevice,
        table: RowTable,
        step: Callable[[StepInbox, int], StepOutput],
        sizes: Sequence[int],
        schedule: Callable[[IntArray], None] | None = None,
    ):
        """``step`` enqueues a decode step of an inbox's first rows, as many as it is given;
        ``schedule`` gets the rows' lengths, int32 [batch_size], before such a step is enqueued."""
        self._table = table
        most = max(sizes)
        self._sizes = sorted(sizes)
        with device.queue():  # in the order of the steps that read it
            self._inbox = StepInbox.empty(most, most, device.torch_device)
            self._inbox.rows.fill_(table.dummy_row)
        self._rows: IntArray = np.full(most, table.dummy_row, np.int32)
        self._schedule = schedule
        self._graphs = capture(
            device,
            "batch size",
            self._sizes,
            lambda size: step(self._inbox, size),  # of dummy rows
            prepare=self._schedule_padding,
            option="cuda_graph_max_batch_size",
        )

    def fits(self, num_rows: int, num_grants: int) -> bool:
        """Whether a step of so many rows and grants can be replayed."""
        return num_rows <= self._sizes[-1] and num_grants <= self._inbox.max_grants

    def replay(self, rows: IntArray, positions: IntArray, grants: IntArray) -> StepOutput:
        """Enqueue a decode step of ``rows`` at ``positions``, int32 [num_rows] both, after grants
        int32 [3, num_grants].

        The output's first num_rows entries are those of the rows.
        """
        num_rows, num_grants = len(rows), grants.shape[1]
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        known = self._rows[:size]
        changed = not (
            np.array_equal(known[:num_rows], rows)
            and (known[num_rows:] == self._table.dummy_row).all()
        )
        if changed or num_grants:
            known[:num_rows] = rows
            known[num_rows:] = self._table.dummy_row
            buffer = np.empty(1 + self._inbox.max_batch + 3 * num_grants, np.int32)
            buffer[0] = num_grants
            buffer[1 : 1 + self._inbox.max_batch] = self._rows
            buffer[1 + self._inbox.max_batch :] = grants.T.reshape(-1)
            self._inbox.buffer[: len(buffer)].copy_(
                torch.from_numpy(buffer).pin_memory(), non_blocking=True
            )
        if self._schedule is not None:
            lengths = np.ones(size, np.int32)
            lengths[:num_rows] += positions
            self._schedule(lengths)
        graph, output = self._graphs[size]
        graph.replay()
        return output

    def close(self) -> None:
        """Destroy the graphs, which hold the addresses of everything they use."""
        self._graphs.clear()

    def _schedule_padding(self, size: int) -> None:
        if self._schedule is not None:
            self._schedule(np.ones(size, np.int32))
