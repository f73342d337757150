"""Which rows have unsettled states, and in which places their last checks have kept something.

A step that checks guesses gives each of its decoding rows a place, for what its tokens would add to
the row's states (``kernels.checks``). The row's next step tells how many of them count: all before
its first position there. Then the states are settled, and the place is free.

Knows rows, positions and places. Must not know tensors, or why guesses were right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from minisgl_backend.device.base import HostArray
from minisgl_backend.errors import InvariantError
from minisgl_backend.kernels.checks import CHECK_COLUMNS, NO_PLACE
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray

Due: TypeAlias = list[tuple[int, int, int, int]]
"""Checks to settle, as ``Settling.of`` takes them."""


@dataclass(frozen=True, slots=True, eq=False)
class UnsettledStep:
    """What a captured step with guesses does to states: it settles the checks that are ``due``, and
    leaves its decoding rows unsettled. ``lengths`` int32 [num_rows]: the numbers of their tokens
    (``execution.checks.lengths_as_decodes``)."""

    lengths: IntArray
    due: Due


@dataclass(frozen=True, slots=True)
class _Check:
    """The tokens ``start`` to ``start + length - 1`` of a row, and their place."""

    place: int
    start: int
    length: int


class UnsettledRows:
    """The rows whose states are unsettled; at most ``num_places``. Never ``dummy_row``: its checks
    are padding."""

    def __init__(self, num_places: int, most_tokens: int, dummy_row: int) -> None:
        """Each place has memory for ``most_tokens``."""
        self._num_places = num_places
        self._most_tokens = most_tokens
        self._dummy_row = dummy_row
        self._free = list(range(num_places - 1, -1, -1))
        self._checks: dict[int, _Check] = {}

    def begin(
        self, rows: IntArray | HostArray, starts: IntArray | HostArray, lengths: IntArray
    ) -> IntArray:
        """Give places to the checks of different ``rows``, [num_checks] each. Returns the
        lines of ``CheckedTokens``, int32 [sum of lengths, CHECK_COLUMNS]."""
        columns, places = (rows.tolist(), starts.tolist(), lengths.tolist()), []
        for row, start, length in zip(*columns, strict=True):
            if row == self._dummy_row:
                places.append(NO_PLACE)
                continue
            if not self._free or length > self._most_tokens:
                raise InvariantError(
                    f"{len(self._checks)} rows are unsettled, and one more has a check of {length} "
                    f"tokens, with memory for {self._num_places} checks of {self._most_tokens}"
                )
            if row in self._checks:
                raise InvariantError(f"row {row} has a check before its last one is settled")
            self._checks[row] = _Check(self._free.pop(), start, length)
            places.append(self._checks[row].place)
        ends = np.cumsum(lengths)
        lines = np.empty((int(ends[-1]), CHECK_COLUMNS), np.int32)
        lines[:, 0] = np.repeat(places, lengths)
        lines[:, 1] = np.arange(len(lines)) - np.repeat(ends - lengths, lengths)
        lines[:, 2] = np.repeat(lengths, lengths)
        return lines

    def take_due(self, plan: StepPlan) -> Due:
        """The checks to settle before ``plan`` computes anything. Those of released rows are
        dropped."""
        for row in plan.released_rows.tolist():
            self._pop(row)
        if not self._checks:
            return []
        due = []
        checks, chunks, decodes = plan.checks, plan.chunks, plan.decodes
        rows = np.concatenate([checks.rows, chunks.rows, decodes.rows]).tolist()
        firsts = np.concatenate([checks.starts, chunks.starts, decodes.positions]).tolist()
        for row, first in zip(rows, firsts, strict=True):
            if (check := self._pop(row)) is None:
                continue
            count = first - check.start
            if not 0 < count <= check.length:
                raise InvariantError(
                    f"row {row} goes on at position {first}, after a check of {check.length} "
                    f"tokens from position {check.start}"
                )
            due.append((row, check.place, check.start, count))
        return due

    def _pop(self, row: int) -> _Check | None:
        """The check of a row, if it has one, whose place is free from now on."""
        check = self._checks.pop(row, None)
        if check is not None:
            self._free.append(check.place)
        return check
