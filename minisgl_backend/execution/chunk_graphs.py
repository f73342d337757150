"""CUDA graphs of the layers of steps with prompt chunks, with or without decoding rows.

Launching the kernels of all layers one by one takes the host longer than the GPU needs to compute a
few hundred tokens, or thousands with a small model. So the layers are captured for several numbers
of tokens. A step uses the smallest graph in which it fits; the dummy row fills the rest. Head and
sampling depend on the number of tokens to sample, so they are launched while the layers run. All
ranks have the same graphs and replay the same one, since the choice depends only on the plan.

If attention can read shared pages of decoding rows together, there are separate graphs for steps in
which that is faster (``attention.base.GroupedDecode``). If the model has recurrent layers, steps
that check guesses have graphs of their own, as in ``decode_graphs``.

Must not know models or attention: what is captured is a function of a ``ChunkInputs``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.execution.capture import Captured, StepKind, capture
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.plan import Groups, StepPlan
from minisgl_backend.progress import Progress
from minisgl_backend.request import IntArray

T = TypeVar("T")

_TOKENS_PER_CHUNK: Final = 16
"""A graph has room for one chunk per 16 tokens; a step with more chunks needs a larger graph."""

_LEAST_GROUPED: Final = 256
"""The fewest tokens of a step whose groups are worth a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkInputs:
    """The inputs of the layers that the host writes, in one buffer; int32 on the device.

        buffer: tokens | rows | positions | chunk_rows | chunk_offsets | chunk_ends
                | decode_rows | decode_lengths

    As in ``FlatBatch``, the tokens of decoding rows come first, then those of chunks: ``tokens``
    [num_tokens], each a token id or below 0 (``RowTable.known``), with their ``rows`` and
    ``positions``. Then come ``chunk_rows`` [max_chunks], ``chunk_offsets`` [max_chunks + 1] and
    ``chunk_ends`` [max_chunks]; and the decoding rows once more, ``decode_rows`` [max_decodes],
    with their ``decode_lengths``, which include the new position. The unused end of each part is
    padding: the dummy row, or empty chunks.
    """

    buffer: Tensor
    tokens: Tensor
    rows: Tensor
    positions: Tensor
    chunk_rows: Tensor
    chunk_offsets: Tensor
    chunk_ends: Tensor
    decode_rows: Tensor
    decode_lengths: Tensor

    @classmethod
    def of(cls, buffer: Tensor, num_tokens: int, max_rows: int) -> ChunkInputs:
        """The inputs for ``num_tokens``, at the beginning of ``buffer``."""
        borders = [0, *accumulate(_lengths(num_tokens, max_rows))]
        return cls(buffer[: borders[-1]], *(buffer[a:b] for a, b in pairwise(borders)))


def _lengths(num_tokens: int, max_rows: int) -> list[int]:
    """The lengths of the parts of a ``ChunkInputs``, in the order of its fields."""
    chunks, decodes = max_chunks(num_tokens, max_rows), min(num_tokens, max_rows)
    return [num_tokens] * 3 + [chunks, chunks + 1, chunks] + [decodes] * 2


def max_chunks(num_tokens: int, max_rows: int) -> int:
    """The number of chunks for which a graph of ``num_tokens`` has room."""
    return min(-(-num_tokens // _TOKENS_PER_CHUNK), max_rows)


def fill(num_tokens: int, max_rows: int, batch: FlatBatch) -> IntArray:
    """The content of a ``ChunkInputs`` for ``batch``; the dummy row is row ``max_rows``."""
    num_decodes, end = batch.num_decodes, len(batch.rows)
    # padding and values, in the order of the fields
    parts: tuple[tuple[int, IntArray | HostArray], ...] = (
        (0, batch.tokens),
        (max_rows, batch.rows),
        (0, batch.positions),
        (max_rows, batch.chunk_rows),
        (end, batch.chunk_offsets),
        (0, batch.chunk_ends),
        (max_rows, batch.rows[:num_decodes]),
        (1, batch.positions[:num_decodes] + 1),
    )
    lengths = _lengths(num_tokens, max_rows)
    content = np.empty(sum(lengths), np.int32)
    begin = 0
    for length, (padding, values) in zip(lengths, parts, strict=True):
        content[begin : begin + len(values)] = values
        content[begin + len(values) : begin + length] = padding
        begin += length
    return content


def fitting(sizes: Sequence[int], batch: FlatBatch) -> Sequence[int]:
    """Those of ``sizes``, ascending, that have room for the tokens and chunks of ``batch``."""
    least_for_chunks = (len(batch.chunk_rows) - 1) * _TOKENS_PER_CHUNK + 1
    return sizes[bisect.bisect_left(sizes, max(len(batch.rows), least_for_chunks)) :]


class ChunkGraphs(Generic[T]):
    """The captured layers, and the buffer that they read. Used only in submitted work."""

    def __init__(
        self,
        device: Device,
        layers: Callable[[ChunkInputs, StepKind], T],
        sizes: Sequence[int],
        *,
        max_rows: int,
        progress: Progress,
        checks: bool,
        take_groups: Callable[[Groups], bool] | None,
        fits: Callable[[FlatBatch, int], bool] | None,
        take: Callable[[FlatBatch, int], None],
    ):
        """``layers(inputs, kind)`` enqueues all layers over the tokens of its inputs. ``sizes`` are
        numbers of tokens, ascending. With ``checks``, steps that check guesses have graphs of their
        own. Before the layers are enqueued, ``take_groups`` gets a step's groups and returns
        whether the step is to be grouped, and ``take`` gets the step and the size. ``fits`` says
        whether ``take`` has room for a step whose tokens and chunks fit the size."""
        self._device = device
        self._fits = fits or (lambda batch, size: True)
        self._take = take
        self._sizes = list(sizes)
        self._max_rows = max_rows
        most = sum(_lengths(self._sizes[-1], max_rows))
        self._buffer = torch.empty(most, dtype=torch.int32, device=device.torch_device)

        def graphs_of(kind: StepKind, sizes: Sequence[int]) -> Captured[T]:
            return capture(
                device,
                f"number of tokens{kind.value}",
                sizes,
                lambda size: layers(ChunkInputs.of(self._buffer, size, max_rows), kind),
                prepare=lambda size: self._write(size, FlatBatch.of(StepPlan(step=-1))),
                option="cuda_graph_max_tokens",
                progress=progress,
            )

        self._graphs = {StepKind.PLAIN: graphs_of(StepKind.PLAIN, self._sizes)}
        self._take_groups = take_groups or (lambda groups: False)
        if take_groups is not None:
            larger = [size for size in self._sizes if size >= _LEAST_GROUPED]
            self._graphs[StepKind.GROUPED] = graphs_of(StepKind.GROUPED, larger)
        if checks:
            self._graphs[StepKind.CHECKING] = graphs_of(StepKind.CHECKING, self._sizes)

    @property
    def captured(self) -> list[Captured[T]]:
        """All graphs, kind by kind."""
        return list(self._graphs.values())

    def size_for(self, batch: FlatBatch) -> int | None:
        """The smallest size in which this step fits; None if there is none."""
        sizes = fitting(self._sizes, batch)
        return next((size for size in sizes if self._fits(batch, size)), None)

    def replay(self, size: int, batch: FlatBatch) -> T:
        """Enqueue the layers of a step that fits ``size``. Returns what they do, with padding
        behind the step's tokens; the next replay overwrites it."""
        self._write(size, batch)
        kind, grouped = StepKind.PLAIN, self._graphs.get(StepKind.GROUPED)
        if batch.num_checks and StepKind.CHECKING in self._graphs:
            kind = StepKind.CHECKING
        elif grouped is not None and size in grouped.graphs and self._take_groups(batch.groups):
            kind = StepKind.GROUPED
        graph = self._graphs[kind].graphs[size]
        graph.replay()
        return graph.output

    def close(self) -> None:
        """Destroy the graphs, which hold the addresses of everything they use."""
        for captured in self._graphs.values():
            captured.graphs.clear()

    def _write(self, size: int, batch: FlatBatch) -> None:
        content = fill(size, self._max_rows, batch)
        self._device.overwrite(self._buffer[: len(content)], content)
        self._take(batch, size)
