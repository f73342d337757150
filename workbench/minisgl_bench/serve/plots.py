"""Plots of the figures: latency against load, and the distribution of the time to first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minisgl_bench.serve.figures import Measured
from minisgl_kit.report import PERCENTILES

LATENCY: str = "latency.png"
TTFT: str = "ttft.png"


def write_plots(
    folder: Path, measured: Sequence[Measured], objectives: Mapping[str, float]
) -> list[Path]:
    """Both plots as PNG files in the folder."""
    paths = [folder / LATENCY, folder / TTFT]
    for path, figure in zip(
        paths,
        (latency_figure(measured, objectives), ttft_figure(measured, objectives)),
        strict=True,
    ):
        figure.savefig(path, dpi=90)
    return paths


def latency_figure(measured: Sequence[Measured], objectives: Mapping[str, float]) -> Figure:
    """Percentiles against delivered output tokens per second, one point per load."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = {"ttft": "time to first token", "tpot": "time per output token"}
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        points = sorted(
            (one.figures["output_tokens_per_s"], one.load.label, one.figures[f"{name}_ms"])
            for one in measured
            if one.figures[f"{name}_ms"] and one.figures["output_tokens_per_s"] is not None
        )
        for quantile in PERCENTILES:
            key = f"p{quantile}"
            axes.plot([p[0] for p in points], [p[2][key] for p in points], "o-", label=key)
        for tokens_per_s, label, times in points:
            above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            axes.annotate(label, (tokens_per_s, times["p99"]), fontsize=8, **above)
        axes.margins(x=0.15, y=0.15)
        _finish(axes, title, "output tokens a second", "ms")
        if name in objectives:
            axes.axhline(objectives[name], color="gray", linestyle="--")
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure


def ttft_figure(measured: Sequence[Measured], objectives: Mapping[str, float]) -> Figure:
    """The share of requests with a first token by each time, one line per load."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for one in measured:
        times = sorted(o.ttft_ms for o in one.outcomes if o.error is None and o.ttft_ms is not None)
        axes.step(
            times, np.arange(1, len(times) + 1) / len(times), where="post", label=one.load.label
        )
    _finish(axes, "time to first token", "ms", "share of requests")
    axes.set_xscale("log")
    if "ttft" in objectives:
        axes.axvline(objectives["ttft"], color="gray", linestyle="--")
    axes.legend()
    return figure


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
