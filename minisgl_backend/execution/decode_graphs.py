"""CUDA graphs of whole decode steps, sampling included.

A graph is made for one batch size: look up the rows, run the layers, sample, write tokens and
lengths back (``kernels.rows``). Between two replays the host writes the step's inputs, and only if
rows changed or pages were granted. For steps that wait for masks there are two more graphs of each
size, the first up to the logits and the second for the rest.

Batches are padded to the next captured size with the dummy row. If the attention kernels need a
schedule from the host (``attention.base.ScheduledDecode``), it is written before each replay.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from minisgl_backend.device.base import Device, Graph
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.capture import Captured, capture
from minisgl_backend.execution.sampling import StepLogits, StepOutput
from minisgl_backend.kernels.rows import RowTable, StepInputs
from minisgl_backend.progress import Progress
from minisgl_backend.request import IntArray

T = TypeVar("T")


def batch_sizes(most: int, chosen: str | None) -> list[int]:
    """Sizes to capture, ascending: 1, 2, 4, then every eighth up to ``most``; or those ``chosen``.

    ``chosen`` is the option cuda_graph_batch_sizes; raises ``ConfigError`` if it is malformed, or
    given although there are to be no graphs.
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
    """The captured steps, and the inputs that they read. For use in submitted work only."""

    def __init__(
        self,
        device: Device,
        table: RowTable,
        forward: Callable[[StepInputs, int], StepLogits],
        sample: Callable[[StepLogits], StepOutput],
        sizes: Sequence[int],
        schedule: Callable[[IntArray], None] | None,
        progress: Progress,
        *,
        takes_masks: bool,
    ):
        """``forward`` enqueues a decode step of the given number of first rows of its inputs, up to
        the logits, from which ``sample`` goes on; ``schedule`` gets the rows' lengths, int32
        [batch_size], before such a step is enqueued."""
        self._device = device
        self._table = table
        most = max(sizes)
        self._sizes = sorted(sizes)
        self._inputs = StepInputs.empty(most, most, device.torch_device)
        self._inputs.rows.fill_(table.dummy_row)
        self._rows: IntArray = np.full(most, table.dummy_row, np.int32)
        self._schedule = schedule

        def captured(
            what: str, work: Callable[[int], T], prepare: Callable[[int], None]
        ) -> Captured[T]:
            option = "cuda_graph_max_batch_size"
            return capture(
                device, what, self._sizes, work, prepare=prepare, option=option, progress=progress
            )

        def begin(size: int) -> StepLogits:  # of dummy rows
            return forward(self._inputs, size)

        whole = captured("batch size", lambda size: sample(begin(size)), self._schedule_padding)
        self.captured = whole
        self._forwards: dict[int, Graph[StepLogits]] = {}
        self._samplings: dict[int, Graph[StepOutput]] = {}
        if takes_masks:
            begun = captured("batch size, up to the logits", begin, self._schedule_padding)
            rest = captured(
                "batch size, from the logits on",
                lambda size: sample(begun.graphs[size].output),
                lambda size: begun.graphs[size].replay(),
            )
            self._forwards, self._samplings = begun.graphs, rest.graphs

    def fits(self, num_rows: int, num_grants: int) -> bool:
        """Whether a step of these numbers of rows and grants can be replayed."""
        return num_rows <= self._sizes[-1] and num_grants <= self._inputs.max_grants

    def replay(self, rows: IntArray, positions: IntArray, grants: IntArray) -> StepOutput:
        """Enqueue a decode step of ``rows`` at ``positions``, int32 [num_rows] both, after grants
        int32 [3, num_grants].

        The output's first num_rows entries are those of the rows.
        """
        graph = self.captured.graphs[self._prepare(rows, positions, grants)]
        graph.replay()
        return graph.output

    def begin(
        self, rows: IntArray, positions: IntArray, grants: IntArray
    ) -> Callable[[], StepOutput]:
        """Enqueue the same step up to its logits; to be called for the rest before any other."""
        size = self._prepare(rows, positions, grants)
        self._forwards[size].replay()
        sampling = self._samplings[size]

        def finish() -> StepOutput:
            sampling.replay()
            return sampling.output

        return finish

    def _prepare(self, rows: IntArray, positions: IntArray, grants: IntArray) -> int:
        """Write the inputs of a step; the size of its graph."""
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
            most = self._inputs.max_batch
            content = np.empty(1 + most + 3 * num_grants, np.int32)
            content[0] = num_grants
            content[1 : 1 + most] = self._rows
            content[1 + most :] = grants.T.reshape(-1)
            self._device.overwrite(self._inputs.buffer[: len(content)], content)
        if self._schedule is not None:
            lengths = np.ones(size, np.int32)
            lengths[:num_rows] += positions
            self._schedule(lengths)
        return size

    def close(self) -> None:
        """Destroy the graphs, which hold the addresses of everything they use."""
        for graphs in (self.captured.graphs, self._samplings, self._forwards):
            graphs.clear()

    def _schedule_padding(self, size: int) -> None:
        if self._schedule is not None:
            self._schedule(np.ones(size, np.int32))
