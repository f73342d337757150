"""The flat batch of a step: which token is where, and which are sampled from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.execution.checks import split
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.plan import (
    LAST_TOKEN,
    NO_SNAPSHOT,
    Decodes,
    Groups,
    PromptChunks,
    Scores,
    Snapshots,
    StepPlan,
)
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


def test_checks_are_decoded_if_the_model_has_states() -> None:
    """They come first, also among samples, and their chunks are gone from what others refer to."""
    plan = replace(
        plan_of([(1, 7, 3, 3), (0, 4, 2, 2), (3, 0, 4, 1), (5, 8, 2, 0)], [(2, 9), (4, 30)]),
        snapshots=Snapshots(
            begun_from=ints(NO_SNAPSHOT, NO_SNAPSHOT, NO_SNAPSHOT, 6),
            saved_chunks=ints(2, 3),
            saved_positions=ints(4, 10),
            saved=ints(0, 1),
        ),
        scores=Scores(ints(3), ints(8), ints(1), ints(11)),
        groups=Groups(ints(2), ints(0), ints(1), ints(4, 2)),
    )
    rest, checks = split(plan)
    batch = FlatBatch.of(rest, checks)
    assert batch.rows.tolist() == [1, 1, 1, 0, 0, 2, 4, 3, 3, 3, 3, 5, 5]
    assert batch.positions.tolist() == [7, 8, 9, 4, 5, 9, 30, 0, 1, 2, 3, 8, 9]
    last = [LAST_TOKEN] * 2
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4, *last, 5, 6, 7, 8, 9, 10]
    assert batch.check_lengths.tolist() == [3, 2, 1, 1]
    assert batch.num_decodes == 7
    assert batch.chunk_rows.tolist() == [3, 5]
    assert batch.chunk_offsets.tolist() == [7, 11, 13]
    assert batch.sample_rows.tolist() == plan.sample_rows.tolist()
    assert batch.sample_positions.tolist() == plan.sample_positions.tolist()
    assert batch.rows[batch.sample_indices].tolist() == plan.sample_rows.tolist()
    assert (batch.positions[batch.sample_indices] + 1).tolist() == plan.sample_positions.tolist()
    assert batch.groups.members.tolist() == [6, 5]
    assert batch.snapshots.begun_from.tolist() == [NO_SNAPSHOT, 6]
    assert batch.snapshots.saved_chunks.tolist() == [0, 1]
    assert rest.scores.chunks.tolist() == [1]


def test_steps_without_guesses_have_no_checks() -> None:
    plan = plan_of([(3, 0, 4, 1), (5, 8, 2, 0)], [(2, 9), (4, 30)])
    rest, checks = split(plan)
    batch = FlatBatch.of(rest, checks)
    assert not len(batch.check_lengths)
    assert batch.rows.tolist() == FlatBatch.of(plan).rows.tolist()
