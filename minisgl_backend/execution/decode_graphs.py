"""CUDA graphs of whole decode steps, sampling included.

A graph is for one batch size. It looks up the rows, runs the layers, samples, and writes tokens and
lengths back (``kernels.rows``). Between two replays the host writes the step's inputs, but only if
rows changed, pages were granted, or tokens come from the host. For steps that wait for masks there
are two more graphs of each size, one up to the logits and one for the rest. If the attention
kernels can read the pages that rows share only once, there is one more graph of each larger size,
for steps in which that pays (``attention.base.GroupedDecode``); steps that wait for masks do not
use it. If layers have recurrent states, steps that check guesses have graphs of their own, as these
leave the states as they are (``kernels.checks``).

With several ranks, all steps are in two parts. The second part depends on whether it takes the
logits of all ranks (``sampling``).

Batches are padded to the next captured size with the dummy row. If the attention kernels need a
schedule from the host (``attention.base.ScheduledDecode``), it is written before each replay.

Must not know models or attention: what is captured are functions of a ``StepInputs``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from minisgl_backend.device.base import Device
from minisgl_backend.execution.capture import Captured, StepKind, capture
from minisgl_backend.execution.sampling import StepLogits, StepOutput
from minisgl_backend.execution.unsettled import UnsettledStep
from minisgl_backend.kernels.rows import RowTable, StepInputs
from minisgl_backend.plan import LAST_TOKEN, NO_GROUPS, Decodes, Groups
from minisgl_backend.progress import Progress
from minisgl_backend.request import IntArray

T = TypeVar("T")

_LEAST_GROUPED: Final = 8
"""The fewest rows of a step whose groups are worth a graph."""


class Sample(Protocol):
    """``Sampler.sample``."""

    def __call__(self, due: StepLogits, *, all_logits: bool) -> StepOutput: ...


class HostInputs(Protocol):
    """Writes what a step reads besides ``StepInputs``, before the step is enqueued.

    Only if it ``may_group``, steps have groups. Steps that check guesses, of up to ``most_checked``
    tokens, have graphs of their own; none do if that is 0.
    """

    @property
    def may_group(self) -> bool: ...

    @property
    def most_checked(self) -> int: ...

    def write(self, decodes: Decodes, size: int) -> None:
        """Write what depends on the rows of a step, which is padded to ``size``."""

    def take_groups(self, groups: Groups) -> bool:
        """Write the groups of a step; returns whether it is to be grouped."""

    def write_checks(self, decodes: Decodes, step: UnsettledStep, size: int) -> None:
        """Write what a step that checks guesses does to states."""


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Graphs of steps up to the logits, and graphs of the rest, by ``all_logits`` and size."""

    forwards: Captured[StepLogits]
    samplings: dict[bool, Captured[StepOutput]]

    def replay(self, size: int, *, all_logits: bool) -> Callable[[], StepOutput]:
        """Enqueue the first part. Calling the result enqueues the second."""
        self.forwards.graphs[size].replay()
        sampling = self.samplings[all_logits].graphs[size]

        def finish() -> StepOutput:
            sampling.replay()
            return sampling.output

        return finish

    def close(self) -> None:
        for rest in self.samplings.values():  # first, since they read what the others hold
            rest.graphs.clear()
        self.forwards.graphs.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Capturing:
    """Captures steps of one kind on dummy rows, for each of ``sizes``: ``begin`` enqueues a step up
    to its logits, ``sample`` the rest. ``prepare``: see ``capture``."""

    what: str
    sizes: Sequence[int]
    begin: Callable[[int], StepLogits]
    sample: Sample
    prepare: Callable[[int], None]
    device: Device
    progress: Progress

    def whole_steps(self) -> Captured[StepOutput]:
        """Graphs of whole steps."""

        def step(size: int) -> StepOutput:
            return self.sample(self.begin(size), all_logits=True)

        return self._captured(self.what, step, self.prepare)

    def parts(self, *, has_ranks: bool) -> _Parts:
        """Graphs of steps in two parts. Only if there are several ranks, the second part may take
        the rank's own logits."""
        what = f"{self.what}, up to the logits"
        forwards = self._captured(what, self.begin, self.prepare)

        def rest(all_logits: bool) -> Captured[StepOutput]:
            return self._captured(
                f"{self.what}, from {'all' if all_logits else 'own'} logits on",
                lambda size: self.sample(forwards.graphs[size].output, all_logits=all_logits),
                lambda size: forwards.graphs[size].replay(),
            )

        kinds = (True, False) if has_ranks else (True,)
        return _Parts(forwards, {all_logits: rest(all_logits) for all_logits in kinds})

    def _captured(
        self, what: str, work: Callable[[int], T], prepare: Callable[[int], None]
    ) -> Captured[T]:
        return capture(
            self.device,
            what,
            self.sizes,
            work,
            prepare=prepare,
            option="cuda_graph_max_batch_size",
            progress=self.progress,
        )


class DecodeGraphs:
    """The captured steps, and the inputs that they read. For use in submitted work only."""

    def __init__(
        self,
        device: Device,
        table: RowTable,
        forward: Callable[[StepInputs, int, StepKind], StepLogits],
        sample: Sample,
        host_inputs: HostInputs,
        sizes: Sequence[int],
        progress: Progress,
        *,
        takes_masks: bool,
        in_parts: bool,
    ):
        """``forward(inputs, batch_size, kind)`` enqueues a decode step of the first rows of its
        inputs up to the logits, and ``sample`` enqueues the rest. ``in_parts``: there are several
        ranks."""
        self._device = device
        self._table = table
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        # a growing row is granted a page, and a window page in place of one that it has passed
        of_row = 1 if table.window_pages is None else 3
        self._inputs = StepInputs.empty(most, of_row * most, device.torch_device)
        self._inputs.lines[0] = table.dummy_row
        self._lines: IntArray = np.zeros((3, most), np.int32)
        """``lines`` of ``_inputs``, as they are on the device."""
        self._lines[0], self._lines[1] = table.dummy_row, LAST_TOKEN
        self._host_inputs = host_inputs

        def begin(size: int, kind: StepKind) -> StepLogits:
            return forward(self._inputs, size, kind)

        sizes_of = {StepKind.PLAIN: self._sizes}
        if host_inputs.may_group:
            larger = [size for size in self._sizes if size >= _LEAST_GROUPED]
            sizes_of[StepKind.GROUPED] = larger
        if host_inputs.most_checked:
            count = bisect.bisect_left(self._sizes, host_inputs.most_checked) + 1
            sizes_of[StepKind.CHECKING] = self._sizes[:count]
        self._whole: dict[StepKind, Captured[StepOutput]] = {}
        """Graphs of whole steps; none if all steps are in parts."""
        self._parts: dict[StepKind, _Parts] = {}
        """Graphs of steps in two parts."""
        for kind, of_kind in sizes_of.items():
            capturing = _Capturing(
                f"batch size{kind.value}",
                of_kind,
                partial(begin, kind=kind),
                sample,
                self._prepare_padding,
                device,
                progress,
            )
            if not in_parts:
                self._whole[kind] = capturing.whole_steps()
            if in_parts or (takes_masks and kind is not StepKind.GROUPED):
                self._parts[kind] = capturing.parts(has_ranks=in_parts)

    @property
    def captured(self) -> list[Captured[Any]]:
        """All graphs, kind by kind."""
        parts = self._parts.values()
        return [
            *self._whole.values(),
            *(each.forwards for each in parts),
            *(rest for each in parts for rest in each.samplings.values()),
        ]

    @property
    def max_grants(self) -> int:
        """The most grants that a step takes; if there are more, they must be written before it."""
        return self._inputs.max_grants

    def fits(self, num_rows: int) -> bool:
        """Whether a step with this number of rows can be replayed."""
        return num_rows <= self._sizes[-1]

    def replay(
        self,
        decodes: Decodes,
        tokens: IntArray,
        grants: IntArray,
        groups: Groups = NO_GROUPS,
        *,
        unsettled: UnsettledStep | None = None,
        all_logits: bool = True,
    ) -> StepOutput:
        """Enqueue a decode step that first writes ``grants``, int32 [3, num_grants]. ``tokens``,
        int32 [num_decodes], are each a token id or below 0 (``StepInputs``); if there are none, all
        are ``LAST_TOKEN``. Members of ``groups`` are indices of ``decodes``. ``unsettled`` is given
        if there are guesses and graphs for such steps. ``all_logits``: see ``Sampler.sample``.

        The first elements of the output belong to the rows, the others to padding.
        """
        size, kind = self._prepare(decodes, tokens, grants, unsettled)
        is_plain = kind is StepKind.PLAIN
        if is_plain and size >= _LEAST_GROUPED and self._host_inputs.take_groups(groups):
            kind = StepKind.GROUPED
        if not self._whole:
            return self._parts[kind].replay(size, all_logits=all_logits)()
        graph = self._whole[kind].graphs[size]
        graph.replay()
        return graph.output

    def begin(
        self,
        decodes: Decodes,
        tokens: IntArray,
        grants: IntArray,
        *,
        unsettled: UnsettledStep | None = None,
    ) -> Callable[[], StepOutput]:
        """Enqueue the step up to its logits. Calling the result enqueues the rest, and must be done
        before any other step."""
        size, kind = self._prepare(decodes, tokens, grants, unsettled)
        return self._parts[kind].replay(size, all_logits=True)

    def _prepare(
        self,
        decodes: Decodes,
        tokens: IntArray,
        grants: IntArray,
        unsettled: UnsettledStep | None,
    ) -> tuple[int, StepKind]:
        """Write the inputs of a step; returns the size and the kind of its graph, unless it is
        grouped."""
        rows = decodes.rows
        num_rows, num_grants = len(rows), grants.shape[1]
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        known, lines = self._lines[:, :size], np.zeros((3, size), np.int32)
        lines[0, :num_rows], lines[0, num_rows:] = rows, self._table.dummy_row
        lines[1] = LAST_TOKEN
        if len(tokens):
            lines[1:, :num_rows] = tokens, decodes.positions
        if num_grants or not np.array_equal(known, lines):
            known[:] = lines
            parts = [num_grants], self._lines.ravel(), grants.T.ravel()
            content = np.concatenate(parts, dtype=np.int32)
            self._device.overwrite(self._inputs.buffer[: len(content)], content)
        self._host_inputs.write(decodes, size)
        if unsettled is None:
            return size, StepKind.PLAIN
        self._host_inputs.write_checks(decodes, unsettled, size)
        return size, StepKind.CHECKING

    def close(self) -> None:
        """Destroy the graphs, which hold the addresses of everything they use."""
        for whole in self._whole.values():
            whole.graphs.clear()
        for parts in self._parts.values():
            parts.close()

    def _prepare_padding(self, size: int) -> None:
        self._host_inputs.write(Decodes(), size)
