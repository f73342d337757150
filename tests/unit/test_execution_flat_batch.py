"""The flat batch of a GPU against the index arithmetic of the CPU executor."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.execution.batch import PageTable, StepIndices
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan_of(chunks: list[tuple[int, int, int, int]], decodes: list[tuple[int, int]]) -> StepPlan:
    """Chunks of (row, start, length, whether it samples), and decodes of (row, position)."""
    rows, starts, lengths, samples = zip(*chunks, strict=True) if chunks else ((), (), (), ())
    decode_rows, positions = zip(*decodes, strict=True) if decodes else ((), ())
    return StepPlan(
        step=0,
        released_rows=ints(),
        admissions=(),
        grant_rows=ints(),
        grant_indices=ints(),
        grant_pages=ints(),
        prefill_rows=ints(*rows),
        prefill_starts=ints(*starts),
        prefill_lengths=ints(*lengths),
        prefill_samples=ints(*samples),
        prefill_tokens=ints(*range(sum(lengths))),
        decode_rows=ints(*decode_rows),
        decode_positions=ints(*positions),
    )


@pytest.mark.parametrize(
    ("chunks", "decodes"),
    [
        ([(3, 0, 5, 1)], []),
        ([(3, 8, 5, 0)], []),
        ([(1, 0, 7, 0), (0, 16, 1, 1), (5, 3, 4, 1)], [(2, 9), (4, 30)]),
        ([], [(2, 9), (0, 0)]),
    ],
)
def test_equals_the_indices_of_the_cpu(
    chunks: list[tuple[int, int, int, int]], decodes: list[tuple[int, int]]
) -> None:
    plan = plan_of(chunks, decodes)
    flat = FlatBatch.of(plan)
    table = PageTable(max_rows=6, max_sequence_length=64, page_size=4, dummy_page=7)
    indices = StepIndices.of(plan, table)
    assert flat.positions.tolist() == indices.positions.tolist()
    assert flat.samples.tolist() == indices.samples.tolist()
    assert flat.sample_rows.tolist() == indices.sample_rows.tolist() == plan.sample_rows.tolist()
    assert flat.sample_positions.tolist() == indices.sample_positions.tolist()
    assert flat.rows.tolist() == np.repeat(indices.rows, indices.lengths).tolist()
    assert flat.num_chunked == len(plan.prefill_tokens)
    assert flat.chunk_ends.tolist() == [start + length for _, start, length, _ in chunks]
    assert np.diff(flat.chunk_offsets).tolist() == [length for _, _, length, _ in chunks]
    assert {array.dtype.itemsize for array in (flat.rows, flat.positions, flat.samples)} == {8}
    assert {flat.chunk_offsets.dtype, flat.chunk_ends.dtype} == {np.dtype(np.int32)}


def test_an_empty_plan() -> None:
    flat = FlatBatch.of(plan_of([], []))
    assert len(flat.positions) == len(flat.samples) == flat.num_chunked == 0
