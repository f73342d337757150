"""Steps that check guesses, as decode steps: each token is as good as a row of its own.

A token reads the keys and values of all tokens before it, and those of its own step are in their
pages before attention is computed. So the last token of a row and the guesses after it can be
computed like decoding rows that have the same pages, each at its own position. Then the step needs
no graphs but those of decode steps. But each guess reads the row's pages again, while a chunk reads
them once. With recurrent states, a step with guesses treats all its decoding rows in a way of its
own (``kernels.checks``), so guesses are never chunks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minisgl_backend.plan import LAST_TOKEN, NO_GROUPS, Decodes, Groups, PromptChunks, StepPlan
from minisgl_backend.request import EMPTY, IntArray


def as_decodes(plan: StepPlan, most_read_again: int | None) -> tuple[Decodes, IntArray, Groups]:
    """What a step with chunks decodes, in the order of ``StepPlan.sample_rows``, where rows with
    guesses occur several times; its tokens, int32 [num_decodes], each a token id or ``LAST_TOKEN``;
    and the plan's groups, by index. Nothing if a chunk is not one of guesses, or if the guesses
    would read more positions than ``most_read_again`` (``PagedAttention``)."""
    chunks, num_decodes = plan.chunks, len(plan.decodes.rows)
    num_guesses = chunks.lengths - 1
    if not chunks.have_guesses.all():
        return Decodes(), EMPTY, NO_GROUPS
    if (
        most_read_again is not None
        and num_guesses @ chunks.starts.astype(np.int64) > most_read_again
    ):
        return Decodes(), EMPTY, NO_GROUPS
    tokens = np.concatenate([chunks.tokens, np.full(num_decodes, LAST_TOKEN, np.int32)])
    groups = plan.groups_by_index
    members = groups.members + np.int32(len(chunks.tokens))
    decodes = Decodes(plan.sample_rows, plan.sample_positions - 1)
    return decodes, tokens, replace(groups, members=members)


def check_lengths(checks: PromptChunks, decodes: Decodes) -> IntArray:
    """The numbers of tokens of the decoding rows of a step with ``checks`` and ``decodes``; none if
    it has no checks (``FlatBatch``)."""
    if not len(checks.rows):
        return EMPTY
    return np.concatenate([checks.lengths, np.ones(len(decodes.rows), np.int32)])


def split(plan: StepPlan) -> tuple[StepPlan, PromptChunks]:
    """A plan without the chunks with guesses, which come first, and these."""
    chunks, snapshots = plan.chunks, plan.snapshots
    count = int(np.count_nonzero(chunks.have_guesses))
    checks, rest = chunks.parted(count)
    without = replace(
        plan,
        chunks=rest,
        snapshots=replace(
            snapshots,
            begun_from=snapshots.begun_from[count:],
            saved_chunks=snapshots.saved_chunks - np.int32(count),
        ),
        scores=replace(plan.scores, chunks=plan.scores.chunks - np.int32(count)),
    )
    return without, checks
