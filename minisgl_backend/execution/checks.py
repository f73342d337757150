"""Steps that check guesses, as decode steps: each token is as good as a row of its own.

A token reads the keys and values of all tokens before it, and those of its own step are in their
pages before attention is computed. So the last token of a row and the guesses after it can be
computed like decoding rows that have the same pages, each at its own position. Then the step needs
no graphs but those of decode steps. Only layers with recurrent states need the tokens in order.
"""

from __future__ import annotations

import numpy as np

from minisgl_backend.plan import NO_GROUPS, NO_TOKEN, Decodes, Groups, StepPlan


def as_decodes(plan: StepPlan, page_size: int) -> tuple[Decodes, Groups]:
    """The tokens of a step with chunks, in the order of ``StepPlan.sample_rows``, and the groups of
    those that share pages, by index. Nothing if a chunk does not consist of a row's last token and
    guesses."""
    chunks, decodes = plan.chunks, plan.decodes
    lengths = chunks.lengths
    if not (chunks.have_guesses & (chunks.num_sampled == lengths)).all():
        return Decodes(), NO_GROUPS
    told = decodes.told if len(decodes.told) else np.full(len(decodes.rows), NO_TOKEN, np.int32)
    flat = Decodes(
        plan.sample_rows, plan.sample_positions - 1, np.concatenate([chunks.tokens, told])
    )
    # the pages before a row's last token are full of committed positions
    ends, others = chunks.starts // page_size, plan.groups_by_index
    has_pages = ends > 0
    groups = Groups(
        np.concatenate([lengths[has_pages], others.sizes]),
        np.concatenate([np.zeros_like(ends[has_pages]), others.begins]),
        np.concatenate([ends[has_pages], others.ends]),
        np.concatenate(
            [
                np.flatnonzero(np.repeat(has_pages, lengths)).astype(np.int32),
                len(chunks.tokens) + others.members,
            ]
        ),
    )
    return flat, groups
