"""The CUDA graphs of a model's steps: whole decode steps, and only the layers of other steps.

There are two sets of graphs: for steps without adapters, and for steps with any. Which token uses
which adapter is data that is written before a replay. Knows what a graph reads besides the inputs
that ``decode_graphs`` and ``chunk_graphs`` write. Must not know plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from minisgl_backend.attention.base import GroupedDecode, PagedAttention, ScheduledDecode
from minisgl_backend.execution.adapters import CapturedAdapters
from minisgl_backend.execution.capture import StepKind
from minisgl_backend.execution.chunk_graphs import ChunkGraphs, ChunkInputs, max_chunks
from minisgl_backend.execution.decode_graphs import DecodeGraphs
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.sampling import StepLogits
from minisgl_backend.execution.stages import Stages
from minisgl_backend.execution.states import CapturedChecks, CapturedRuns
from minisgl_backend.execution.unsettled import UnsettledStep
from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.rows import StepInputs
from minisgl_backend.models.decoder import LayersOutput
from minisgl_backend.plan import Decodes, Groups
from minisgl_backend.progress import Progress
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """One set of graphs, with or without adapters; None for steps that are not captured."""

    decode: DecodeGraphs | None = None
    chunk: ChunkGraphs[LayersOutput] | None = None

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


def _captured_checks(stages: Stages, most_tokens: int) -> CapturedChecks | None:
    """The checks of steps of up to ``most_tokens``, if layers with recurrent states need them."""
    if stages.states is None or not stages.limits.most_guesses:
        return None
    return CapturedChecks(stages.states, stages.device, most_tokens)


def _begun(captured: CapturedChecks | None, size: int, kind: StepKind) -> CheckedTokens | None:
    """The checks of a step of this kind, whose states are settled first."""
    if captured is None or kind is not StepKind.CHECKING:
        return None
    return captured.begin(size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HostInputs:
    """See ``decode_graphs.HostInputs``. ``schedule`` takes the lengths of rows, int32 [size], and
    ``groups`` the groups. What a model or attention does not need is None."""

    schedule: Callable[[IntArray], None] | None
    groups: Callable[[Groups], bool] | None
    adapters: CapturedAdapters | None
    checks: CapturedChecks | None
    most_checked: int

    @property
    def may_group(self) -> bool:
        return self.groups is not None

    def write(self, decodes: Decodes, size: int) -> None:
        if self.schedule is not None:
            lengths = np.ones(size, np.int32)
            lengths[: len(decodes.rows)] += decodes.positions
            self.schedule(lengths)
        if self.adapters is not None:
            self.adapters.write(decodes.rows, size)

    def take_groups(self, groups: Groups) -> bool:
        return self.groups is not None and self.groups(groups)

    def write_checks(self, decodes: Decodes, step: UnsettledStep, size: int) -> None:
        assert self.checks is not None
        self.checks.write(decodes.rows, decodes.positions, step.lengths, size, step.due)


def _decode_graphs(
    stages: Stages, progress: Progress, adapters: CapturedAdapters | None
) -> DecodeGraphs:
    decode, limits = stages.attention.decode, stages.limits
    captured = _captured_checks(stages, limits.graph_sizes[-1])

    def forward(inputs: StepInputs, batch_size: int, kind: StepKind) -> StepLogits:
        return stages.decoded(
            inputs,
            batch_size,
            grouped=kind is StepKind.GROUPED,
            adapted=None if adapters is None else adapters.view(batch_size),
            checks=_begun(captured, batch_size, kind),
        )

    return DecodeGraphs(
        stages.device,
        stages.rows.table,
        forward,
        stages.sampler.sample,
        _HostInputs(
            schedule=decode.schedule_rows if isinstance(decode, ScheduledDecode) else None,
            groups=take_groups_of(stages.attention) if adapters is None else None,
            adapters=adapters,
            checks=captured,
            most_checked=0 if captured is None else limits.most_checked,
        ),
        limits.graph_sizes,
        progress,
        takes_masks=limits.takes_masks,
        in_parts=stages.model.group.size > 1,
    )


def _chunk_graphs(
    stages: Stages, progress: Progress, adapters: CapturedAdapters | None
) -> ChunkGraphs[LayersOutput]:
    limits = stages.limits
    sizes, max_rows, runs = limits.chunk_graph_sizes, limits.max_rows, None
    if stages.states is not None:
        room = partial(max_chunks, max_rows=max_rows)
        runs = CapturedRuns(stages.states, stages.device, room, sizes[-1])
    captured = _captured_checks(stages, sizes[-1])

    def layers(inputs: ChunkInputs, kind: StepKind) -> LayersOutput:
        size = len(inputs.tokens)
        return stages.forward.over_chunks(
            inputs,
            grouped=kind is StepKind.GROUPED,
            adapted=None if adapters is None else adapters.view(size),
            runs=None if runs is None else runs.view(size),
            checks=_begun(captured, min(size, limits.most_checked), kind),
        )

    def take(batch: FlatBatch, size: int) -> None:
        if adapters is not None:
            adapters.write(batch.rows, size)
        if runs is not None:
            runs.write(batch, size)
        if captured is not None and len(lengths := batch.check_lengths):
            own = slice(lengths.sum())
            captured.write(batch.rows[own], batch.positions[own], lengths, size, [])

    return ChunkGraphs(
        stages.device,
        layers,
        sizes,
        max_rows=max_rows,
        progress=progress,
        checks=captured is not None,
        take_groups=take_groups_of(stages.attention) if adapters is None else None,
        fits=None if runs is None else runs.fits,
        take=take,
    )
