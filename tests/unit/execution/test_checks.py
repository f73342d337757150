"""Steps that check guesses, as decode steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minisgl_backend.execution.checks import are_decoded, as_decodes, lengths_as_decodes
from minisgl_backend.plan import LAST_TOKEN, Checks, Groups
from tests.unit.execution.test_flat_batch import ints, plan_of


def test_each_token_is_like_a_row_of_its_own() -> None:
    plan = plan_of([], [(1, 20), (2, 30)], [(3, 9, 3), (0, 2, 2)])
    decodes, tokens, groups = as_decodes(plan)
    assert decodes.rows.tolist() == [3, 3, 3, 0, 0, 1, 2] == plan.sample_rows.tolist()
    assert decodes.positions.tolist() == [9, 10, 11, 2, 3, 20, 30]
    assert tokens.tolist() == [100, 101, 102, 103, 104, LAST_TOKEN, LAST_TOKEN]
    assert not len(groups.sizes)
    assert {of.dtype for of in (decodes.rows, decodes.positions, tokens)} == {np.dtype(np.int32)}
    assert lengths_as_decodes(plan).tolist() == [3, 2, 1, 1]


def test_decoding_rows_keep_their_groups() -> None:
    plan = replace(
        plan_of([], [(1, 20), (2, 30), (0, 25)], [(3, 1, 2), (4, 40, 2)]),
        groups=Groups(ints(2), ints(0), ints(5), ints(0, 2)),
    )
    _, _, groups = as_decodes(plan)
    assert (groups.sizes.tolist(), groups.ends.tolist()) == ([2], [5])
    assert groups.members.tolist() == [6, 5], "rows 0 and 2 are at these indices"


def test_steps_without_guesses_have_no_lengths() -> None:
    plan = plan_of([], [(1, 20), (2, 30)])
    decodes, tokens, _ = as_decodes(plan)
    assert (decodes.rows.tolist(), tokens.tolist()) == ([1, 2], [])
    assert not len(lengths_as_decodes(plan))
    assert are_decoded(plan.checks, 0)


def test_a_long_context_is_not_read_again_for_each_guess() -> None:
    checks = plan_of([], [], [(3, 100, 3), (4, 40, 2)]).checks
    assert are_decoded(checks, 240) and are_decoded(checks, None)
    assert not are_decoded(checks, 239)


def test_the_positions_that_many_rows_read_again_are_counted_in_full() -> None:
    rows = np.arange(256, dtype=np.int32)
    starts, lengths = np.full_like(rows, 200_000), np.full_like(rows, 65)
    checks = Checks(rows, starts, lengths, np.zeros(256 * 65, np.int32))
    assert not are_decoded(checks, 2**31)
