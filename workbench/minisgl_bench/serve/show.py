"""The figures of several loads: one table for people, one JSON file for programs, plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from minisgl_kit.loads import Load
from minisgl_kit.outcome import Outcome
from minisgl_kit.report import PERCENTILES, machine_facts, shown, write_json


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, and what came of it."""

    load: Load
    outcomes: Sequence[Outcome]
    figures: Mapping[str, Any]

    @property
    def is_answered(self) -> bool:
        """Whether one request was, at least."""
        return any(outcome.error is None for outcome in self.outcomes)


_TIMES: Final = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "gap_ms": "gap between chunks, ms",
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
    title: str = "serve",
) -> None:
    """Print the table, and write the file if one is asked for; both say what figures depend on.

    ``info`` is what the command knows of this; the machine and the bounds are added here. Below the
    table stands what the first error of each code said.
    """
    bounds = {f"{name} within": f"{bound:g} ms" for name, bound in objectives.items()}
    info = {**info, **machine_facts(), **bounds}
    _print_table(measured, info, title)
    if json_path is not None:
        rows = [{"load": one.load.name, "level": one.load.level, **one.figures} for one in measured]
        write_json(json_path, {"title": title, "info": info, "rows": rows})


def _print_table(measured: Sequence[Measured], info: Mapping[str, Any], title: str) -> None:
    """A row a figure, a column a load."""
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
    """End the command with code 1 where a load got no answer at all: its figures say nothing."""
    silent = [one.load.label for one in measured if not one.is_answered]
    if silent:
        raise click.ClickException(f"no request was answered at {', '.join(silent)}")
