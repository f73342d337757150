"""The prompt chunks of a step, cut into blocks of tokens, for layers with recurrent states.

Knows indices of tokens and slots of states. Must not know what is computed with a block
(``gated_delta``, ``mamba``), or which request has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from minisgl_backend.request import IntArray

BLOCK: Final = 64
"""Tokens that are computed at once."""
BLOCK_COLUMNS: Final = 4
"""Numbers of a line of ``Runs.blocks``."""
RUN_COLUMNS: Final = 4
"""Numbers of a line of ``Runs.lines``."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one row, by their indices in the step: ``begin`` <= t < ``end``.

    ``position`` is that of the first token. ``slot`` has the row's states after the previous
    tokens, if there are any, and gets the states after the last token. ``kept``, in ascending
    order: an index, and the slot that gets a copy of the states before the token at that index.
    """

    begin: int
    end: int
    slot: int
    position: int
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Whether the run begins a sequence."""
        return self.position == 0

    @property
    def end_position(self) -> int:
        """That of the row's token after the run."""
        return self.position + self.end - self.begin

    def pieces(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """The parts of the run, cut where slots take the states: begin, end, and these slots."""
        takers: dict[int, list[int]] = {}
        for index, slot in (*self.kept, (self.end, self.slot)):
            takers.setdefault(index, []).append(slot)
        begin = self.begin
        for end, slots in takers.items():
            yield begin, end, tuple(slots)
            begin = end


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The prompt chunks of a step, as kernels read them. No slot occurs twice.

    int32 on the device. ``blocks`` [num_blocks, BLOCK_COLUMNS], up to 64 tokens each, in the order
    of the tokens: begin, end, the slot of a snapshot that keeps the states after the block or -1,
    and its run. ``lines`` [num_lines, RUN_COLUMNS], one per run: its first block, the block after
    its last, its slot, and the position of its first token. Both may end in padding: blocks that
    begin and end after the last token of all runs, and lines with slot -1.
    """

    blocks: Tensor
    lines: Tensor

    @classmethod
    def of(cls, runs: Sequence[Run], upload: Callable[[IntArray], Tensor]) -> Runs:
        """``upload`` copies an array to the device."""
        table = runs_table(runs, num_blocks(runs), len(runs), end=0)
        return cls.over(upload(table), len(runs))

    @classmethod
    def over(cls, table: Tensor, num_lines: int) -> Runs:
        """The runs of a ``runs_table``."""
        split = len(table) - num_lines * RUN_COLUMNS
        blocks, lines = table[:split], table[split:]
        return cls(blocks.view(-1, BLOCK_COLUMNS), lines.view(num_lines, RUN_COLUMNS))

    def listed(self) -> list[Run]:
        """The runs, without padding."""
        blocks, runs = self.blocks.tolist(), []
        for first, last, slot, position in self.lines.tolist():
            if slot >= 0:
                own = blocks[first:last]
                kept = tuple((end, to) for _, end, to, _ in own if to >= 0)
                runs.append(Run(own[0][0], own[-1][1], slot, position, kept))
        return runs


def num_blocks(runs: Sequence[Run]) -> int:
    """How many blocks ``runs`` are cut into."""
    return sum(-(-(end - begin) // BLOCK) for run in runs for begin, end, _ in run.pieces())


def table_size(num_blocks: int, num_lines: int) -> int:
    """How many numbers a ``runs_table`` has."""
    return num_blocks * BLOCK_COLUMNS + num_lines * RUN_COLUMNS


def runs_table(runs: Sequence[Run], most_blocks: int, most_lines: int, *, end: int) -> IntArray:
    """The ``blocks`` of ``runs``, then the ``lines``: int32 [table_size(most_blocks, most_lines)].
    ``end`` is the number of tokens, where blocks of padding begin and end."""
    blocks = np.empty((most_blocks, BLOCK_COLUMNS), np.int32)
    lines = np.empty((most_lines, RUN_COLUMNS), np.int32)
    blocks[:], lines[:] = (end, end, -1, 0), (0, 0, -1, 0)
    block = 0
    for line, run in enumerate(runs):
        first = block
        for begin, border, slots in run.pieces():
            snapshots = [slot for slot in slots if slot != run.slot]
            for start in range(begin, border, BLOCK):
                stop = min(start + BLOCK, border)
                keeps = stop == border and len(snapshots) > 0
                blocks[block] = (start, stop, snapshots[0] if keeps else -1, line)
                block += 1
        lines[line] = (first, block, run.slot, run.position)
    return np.concatenate([blocks.ravel(), lines.ravel()])
