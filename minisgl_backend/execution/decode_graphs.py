"""CUDA graphs of whole decode steps, sampling included.

A graph is made for one batch size: look up the rows, run the layers, sample, write tokens and
lengths back (``kernels.rows``). Between two replays the host writes the step's inputs, and only if
rows changed or pages were granted. For steps that wait for masks there are two more graphs of each
size, the first up to the logits and the second for the rest. If the attention kernels can read
pages that rows share together, there is one more of each larger size, for steps in which that pays
(``attention.base.GroupedDecode``); steps that wait for masks do without.

Batches are padded to the next captured size with the dummy row. If the attention kernels need a
schedule from the host (``attention.base.ScheduledDecode``), it is written before each replay.

Must not know models or attention: what is captured are functions of a ``StepInputs``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from minisgl_backend.device.base import Device, Graph
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.capture import Captured, capture
from minisgl_backend.execution.sampling import StepLogits, StepOutput
from minisgl_backend.kernels.rows import RowTable, StepInputs
from minisgl_backend.plan import NO_GROUPS, Decodes, Groups
from minisgl_backend.progress import Progress
from minisgl_backend.request import EMPTY, IntArray

T = TypeVar("T")

_LEAST_GROUPED: Final = 8
"""Rows of the smallest step whose groups are worth a graph."""


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
        forward: Callable[[StepInputs, int, bool], StepLogits],
        sample: Callable[[StepLogits], StepOutput],
        sizes: Sequence[int],
        progress: Progress,
        *,
        takes_masks: bool,
        schedule: Callable[[IntArray], None] | None = None,
        take_groups: Callable[[Groups], bool] | None = None,
        take_rows: Callable[[IntArray, int], None] | None = None,
    ):
        """``forward(inputs, batch_size, grouped)`` enqueues a decode step of the first rows of its
        inputs up to the logits, and ``sample`` the rest. Before a step is enqueued, ``schedule``
        gets the rows' lengths, int32 [batch_size]; ``take_groups`` gets its groups, and returns
        whether the step is to be a grouped one; ``take_rows`` gets its rows and the batch size."""
        self._device = device
        self._table = table
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        # a row that grows is granted a page, and a window page for one that it has passed
        of_row = 1 if table.window_pages is None else 3
        self._inputs = StepInputs.empty(most, of_row * most, device.torch_device)
        self._inputs.rows.fill_(table.dummy_row)
        self._rows: IntArray = np.full(most, table.dummy_row, np.int32)
        self._schedule = schedule
        self._take_groups = take_groups or (lambda groups: False)
        self._take_rows = take_rows

        def begin(size: int) -> StepLogits:
            return forward(self._inputs, size, False)

        def whole(size: int) -> StepOutput:
            return sample(begin(size))

        def grouped(size: int) -> StepOutput:
            return sample(forward(self._inputs, size, True))

        self.captured = self._capture("batch size", whole, progress)
        self._grouped: dict[int, Graph[StepOutput]] = {}
        self._forwards: dict[int, Graph[StepLogits]] = {}
        self._samplings: dict[int, Graph[StepOutput]] = {}
        if take_groups is not None:
            larger = [size for size in self._sizes if size >= _LEAST_GROUPED]
            self._grouped = self._capture("batch size, grouped", grouped, progress, larger).graphs
        if takes_masks:
            what = "batch size, up to the logits"
            forwards = self._forwards = self._capture(what, begin, progress).graphs
            self._samplings = self._capture(
                "batch size, from the logits on",
                lambda size: sample(forwards[size].output),
                progress,
                prepare=lambda size: forwards[size].replay(),
            ).graphs

    def _capture(
        self,
        what: str,
        work: Callable[[int], T],
        progress: Progress,
        sizes: Sequence[int] | None = None,
        *,
        prepare: Callable[[int], None] | None = None,
    ) -> Captured[T]:
        """Capture ``work`` on dummy rows, in all sizes unless ``sizes`` are given."""
        return capture(
            self._device,
            what,
            self._sizes if sizes is None else sizes,
            work,
            prepare=prepare or self._schedule_padding,
            option="cuda_graph_max_batch_size",
            progress=progress,
        )

    @property
    def max_grants(self) -> int:
        """Most grants that a step takes; if there are more, they must be written before it."""
        return self._inputs.max_grants

    def fits(self, num_rows: int) -> bool:
        """Whether a step of this number of rows can be replayed."""
        return num_rows <= self._sizes[-1]

    def replay(self, decodes: Decodes, grants: IntArray, groups: Groups = NO_GROUPS) -> StepOutput:
        """Enqueue a decode step that first writes ``grants``, int32 [3, num_grants]. Members of
        ``groups`` are indices of ``decodes``.

        The first elements of the output belong to the rows, the others to padding.
        """
        size = self._prepare(decodes, grants)
        is_grouped = size in self._grouped and self._take_groups(groups)
        graph = (self._grouped if is_grouped else self.captured.graphs)[size]
        graph.replay()
        return graph.output

    def begin(self, decodes: Decodes, grants: IntArray) -> Callable[[], StepOutput]:
        """Enqueue the step up to its logits; the result enqueues the rest, and must be called
        before any other step."""
        size = self._prepare(decodes, grants)
        self._forwards[size].replay()
        sampling = self._samplings[size]

        def finish() -> StepOutput:
            sampling.replay()
            return sampling.output

        return finish

    def _prepare(self, decodes: Decodes, grants: IntArray) -> int:
        """Write the inputs of a step; returns the size of its graph."""
        rows = decodes.rows
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
            lengths[:num_rows] += decodes.positions
            self._schedule(lengths)
        if self._take_rows is not None:
            self._take_rows(rows, size)
        return size

    def close(self) -> None:
        """Destroy the graphs, which hold the addresses of everything they use."""
        for graphs in (self.captured.graphs, self._grouped, self._samplings, self._forwards):
            graphs.clear()

    def _schedule_padding(self, size: int) -> None:
        if self._schedule is not None:
            self._schedule(np.ones(size, np.int32))
        if self._take_rows is not None:
            self._take_rows(EMPTY, size)
