"""From the moments of each request to figures: percentiles, throughput, goodput.

Knows times and counts only. The usual words: TTFT is the time to the first token, TPOT the time per
output token after the first, E2E that of the whole request. A gap lies between two chunks of a
stream, each of which brings one token or several. Times of an open loop count from when a request
was due, so that a client that is late cannot make a server look fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minisgl_backend.errors import ConfigError
from minisgl_kit.outcome import Outcome
from minisgl_kit.report import percentiles


def objectives_of(text: str) -> dict[str, float]:
    """Bounds in milliseconds, of ``ttft=200,tpot=50,e2e=3000`` or some of them."""
    objectives: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"an objective is ttft, tpot or e2e, got {name!r}")
        try:
            objectives[name] = float(value)
        except ValueError:
            objectives[name] = math.nan
        if not 0 < objectives[name] < math.inf:
            raise ConfigError(f"{name} must be a number of milliseconds, got {value!r}")
    return objectives


def figures_of(outcomes: Sequence[Outcome], objectives: Mapping[str, float]) -> dict[str, Any]:
    """The figures of one load; times in milliseconds, of answered requests alone.

    ``reasons`` are what the first error of each code said.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
    num_chunks = sum(len(one.chunks_s) for one in good)
    num_tokens = sum(one.num_output_tokens or 0 for one in good)
    num_input = sum(one.num_input_tokens or 0 for one in good)
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "errors": dict(Counter(one.error for one in outcomes if one.error is not None)),
        "reasons": {one.error: one.reason for one in reversed(outcomes) if one.error is not None},
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "input_tokens": num_input,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "tokens_per_chunk": num_tokens / num_chunks if num_chunks else 0.0,
        "cached_share": sum(one.num_cached_tokens or 0 for one in good) / max(1, num_input),
        "ttft_ms": percentiles(one.ttft_ms for one in good if one.ttft_ms is not None),
        "tpot_ms": percentiles(one.tpot_ms for one in good if one.tpot_ms is not None),
        "gap_ms": percentiles(
            float(gap_s) * 1e3 for one in good for gap_s in np.diff(one.chunks_s)
        ),
        "e2e_ms": percentiles(one.e2e_ms for one in good),
    }
    if objectives:
        num_met = sum(one.meets(objectives) for one in outcomes)
        figures["goodput_per_s"] = num_met / seconds
        figures["goodput_share"] = num_met / len(outcomes)
    return figures
