"""Reports of figures: a table for people, a JSON file for programs.

Knows names and numbers only. Must not know what they mean.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

_MOST_COLUMNS: Final = 9
"""A single row with more figures is shown vertically."""
PERCENTILES: Final = (50, 90, 99)


def writable(_context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a path before anything is measured, not after."""
    if path is None:
        return None
    try:
        is_writable = not path.is_dir()  # an empty path is this folder
        if path.exists():
            is_writable &= os.access(path, os.W_OK)
        else:
            check_folder(path.parent)
    except OSError:  # nor can it be looked at
        is_writable = False
    if not is_writable:
        raise click.BadParameter(f"{path} cannot be written", param=option)
    return path


def check_folder(folder: Path) -> None:
    """Raise ``OSError`` if the folder takes no new files, by making one for a moment: root may
    write to any folder, but some have no room or take no files."""
    tempfile.TemporaryFile(dir=folder).close()


json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    help="also write the figures to this file",
)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of figures. They have been printed before, in case that fails."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None


def machine_facts() -> dict[str, Any]:
    """Facts about the machine, on which all figures depend."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }


def percentiles(values_ms: Iterable[float]) -> dict[str, float]:
    """``p50``, ``p90``, ``p99`` and ``mean``, interpolated as by numpy; empty without values."""
    array = np.fromiter(values_ms, dtype=np.float64)
    if not len(array):
        return {}
    named = {f"p{q}": float(np.percentile(array, q)) for q in PERCENTILES}
    return {**named, "mean": float(array.mean())}


def shown(value: Any) -> str:
    """A figure as a cell of a table, with two digits if it is small; None stands for a missing
    figure."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if 0 < abs(value) < 0.1:
            return f"{value:.2g}"
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Report:
    """Rows of figures under one title; ``compared`` holds those of another configuration, and
    ``beside`` more tables of the same run."""

    def __init__(self, title: str, *, info: Mapping[str, Any] | None = None) -> None:
        self.title = title
        self.info = {**(info or {}), **machine_facts()}
        self.rows: list[dict[str, Any]] = []
        self.compared: Report | None = None
        self.beside: list[Report] = []

    def add(self, **figures: Any) -> None:
        """One row; all rows of a report have the same names."""
        self.rows.append(figures)

    def emit(self, json_path: Path | None = None) -> None:
        """Print the table; in the file the keys of a single row are also at the top level."""
        table = Table(title=self.title)
        names = [name.replace("_", " ") for name in self.rows[0]]
        if len(self.rows) == 1 and len(names) > _MOST_COLUMNS:
            table.show_header = False
            table.add_column()
            table.add_column(justify="right")
            for name, value in zip(names, self.rows[0].values(), strict=True):
                table.add_row(name, shown(value))
        else:
            for name in names:
                table.add_column(name, justify="right", overflow="fold")
            for row in self.rows:
                table.add_row(*map(shown, row.values()))
        console = Console(width=max(120, Console().width), highlight=False)
        console.print(table)
        console.print(
            ", ".join(f"{name} {value}" for name, value in self.info.items()), style="dim"
        )
        self.write(json_path)

    def write(self, json_path: Path | None) -> None:
        """Write the file, if one is asked for."""
        if json_path is not None:
            write_json(json_path, self.content())

    def content(self) -> dict[str, Any]:
        """What goes into the file."""
        flat = self.rows[0] if len(self.rows) == 1 else {}
        content = {"title": self.title, "info": self.info, **flat, "rows": self.rows}
        if self.compared is not None:
            content["compared"] = self.compared.content()
        if self.beside:
            content["beside"] = [report.content() for report in self.beside]
        return content
