"""Steps that check guesses, as decode steps: each token is as good as a row of its own.

A token reads the keys and values of all tokens before it, and those of its own step are in their
pages before attention is computed. So the last token of a row and the guesses after it can be
computed like decoding rows that have the same pages, each at its own position. Then the step needs
no graphs but those of decode steps. But each guess reads the row's pages again, while a chunk reads
them once. And layers with recurrent states need the tokens in order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minisgl_backend.plan import LAST_TOKEN, NO_GROUPS, Decodes, Groups, StepPlan
from minisgl_backend.request import EMPTY, IntArray


def as_decodes(plan: StepPlan, most_read_again: int | None) -> tuple[Decodes, IntArray, Groups]:
    """What a step with chunks decodes, in the order of ``StepPlan.sample_rows``, where rows with
    guesses occur several times; its tokens, int32 [num_decodes], each a token id or ``LAST_TOKEN``;
    and the plan's groups, by index. Nothing if a chunk does not consist of a row's last token and
    guesses, or if the guesses would read more positions than ``most_read_again``
    (``PagedAttention``)."""
    chunks, num_decodes = plan.chunks, len(plan.decodes.rows)
    num_guesses = chunks.lengths - 1
    if (num_guesses != chunks.num_sampled - 1).any() or not num_guesses.all():
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
