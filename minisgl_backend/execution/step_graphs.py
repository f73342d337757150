"""The CUDA graphs of a model's steps: whole decode steps, and only the layers of other steps.

There are two sets of graphs: for steps without adapters, and for steps with any. Which token uses
which adapter is data that is written before a replay. Knows what a graph reads besides the inputs
that ``decode_graphs`` and ``chunk_graphs`` write. Must not know plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from minisgl_backend.attention.base import GroupedDecode, PagedAttention, ScheduledDecode
from minisgl_backend.execution.adapters import CapturedAdapters
from minisgl_backend.execution.chunk_graphs import ChunkGraphs, ChunkInputs, max_chunks
from minisgl_backend.execution.decode_graphs import DecodeGraphs, StepKind
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.sampling import StepLogits
from minisgl_backend.execution.stages import Stages
from minisgl_backend.execution.states import CapturedChecks, CapturedRuns
from minisgl_backend.kernels.rows import StepInputs
from minisgl_backend.plan import Decodes, Groups
from minisgl_backend.progress import Progress
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """One set of graphs, with or without adapters; None for steps that are not captured."""

    decode: DecodeGraphs | None = None
    chunk: ChunkGraphs | None = None

    def __bool__(self) -> bool:
        """Whether any steps are captured."""
        return self.decode is not None or self.chunk is not None

    def close(self) -> None:
        """Destroy the graphs."""
        for graphs in (self.decode, self.chunk):
            if graphs is not None:
                graphs.close()


def capture_steps(stages: Stages, progress: Progress, *, adapted: bool = False) -> StepGraphs:
    """Capture steps of the sizes in ``limits``; if ``adapted``, steps with adapters."""
    limits = stages.limits
    decode = chunk = None
    if limits.graph_sizes:
        adapters = _captured_adapters(stages, limits.graph_sizes[-1]) if adapted else None
        decode = _decode_graphs(stages, progress, adapters)
    if limits.chunk_graph_sizes:
        adapters = _captured_adapters(stages, limits.chunk_graph_sizes[-1]) if adapted else None
        chunk = _chunk_graphs(stages, progress, adapters)
    return StepGraphs(decode, chunk)


def take_groups_of(attention: PagedAttention) -> Callable[[Groups], bool] | None:
    """The function that takes the groups of steps without adapters; None if attention cannot use
    groups.

    Steps with adapters have no groups: that would take two more sets of graphs.
    """
    decode = attention.decode
    if attention.reads_groups and isinstance(decode, GroupedDecode):
        return decode.take_groups
    return None


def _captured_adapters(stages: Stages, most_tokens: int) -> CapturedAdapters:
    assert stages.adapters is not None
    return CapturedAdapters(stages.adapters, stages.device, most_tokens)


def _decode_graphs(
    stages: Stages, progress: Progress, adapters: CapturedAdapters | None
) -> DecodeGraphs:
    decode, limits, captured = stages.attention.decode, stages.limits, None
    most_checked = limits.most_checks + limits.most_guesses
    if stages.states is not None and limits.most_guesses:
        captured = CapturedChecks(stages.states, stages.device, limits.graph_sizes[-1])

    def forward(inputs: StepInputs, batch_size: int, kind: StepKind) -> StepLogits:
        return stages.decoded(
            inputs,
            batch_size,
            grouped=kind is StepKind.GROUPED,
            adapted=None if adapters is None else adapters.view(batch_size),
            checks=captured.begin(batch_size)
            if captured is not None and kind is StepKind.CHECKING
            else None,
        )

    def take_checks(decodes: Decodes, lengths: IntArray, size: int) -> None:
        assert captured is not None
        captured.write(decodes.rows, decodes.positions, lengths, size)

    return DecodeGraphs(
        stages.device,
        stages.rows.table,
        forward,
        stages.sampler.sample,
        limits.graph_sizes,
        progress,
        takes_masks=limits.takes_masks,
        in_parts=stages.model.group.size > 1,
        schedule=decode.schedule_rows if isinstance(decode, ScheduledDecode) else None,
        take_groups=take_groups_of(stages.attention) if adapters is None else None,
        take_rows=None if adapters is None else adapters.write,
        take_checks=None if captured is None else take_checks,
        most_checked=most_checked,
    )


def _chunk_graphs(
    stages: Stages, progress: Progress, adapters: CapturedAdapters | None
) -> ChunkGraphs:
    sizes, max_rows, runs = stages.limits.chunk_graph_sizes, stages.limits.max_rows, None
    if stages.states is not None:
        room = partial(max_chunks, max_rows=max_rows)
        runs = CapturedRuns(stages.states, stages.device, room, sizes[-1])

    def layers(inputs: ChunkInputs, grouped: bool) -> Tensor:
        size = len(inputs.tokens)
        return stages.forward.over_chunks(
            inputs,
            grouped=grouped,
            adapted=None if adapters is None else adapters.view(size),
            runs=None if runs is None else runs.view(size),
        )

    def take(batch: FlatBatch, size: int) -> None:
        if adapters is not None:
            adapters.write(batch.rows, size)
        if runs is not None:
            runs.write(batch, size)

    return ChunkGraphs(
        stages.device,
        layers,
        sizes,
        max_rows=max_rows,
        progress=progress,
        take_groups=take_groups_of(stages.attention) if adapters is None else None,
        fits=None if runs is None else runs.fits,
        take=take,
    )
