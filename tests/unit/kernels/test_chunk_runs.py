"""Prompt chunks, cut into blocks for layers with recurrent states."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.chunk_runs import (
    BLOCK_COLUMNS,
    RUN_COLUMNS,
    Run,
    Runs,
    num_blocks,
    runs_table,
    table_size,
)

RUNS = [
    (),
    (Run(0, 1, 3, 0),),
    (Run(4, 7, 3, 5),),
    (Run(0, 70, 2, 300, ((66, 9),)), Run(70, 71, 1, 0), Run(71, 75, 0, 4, ((72, 5),))),
    (Run(0, 80, 1, 0, ((16, 4), (21, 5))), Run(80, 150, 2, 9, ((150, 6),))),
]


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("padding", [0, 2])
def test_what_kernels_read_tells_the_runs(runs: tuple[Run, ...], padding: int) -> None:
    most_blocks, most_lines = num_blocks(runs) + padding, len(runs) + padding
    table = runs_table(runs, most_blocks, most_lines, end=150)
    assert len(table) == table_size(most_blocks, most_lines)
    found = Runs.over(torch.from_numpy(table), most_lines)
    assert found.listed() == list(runs)
    assert found.blocks.shape == (most_blocks, BLOCK_COLUMNS)
    assert found.lines.shape == (most_lines, RUN_COLUMNS)
    assert found.blocks[most_blocks - padding :].tolist() == [[150, 150, -1, 0]] * padding


@pytest.mark.parametrize("runs", RUNS)
def test_blocks_are_full_or_end_where_slots_take_states(runs: tuple[Run, ...]) -> None:
    found = Runs.of(runs, torch.from_numpy)
    for run, (first, last, *_) in zip(runs, found.lines.tolist(), strict=True):
        blocks = found.blocks[first:last].tolist()
        assert [blocks[0][0], blocks[-1][1]] == [run.begin, run.end]
        takes = {run.end, *(index for index, _ in run.kept)}
        for (begin, end, *_), (after, *_) in zip(blocks, [*blocks[1:], [run.end]], strict=True):
            assert begin < end == after
            assert end - begin == 64 or end in takes
        assert takes <= {end for _, end, *_ in blocks}


def test_slots_take_the_states_of_pieces() -> None:
    run = Run(10, 30, 3, 50, ((12, 7), (18, 8)))
    assert list(run.pieces()) == [(10, 12, (7,)), (12, 18, (8,)), (18, 30, (3,))]
    assert run.end_position == 70
    assert list(Run(0, 5, 1, 0, ((5, 2),)).pieces()) == [(0, 5, (2, 1))]
    assert list(Run(0, 5, 1, 0).pieces()) == [(0, 5, (1,))]
