"""``--compare``: the same measurement of a second configuration, in the same run.

Knows options and figures; must not know what they mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_bench.profiling import labelled
from minisgl_kit.report import Report

compare_option = click.option(
    "--compare",
    metavar="OPTIONS",
    help="measure once more with these options changed, as kv_cache_dtype=fp8_e4m3,page_size=64",
)


def changed(options: EngineOptions, text: str) -> EngineOptions:
    """The options with the changes in ``text``: ``name=value``, separated by commas.

    A value may have commas, as in ``attention_backend=fa,triton``. Raises ``ConfigError``.
    """
    values = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options)}
    for part in re.split(r",(?=\w+=)", text):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--compare takes name=value, separated by commas, got {part!r}")
        values[name] = value
    return EngineOptions.from_mapping(values)


def measure_both(
    measure: Callable[[EngineOptions, Path | None], Report],
    options: EngineOptions,
    compare: str | None,
    *,
    keys: Sequence[str],
    trace: Path | None,
    json_path: Path | None,
) -> None:
    """Measure ``options``, and with ``compare`` the changed options too, and emit the figures.

    ``measure`` takes the options and the path of a trace. ``keys`` are the columns that identify a
    row; they are equal in both. The second engine is built after the first one is closed.
    """
    second = changed(options, compare) if compare else None
    report = measure(options, trace)
    report.emit(json_path)
    if compare and second:
        report.compared = measure(second, trace and labelled(trace, "compared"))
        side_by_side(report, report.compared, compare, keys).emit()
        report.write(json_path)


def side_by_side(first: Report, second: Report, name: str, keys: Sequence[str]) -> Report:
    """A row for each number of the two reports: both values, and the second over the first."""
    report = Report(f"{first.title}: as above, and with {name}", info={})
    for row, other in zip(first.rows, second.rows, strict=True):
        for figure, value in row.items():
            if figure in keys or not _is_number(value) or not _is_number(other[figure]):
                continue
            report.add(
                **{key: row[key] for key in keys},
                figure=figure,
                above=value,
                compared=other[figure],
                ratio=other[figure] / value if value else "-",
            )
    return report


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
