"""Plans by hand."""

from __future__ import annotations

import numpy as np

from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray


def make_plan(**arrays: IntArray) -> StepPlan:
    """A plan of these arrays; all others are empty."""
    names = (
        "released_rows broken_pages grant_rows grant_indices grant_pages copy_sources "
        "copy_targets copy_lengths prefill_rows prefill_starts prefill_lengths prefill_samples "
        "prefill_tokens begun_from saved_chunks saved_positions saved_snapshots decode_rows "
        "decode_positions group_sizes group_begins group_ends group_rows masked_rows "
        "score_chunks score_starts score_lengths score_tokens"
    )
    values = {name: np.empty(0, np.int32) for name in names.split()} | arrays
    return StepPlan(step=0, admissions=(), **values)
