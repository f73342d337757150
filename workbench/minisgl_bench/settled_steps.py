"""The steps of a run that count: those in which all requests of a batch decode.

Requests of equal length are submitted at once. The first ones decode while the last ones are still
prefilled, so each asks for more tokens than there are steps to measure. Knows numbers of tokens and
when tokens came. Must not know what the requests ask for otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

SETTLING: Final = 8
"""Steps after the last prefill that are not counted."""


def spare_tokens(batch_size: int, context: int, max_prefill_tokens: int) -> int:
    """How many more tokens than measured steps each of ``batch_size`` requests needs, if a step
    computes at most ``max_prefill_tokens`` of their prompts of ``context`` tokens."""
    return -(-batch_size * context // max_prefill_tokens) + 2 * SETTLING


def settled_steps_ms(times_s: Sequence[float], steps: int) -> list[float]:
    """Milliseconds of each of ``steps`` settled steps.

    ``times_s`` are those of the last request to begin: it decodes with all others until the first
    one ends.
    """
    times_ms = np.array(times_s[SETTLING : SETTLING + steps + 1]) * 1e3
    return [float(duration) for duration in np.diff(times_ms)]
