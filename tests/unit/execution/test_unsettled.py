"""Which rows' states are unsettled after steps that check guesses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.unsettled import UnsettledRows
from minisgl_backend.kernels.checks import NO_PLACE
from tests.unit.execution.test_flat_batch import ints, plan_of

DUMMY = 9


@pytest.fixture
def rows() -> UnsettledRows:
    return UnsettledRows(2, 4, DUMMY)


def test_each_token_has_a_line(rows: UnsettledRows) -> None:
    lines = rows.begin(ints(4, 1), ints(20, 7), ints(3, 1))
    assert lines[:, 1:].tolist() == [[0, 3], [1, 3], [2, 3], [0, 1]]
    first, second = lines[0, 0], lines[3, 0]
    assert lines[:, 0].tolist() == [first] * 3 + [second]
    assert {int(first), int(second)} == {0, 1}


def test_the_next_step_of_a_row_tells_how_many_tokens_count(rows: UnsettledRows) -> None:
    lines = rows.begin(ints(4, 1), ints(20, 7), ints(3, 4))
    decoding, checking = int(lines[0, 0]), int(lines[3, 0])
    plan = plan_of([(3, 0, 5, 1)], [(2, 50), (4, 21)], [(1, 10, 2)])
    assert rows.take_due(plan) == [(1, checking, 7, 3), (4, decoding, 20, 1)]
    assert rows.take_due(plan) == []


def test_rows_that_wait_stay_unsettled(rows: UnsettledRows) -> None:
    place = int(rows.begin(ints(4), ints(20), ints(3))[0, 0])
    assert rows.take_due(plan_of([], [(2, 50)])) == []
    other = int(rows.begin(ints(2), ints(51), ints(2))[0, 0])
    assert place != other
    assert rows.take_due(plan_of([], [(4, 23)])) == [(4, place, 20, 3)]


def test_places_are_free_once_their_rows_are_settled_or_released(rows: UnsettledRows) -> None:
    for position in range(10, 30, 3):
        rows.begin(ints(4, 1), ints(position, position), ints(3, 3))
        released = replace(plan_of([], [(4, position + 3)]), released_rows=ints(1, 2))
        assert [row for row, *_ in rows.take_due(released)] == [4]


def test_a_released_row_is_not_settled_for_the_next_request(rows: UnsettledRows) -> None:
    rows.begin(ints(4), ints(20), ints(3))
    plan = replace(plan_of([(4, 0, 8, 1)], []), released_rows=ints(4))
    assert rows.take_due(plan) == []


@pytest.mark.parametrize("position", [20, 24, 0])
def test_a_row_goes_on_within_its_check(rows: UnsettledRows, position: int) -> None:
    rows.begin(ints(4), ints(20), ints(3))
    with pytest.raises(InvariantError, match=f"row 4 goes on at position {position}"):
        rows.take_due(plan_of([], [(4, position)]))


def test_a_row_has_one_check(rows: UnsettledRows) -> None:
    rows.begin(ints(4), ints(20), ints(3))
    with pytest.raises(InvariantError, match="before its last one is settled"):
        rows.begin(ints(4), ints(23), ints(3))


def test_there_are_no_more_checks_than_places(rows: UnsettledRows) -> None:
    rows.begin(ints(4, 1), ints(20, 7), ints(3, 1))
    with pytest.raises(InvariantError, match="2 rows are unsettled"):
        rows.begin(ints(5), ints(23), ints(3))


def test_a_check_has_no_more_tokens_than_a_place(rows: UnsettledRows) -> None:
    with pytest.raises(InvariantError, match="memory for 2 checks of 4"):
        rows.begin(ints(5), ints(23), ints(5))


def test_checks_of_the_dummy_row_are_padding(rows: UnsettledRows) -> None:
    for _ in range(3):
        lines = rows.begin(ints(DUMMY, DUMMY), ints(0, 0), ints(2, 1))
        assert lines.tolist() == [[NO_PLACE, 0, 2], [NO_PLACE, 1, 2], [NO_PLACE, 0, 1]]
    assert rows.take_due(plan_of([], [(DUMMY, 0)])) == []
