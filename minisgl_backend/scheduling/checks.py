"""What came out of a step's checks: which guesses were right, row by row.

Knows plans and what steps sample. Must not know rows, requests, or how guesses are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import Checks, SampledTokens, StepPlan
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RowCheck:
    """The guesses of a row in a step, and the index of the sample that checks the first of them;
    the others follow, and one after the last guess."""

    row: int
    guesses: IntArray
    first: int

    def samples(self, token_ids: IntArray) -> IntArray:
        """Those of the step's samples that are the row's, int32[1 + number of guesses]."""
        return token_ids[self.first : self.first + 1 + len(self.guesses)]


def row_checks(plan: StepPlan, tokens: SampledTokens) -> list[RowCheck]:
    """The checks of a plan. Their samples come first."""
    if not len(plan.checks.rows):
        return []
    checks = _as_computed(plan.checks, tokens.checked)
    firsts = (np.cumsum(checks.lengths) - checks.lengths).tolist()
    guesses = checks.guesses().items()
    return [RowCheck(row, of, first) for (row, of), first in zip(guesses, firsts, strict=True)]


def moved_back(plan: StepPlan, before: StepPlan, tokens: SampledTokens) -> StepPlan:
    """A plan that ``assumes_right``, once the ``tokens`` of the step before it are known: rows with
    guesses begin after those that were right."""
    num_wrong = {}
    for check in row_checks(before, tokens):
        is_wrong = check.samples(tokens.token_ids)[:-1] != check.guesses
        if is_wrong.any():
            num_wrong[check.row] = len(is_wrong) - int(is_wrong.argmax())
    rows = plan.checks.rows.tolist()
    starts = plan.checks.starts - np.array([num_wrong.get(row, 0) for row in rows], np.int32)
    return replace(plan, checks=replace(plan.checks, starts=starts), assumes_right=False)


def _as_computed(checks: Checks, tokens: IntArray | None) -> Checks:
    """The checks with the ``tokens`` that the device has computed; these are None if the plan had
    all of them."""
    if tokens is None:
        if (checks.tokens < 0).any():
            raise InvariantError("the device does not tell the tokens of checks that it knows")
        return checks
    if len(tokens) != len(checks.tokens):
        raise InvariantError(f"{len(tokens)} tokens of checks, not {len(checks.tokens)}")
    return replace(checks, tokens=tokens)
