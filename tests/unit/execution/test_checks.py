"""Steps that check guesses, as decode steps."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.execution.checks import as_decodes
from minisgl_backend.plan import LAST_TOKEN, NO_GROUPS, Decodes, Groups, PromptChunks, StepPlan
from minisgl_backend.request import IntArray


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def guesses(*chunks: tuple[int, int, tuple[int, ...]]) -> PromptChunks:
    """Chunks of (row, start, tokens), with a sample after each token."""
    rows, starts, tokens = zip(*chunks, strict=True)
    lengths = ints(*map(len, tokens))
    return PromptChunks(ints(*rows), ints(*starts), lengths, lengths, ints(*sum(tokens, ())))


def test_each_token_is_like_a_row_of_its_own() -> None:
    plan = StepPlan(
        step=0,
        chunks=guesses((3, 9, (5, 6, 7)), (0, 2, (8, 9))),
        decodes=Decodes(ints(1, 2), ints(20, 30)),
    )
    decodes, tokens, groups = as_decodes(plan, None)
    assert decodes.rows.tolist() == [3, 3, 3, 0, 0, 1, 2] == plan.sample_rows.tolist()
    assert decodes.positions.tolist() == [9, 10, 11, 2, 3, 20, 30]
    assert tokens.tolist() == [5, 6, 7, 8, 9, LAST_TOKEN, LAST_TOKEN]
    assert not len(groups.sizes)
    assert {of.dtype for of in (decodes.rows, decodes.positions, tokens)} == {np.dtype(np.int32)}


def test_decoding_rows_keep_their_groups() -> None:
    plan = StepPlan(
        step=0,
        chunks=guesses((3, 1, (5, 6)), (4, 40, (7, 8))),
        decodes=Decodes(ints(1, 2, 0), ints(20, 30, 25)),
        groups=Groups(ints(2), ints(0), ints(5), ints(0, 2)),
    )
    _, _, groups = as_decodes(plan, None)
    assert (groups.sizes.tolist(), groups.ends.tolist()) == ([2], [5])
    assert groups.members.tolist() == [6, 5], "rows 0 and 2 are at these indices"


def test_a_long_context_is_not_read_again_for_each_guess() -> None:
    plan = StepPlan(step=0, chunks=guesses((3, 100, (5, 6, 7)), (4, 40, (7, 8))))
    for most, fits in ((240, True), (239, False)):
        decodes, _, _ = as_decodes(plan, most)
        assert len(decodes.rows) == (5 if fits else 0)


@pytest.mark.parametrize("num_sampled", [0, 1])
def test_chunks_of_prompts_are_not_decoded(num_sampled: int) -> None:
    both = guesses((3, 9, (5, 6, 7)), (0, 2, (8,)))
    counts = ints(3, num_sampled)
    chunks = PromptChunks(both.rows, both.starts, both.lengths, counts, both.tokens)
    decodes, tokens, groups = as_decodes(StepPlan(step=0, chunks=chunks), None)
    assert not len(decodes.rows) and not len(tokens) and groups is NO_GROUPS


def test_the_positions_that_many_rows_read_again_are_counted_in_full() -> None:
    many = [(row, 200_000, tuple(range(65))) for row in range(256)]
    decodes, _, _ = as_decodes(StepPlan(step=0, chunks=guesses(*many)), 2**31)
    assert not len(decodes.rows)
