"""Steps that check guesses, as decode steps: each token is as good as a row of its own.

A token reads the keys and values of all tokens before it, and those of its own step are in their
pages before attention is computed. So the last token of a row and the guesses after it can be
computed like decoding rows that have the same pages, each at its own position. Then the step needs
no graphs but those of decode steps. But each guess reads the row's pages again, while a chunk reads
them once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minisgl_backend.plan import LAST_TOKEN, Checks, Decodes, Groups, StepPlan
from minisgl_backend.request import EMPTY, IntArray


def are_decoded(checks: Checks, most_read_again: int | None) -> bool:
    """Whether guesses are computed as decoding rows: unless these would read more positions than
    ``most_read_again`` (``PagedAttention``)."""
    if most_read_again is None or not len(checks.rows):
        return True
    return int((checks.lengths - 1) @ checks.starts.astype(np.int64)) <= most_read_again


def as_decodes(plan: StepPlan) -> tuple[Decodes, IntArray, Groups]:
    """What a step decodes if checks are decoded, which come first, and whose rows occur several
    times; its tokens, int32 [num_decodes], each a token id or a number below 0 as in plans, or none
    if all are ``LAST_TOKEN``; and the plan's groups, by index."""
    checks, decodes, groups = plan.checks, plan.decodes, plan.groups_by_index
    if not len(checks.rows):
        return decodes, EMPTY, groups
    last = np.full(len(decodes.rows), LAST_TOKEN, np.int32)
    return (
        Decodes(
            np.concatenate([checks.token_rows, decodes.rows]),
            np.concatenate([checks.positions, decodes.positions]),
        ),
        np.concatenate([checks.tokens, last]),
        replace(groups, members=groups.members + np.int32(len(checks.tokens))),
    )


def lengths_as_decodes(plan: StepPlan) -> IntArray:
    """The numbers of tokens of rows in ``as_decodes``, int32 [num_rows]; none if no row has
    guesses."""
    if not len(plan.checks.rows):
        return EMPTY
    return np.concatenate([plan.checks.lengths, np.ones(len(plan.decodes.rows), np.int32)])
