"""From the times of each request to figures, and from these to a table and a JSON file.

Knows times and counts only. The usual terms: TTFT is the time to the first token, TPOT the time per
output token after the first, E2E that of the whole request. The time between chunks is that from
the arrival of one chunk of a stream to the arrival of the next; a chunk brings one or more tokens.
Times of an open loop count from when a request was due, so that a late client cannot make a server
look fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl_backend.errors import ConfigError
from minisgl_kit.calls import Outcome
from minisgl_kit.loads import Load
from minisgl_kit.report import PERCENTILES, machine_facts, percentiles, shown, write_json


def objectives_of(text: str) -> dict[str, float]:
    """Bounds in milliseconds, from a text like ``ttft=200,tpot=50,e2e=3000`` or parts of it."""
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
    """The figures of one load; times are in milliseconds, of answered requests only.

    ``reasons`` has the message of the first error of each code. Figures are None if no answer has
    the counts that they need, as other servers may not send them.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
    num_chunks = sum(len(one.chunks_s) for one in good)
    num_tokens = _sum(one.num_output_tokens for one in good)
    num_input = _sum(one.num_input_tokens for one in good)
    num_cached = _sum(one.num_cached_tokens for one in good)
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "errors": dict(Counter(one.error for one in outcomes if one.error is not None)),
        "reasons": {one.error: one.reason for one in reversed(outcomes) if one.error is not None},
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "input_tokens": num_input,
        "output_tokens": num_tokens,
        "output_tokens_per_s": _over(num_tokens, seconds),
        "tokens_per_chunk": _over(num_tokens, num_chunks),
        "cached_share": _over(num_cached, num_input),
        "ttft_ms": percentiles(one.ttft_ms for one in good if one.ttft_ms is not None),
        "tpot_ms": percentiles(one.tpot_ms for one in good if one.tpot_ms is not None),
        "between_chunks_ms": percentiles(
            float(seconds) * 1e3 for one in good for seconds in np.diff(one.chunks_s)
        ),
        "e2e_ms": percentiles(one.e2e_ms for one in good),
    }
    if objectives:
        num_met = sum(one.meets(objectives) for one in outcomes)
        figures["goodput_per_s"] = num_met / seconds
        figures["goodput_share"] = num_met / len(outcomes)
    return figures


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of the counts that are known; None if there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _over(count: int | None, whole: float | None) -> float | None:
    return count / whole if count is not None and whole else None


@dataclass(frozen=True, slots=True)
class Measured:
    """One load and its results."""

    load: Load
    outcomes: Sequence[Outcome]
    figures: Mapping[str, Any]

    @property
    def is_answered(self) -> bool:
        """Whether at least one request was answered."""
        return any(outcome.error is None for outcome in self.outcomes)


_TIMES: Final = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "between_chunks_ms": "time between chunks, ms",
    "e2e_ms": "whole request, ms",
}
_COUNTS: Final = {
    "requests_per_s": "requests answered a second",
    "output_tokens_per_s": "output tokens a second",
    "tokens_per_chunk": "tokens a chunk",
    "cached_share": "share of prompt tokens cached",
    "goodput_per_s": "requests a second within the objectives",
    "goodput_share": "share within the objectives",
}


def emit(
    measured: Sequence[Measured],
    info: Mapping[str, Any],
    objectives: Mapping[str, float],
    json_path: Path | None,
    *,
    title: str,
) -> None:
    """Print the table, and write the file if one is asked for; both list what figures depend on.

    ``info`` holds the command's part of that; the machine and the bounds are added here. Below the
    table is the message of the first error of each code.
    """
    bounds = {f"{name} within": f"{bound:g} ms" for name, bound in objectives.items()}
    info = {**info, **machine_facts(), **bounds}
    _print_table(measured, info, title)
    if json_path is not None:
        rows = [{"load": one.load.name, "level": one.load.level, **one.figures} for one in measured]
        write_json(json_path, {"title": title, "info": info, "rows": rows})


def _print_table(measured: Sequence[Measured], info: Mapping[str, Any], title: str) -> None:
    """One row per figure, one column per load."""
    table = Table(title=title)
    table.add_column("")
    for one in measured:
        table.add_column(one.load.label, justify="right")
    for name, text in {"requests": "requests", **_COUNTS}.items():
        if name in measured[0].figures:
            table.add_row(text, *(shown(one.figures[name]) for one in measured))
    for name, text in _TIMES.items():
        table.add_section()
        for key in (*(f"p{q}" for q in PERCENTILES), "mean"):
            table.add_row(
                f"{text}, {key}", *(shown(one.figures[name].get(key)) for one in measured)
            )
    codes = sorted({code for one in measured for code in one.figures["errors"]})
    for code in codes:
        table.add_section()
        table.add_row(
            f"errors {code}", *(shown(one.figures["errors"].get(code, 0)) for one in measured)
        )
    console = Console(width=max(100, Console().width))
    console.print(table)
    for code in codes:
        reason = next(
            one.figures["reasons"][code] for one in measured if code in one.figures["reasons"]
        )
        console.print(f"{code}: {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(", ".join(f"{name} {value}" for name, value in info.items()), style="dim")


def check_answered(measured: Sequence[Measured]) -> None:
    """End the command with code 1 if a load got no answers at all: its figures are meaningless."""
    silent = [one.load.label for one in measured if not one.is_answered]
    if silent:
        raise click.ClickException(f"no request was answered at {', '.join(silent)}")
