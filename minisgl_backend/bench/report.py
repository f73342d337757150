"""How a benchmark shows its figures: one table for people, one JSON file for programs.

Knows names and numbers only; what they mean is the benchmark's business.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from minisgl_backend.runtime.engine import EngineInfo

json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="also write the figures to this file",
)


profile_option = click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="write a trace of what is measured, to be opened in chrome://tracing",
)


@contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Trace what runs inside to ``path``: a GPU's kernels, or the operations of this thread."""
    if path is None:
        yield
        return
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def engine_facts(info: EngineInfo) -> dict[str, Any]:
    """What figures of an engine depend on."""
    import torch

    facts = {
        "model": info.architecture,
        "dtype": info.dtype,
        "attention": info.attention_backend,
        "page_size": info.page_size,
        "pages": info.num_pages,
        "torch": torch.__version__,
    }
    if info.device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(info.device)
    return facts


class Report:
    """Rows of figures under one title."""

    def __init__(self, title: str, *, info: Mapping[str, Any] | None = None) -> None:
        self.title = title
        self.info = {
            **(info or {}),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
        }
        self.rows: list[dict[str, Any]] = []

    def add(self, **figures: Any) -> None:
        """One row; all rows of a report have the same names."""
        self.rows.append(figures)

    def emit(self, json_path: Path | None = None) -> None:
        """Print the table; in the file the keys of a single row also stand at the top."""
        table = Table(title=self.title, caption=", ".join(f"{k} {v}" for k, v in self.info.items()))
        for name in self.rows[0]:
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*map(_shown, row.values()))
        Console(width=max(120, Console().width)).print(table)
        if json_path is not None:
            flat = self.rows[0] if len(self.rows) == 1 else {}
            content = {"title": self.title, "info": self.info, **flat, "rows": self.rows}
            json_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
