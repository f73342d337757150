"""The flat batch of a step: which token is where, and which are sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.plan import (
    LAST_TOKEN,
    TO_SAMPLE,
    Checks,
    Decodes,
    Groups,
    PromptChunks,
    StepPlan,
)
from minisgl_backend.request import IntArray


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan_of(
    chunks: list[tuple[int, int, int, int]],
    decodes: list[tuple[int, int]],
    checks: Sequence[tuple[int, int, int]] = (),
) -> StepPlan:
    """Chunks of (row, start, length, whether it is the last), decodes of (row, position), and
    checks of (row, start, length). Tokens are numbered from 0 on, those of checks from 100 on."""
    rows, starts, lengths, are_last = _columns(chunks, 4)
    check_rows, check_starts, check_lengths = _columns(checks, 3)
    decode_rows, positions = _columns(decodes, 2)
    return StepPlan(
        step=0,
        checks=Checks(
            rows=check_rows,
            starts=check_starts,
            lengths=check_lengths,
            tokens=ints(*range(100, 100 + check_lengths.sum())),
        ),
        chunks=PromptChunks(
            rows=rows,
            starts=starts,
            lengths=lengths,
            next_tokens=np.where(are_last, TO_SAMPLE, 7).astype(np.int32),
            tokens=ints(*range(lengths.sum())),
        ),
        decodes=Decodes(rows=decode_rows, positions=positions),
    )


def _columns(lines: Sequence[tuple[int, ...]], width: int) -> list[IntArray]:
    return list(np.array(lines, np.int32).reshape(len(lines), width).T)


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
    alone = FlatBatch.of(replace(plan, chunks=PromptChunks()))
    assert alone.tokens.tolist() == [LAST_TOKEN, LAST_TOKEN]


def test_the_token_after_each_is_named_unless_one_is_sampled() -> None:
    plan = plan_of([(3, 0, 3, 0), (5, 8, 2, 1), (6, 2, 1, 0)], [(2, 9)], [(1, 7, 3)])
    (_, b, c), (_, e), _ = np.split(plan.chunks.tokens, [3, 5])
    named = [b, c, 7, e, TO_SAMPLE, 7]
    assert FlatBatch.of(plan).next_tokens.tolist() == [*[TO_SAMPLE] * 4, *named]
    alone = FlatBatch.of(replace(plan, chunks=PromptChunks()))
    assert alone.next_tokens.tolist() == [TO_SAMPLE] * 4


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


CHECKED = replace(
    plan_of([(3, 0, 4, 1), (5, 8, 2, 0)], [(2, 9), (4, 30)], [(1, 7, 3), (0, 4, 2)]),
    groups=Groups(ints(2), ints(0), ints(1), ints(4, 2)),
)
"""Rows with guesses beside prompts and decoding rows."""


def test_checks_come_after_decoding_rows_and_before_prompts() -> None:
    batch = FlatBatch.of(CHECKED)
    assert batch.rows.tolist() == [2, 4, 1, 1, 1, 0, 0, 3, 3, 3, 3, 5, 5]
    assert batch.positions.tolist() == [9, 30, 7, 8, 9, 4, 5, 0, 1, 2, 3, 8, 9]
    assert batch.tokens.tolist() == [LAST_TOKEN] * 2 + [*range(100, 105), *range(6)]
    assert (batch.num_decodes, batch.num_checks) == (2, 2)
    assert batch.check_lengths.tolist() == [1, 1, 3, 2]
    assert batch.chunk_rows.tolist() == [1, 0, 3, 5]
    assert batch.chunk_ends.tolist() == [10, 6, 4, 10]
    assert batch.chunk_offsets.tolist() == [2, 5, 7, 11, 13]
    assert batch.groups.members.tolist() == [1, 0]


def test_samples_of_checks_come_first() -> None:
    batch = FlatBatch.of(CHECKED)
    at = batch.sample_indices
    assert batch.sample_rows.tolist() == [1, 1, 1, 0, 0, 3, 2, 4] == batch.rows[at].tolist()
    assert batch.sample_positions.tolist() == [8, 9, 10, 5, 6, 4, 10, 31]
    assert batch.sample_positions.tolist() == (batch.positions[at] + 1).tolist()
    assert batch.tokens[at].tolist() == [*range(100, 105), 3, LAST_TOKEN, LAST_TOKEN]


def test_steps_without_guesses_have_no_checks() -> None:
    batch = FlatBatch.of(plan_of([(3, 0, 4, 1), (5, 8, 2, 0)], [(2, 9), (4, 30)]))
    assert not len(batch.check_lengths) and batch.num_checks == 0
