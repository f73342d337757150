"""The flat batch of a step: which token is where, and which are sampled from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.plan import LAST_TOKEN, Decodes, Groups, PromptChunks, StepPlan
from minisgl_backend.request import IntArray


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan_of(chunks: list[tuple[int, int, int, int]], decodes: list[tuple[int, int]]) -> StepPlan:
    """Chunks of (row, start, length, number of samples), and decodes of (row, position)."""
    rows, starts, lengths, num_sampled = zip(*chunks, strict=True) if chunks else ((), (), (), ())
    decode_rows, positions = zip(*decodes, strict=True) if decodes else ((), ())
    return StepPlan(
        step=0,
        chunks=PromptChunks(
            rows=ints(*rows),
            starts=ints(*starts),
            lengths=ints(*lengths),
            num_sampled=ints(*num_sampled),
            tokens=ints(*range(sum(lengths))),
        ),
        decodes=Decodes(rows=ints(*decode_rows), positions=ints(*positions)),
    )


@pytest.mark.parametrize(
    ("chunks", "decodes", "positions", "samples"),
    [
        ([(3, 0, 5, 1)], [], [0, 1, 2, 3, 4], [4]),
        ([(3, 8, 5, 0)], [], [8, 9, 10, 11, 12], []),
        (
            [(1, 0, 3, 0), (0, 16, 1, 1), (5, 3, 2, 1)],
            [(2, 9), (4, 30)],
            [9, 30, 0, 1, 2, 16, 3, 4],
            [5, 7, 0, 1],
        ),
        ([], [(2, 9), (0, 0)], [9, 0], [0, 1]),
        ([(3, 8, 3, 3)], [], [8, 9, 10], [0, 1, 2]),
        (
            [(1, 7, 3, 3), (3, 0, 4, 1), (0, 4, 2, 2), (5, 1, 2, 0)],
            [(2, 9), (4, 30)],
            [9, 30, 7, 8, 9, 0, 1, 2, 3, 4, 5, 1, 2],
            [2, 3, 4, 8, 9, 10, 0, 1],
        ),
    ],
)
def test_tokens_and_samples_of_a_step(
    chunks: list[tuple[int, int, int, int]],
    decodes: list[tuple[int, int]],
    positions: list[int],
    samples: list[int],
) -> None:
    plan = plan_of(chunks, decodes)
    flat = FlatBatch.of(plan)
    assert flat.positions.tolist() == positions
    assert flat.sample_indices.tolist() == samples
    assert flat.sample_rows.tolist() == plan.sample_rows.tolist()
    assert flat.sample_positions.tolist() == [positions[index] + 1 for index in samples]
    rows = [row for row, _, length, _ in chunks for _ in range(length)]
    assert flat.rows.tolist() == [row for row, _ in decodes] + rows
    assert flat.num_decodes == len(decodes)
    assert flat.chunk_ends.tolist() == [start + length for _, start, length, _ in chunks]
    assert np.diff(flat.chunk_offsets).tolist() == [length for _, _, length, _ in chunks]
    assert {array.dtype.itemsize for array in (flat.rows, flat.positions, flat.sample_indices)} == {
        8
    }
    assert {flat.chunk_offsets.dtype, flat.chunk_ends.dtype} == {np.dtype(np.int32)}


def test_tokens_of_decoding_rows_are_known_to_the_device() -> None:
    plan = plan_of([(3, 0, 2, 1)], [(1, 7), (2, 9)])
    tokens = plan.chunks.tokens.tolist()
    assert FlatBatch.of(plan).tokens.tolist() == [LAST_TOKEN, LAST_TOKEN, *tokens]
    assert FlatBatch.of_decodes(plan.decodes).tokens.tolist() == [LAST_TOKEN, LAST_TOKEN]


def test_an_empty_plan() -> None:
    flat = FlatBatch.of(plan_of([], []))
    assert len(flat.positions) == len(flat.sample_indices) == flat.num_decodes == 0


def test_groups_name_decoding_rows_by_their_tokens() -> None:
    plan = replace(
        plan_of([(3, 0, 5, 1)], [(1, 40), (4, 50), (7, 60)]),
        groups=Groups(
            sizes=ints(3, 2), begins=ints(0, 2), ends=ints(2, 3), members=ints(7, 1, 4, 4, 7)
        ),
    )
    for of in (plan, replace(plan, chunks=PromptChunks())):
        groups = FlatBatch.of(of).groups
        assert groups.members.tolist() == [2, 0, 1, 1, 2]
        assert (groups.sizes.tolist(), groups.begins.tolist()) == ([3, 2], [0, 2])
        assert groups.ends.tolist() == [2, 3]
