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

from minisgl_backend.plan import NO_GROUPS, NO_TOKEN, Decodes, Groups, StepPlan


def as_decodes(plan: StepPlan, most_read_again: int | None) -> tuple[Decodes, Groups]:
    """The tokens of a step with chunks, in the order of ``StepPlan.sample_rows``, and the plan's
    groups, by index. Nothing if a chunk does not consist of a row's last token and guesses, or if
    the guesses would read more positions than ``most_read_again`` (``PagedAttention``)."""
    chunks, decodes = plan.chunks, plan.decodes
    num_guesses = chunks.lengths - 1
    if (num_guesses != chunks.num_sampled - 1).any() or not num_guesses.all():
        return Decodes(), NO_GROUPS
    if most_read_again is not None and int(num_guesses @ chunks.starts) > most_read_again:
        return Decodes(), NO_GROUPS
    told = decodes.told if len(decodes.told) else np.full(len(decodes.rows), NO_TOKEN, np.int32)
    tokens = np.concatenate([chunks.tokens, told])
    groups = plan.groups_by_index
    members = groups.members + np.int32(len(chunks.tokens))
    return (
        Decodes(plan.sample_rows, plan.sample_positions - 1, tokens),
        replace(groups, members=members),
    )
