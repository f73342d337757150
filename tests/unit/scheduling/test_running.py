"""The columns: tokens, ends, and what their check finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray, Request, RequestId, SamplingParams
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.sequence import Sequence


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def taken(rows: RunningRows, number: int, sampling: SamplingParams) -> Sequence:
    """A sequence with a one-token prompt and a row."""
    request = Request(id=RequestId(number), prompt=ints(1), sampling=sampling)
    sequence = Sequence(request, (number, number), request.prompt)
    sequence.row = rows.take(sequence, num_cached_tokens=0, capacity=1000)
    return sequence


def test_output_is_kept_in_order_however_long() -> None:
    rows = RunningRows(3)
    first = taken(rows, 0, SamplingParams(max_tokens=999))
    second = taken(rows, 1, SamplingParams(max_tokens=999))
    for token in range(600):
        rows.append(ints(first.row), ints(token))
        if token % 2:
            rows.append(ints(second.row), ints(-token))
    assert rows.output(first.row).tolist() == list(range(600))
    assert rows.output(second.row).tolist() == [-token for token in range(600) if token % 2]
    rows.give_back(first.row)
    third = taken(rows, 2, SamplingParams())
    assert third.row == first.row
    assert rows.output(third.row).tolist() == []


def test_stop_ids_are_those_of_the_row() -> None:
    rows = RunningRows(3)
    for number, stop_ids in enumerate([(5,), (), tuple(range(10, 50))]):
        taken(rows, number, SamplingParams(max_tokens=99, stop_token_ids=stop_ids))
        rows.plan_prefill(number, 1)
    rows.landed(ints(0, 1, 2), ints(1, 1, 1))
    for token, expected in [
        (5, [True, False, False]),
        (0, [False, False, False]),
        (49, [False, False, True]),
    ]:
        stopped, full = rows.ends(ints(0, 1, 2), ints(token, token, token))
        assert stopped.tolist() == expected
        assert not full.any()


def test_stop_ids_leave_with_their_sequence() -> None:
    rows = RunningRows(1)
    row = taken(rows, 0, SamplingParams(stop_token_ids=(5, 6))).row
    rows.give_back(row)
    taken(rows, 1, SamplingParams(stop_token_ids=(7,)))
    rows.plan_prefill(row, 1)
    rows.landed(ints(row), ints(1))
    assert rows.ends(ints(row), ints(6))[0].tolist() == [False]
    assert rows.ends(ints(row), ints(7))[0].tolist() == [True]


def test_many_stop_ids_cost_only_while_their_sequence_is_there() -> None:
    rows = RunningRows(2)
    for number, stop_ids in enumerate([(5,), tuple(range(10, 50))]):
        taken(rows, number, SamplingParams(max_tokens=99, stop_token_ids=stop_ids))
        rows.plan_prefill(number, 1)
    rows.landed(ints(0, 1), ints(1, 1))
    assert rows._stop_ids.shape == (2, 40)
    rows.give_back(1)
    assert rows._stop_ids.shape == (2, 1)
    assert rows.ends(ints(0), ints(5))[0].tolist() == [True]


def test_a_row_decodes_until_its_last_token_is_planned() -> None:
    rows = RunningRows(1)
    sequence = taken(rows, 0, SamplingParams(max_tokens=3))
    rows.plan_prefill(sequence.row, 1)
    rows.start_decoding(sequence.row)
    assert rows.ready_to_decode().tolist() == [0]
    assert rows.plan_decode(ints(0)).tolist() == [1]
    assert rows.ready_to_decode().tolist() == [0]
    assert rows.plan_decode(ints(0)).tolist() == [2]
    assert rows.ready_to_decode().tolist() == []
    assert rows.in_flight[0] == 3
    for end, is_full in ((1, False), (2, False), (3, True)):
        rows.landed(ints(0), ints(end))
        assert rows.ends(ints(0), ints(9))[1].tolist() == [is_full]


def test_a_row_with_steps_in_flight_is_not_given_back() -> None:
    rows = RunningRows(1)
    sequence = taken(rows, 0, SamplingParams())
    rows.plan_prefill(sequence.row, 1)
    with pytest.raises(InvariantError, match="row 0 is given back with steps in flight"):
        rows.give_back(sequence.row)


def test_a_free_row_has_no_sequence() -> None:
    with pytest.raises(InvariantError, match="row 1 has no sequence"):
        RunningRows(2).sequence(1)


def drop(rows: RunningRows) -> None:
    rows.sequences[0] = None


def free_twice(rows: RunningRows) -> None:
    rows._free[0] = 0


def revive(rows: RunningRows) -> None:
    rows.decoding[1] = True


def overcommit(rows: RunningRows) -> None:
    rows.in_flight[0] = -1


def linger(rows: RunningRows) -> None:
    rows.retiring[0] = True


def overplan(rows: RunningRows) -> None:
    rows.planned[0] = 2000


@pytest.mark.parametrize("damage", [drop, free_twice, revive, overcommit, linger, overplan])
def test_check_sees_contradictions(damage: Callable[[RunningRows], None]) -> None:
    rows = RunningRows(2)
    taken(rows, 0, SamplingParams())
    rows.check()
    damage(rows)
    with pytest.raises(InvariantError):
        rows.check()
