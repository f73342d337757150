"""``python -m tools.performance_plots [FOLDER]``: the pictures of docs/performance.md.

FOLDER (docs/figures) holds what ``minisgl bench ... --json`` wrote, under these names, where MODEL
is any word and each file may be missing:

    offline-MODEL.json, server-MODEL.json    throughput.png   bench offline, bench server-share
    prefill-MODEL.json                       prefill.png      bench prefill
    decode-MODEL.json                        decode.png       bench decode
    trace-MODEL-CASE.json                    breakdown.png    bench trace-table
    scaling-MODEL.json                       scaling.png      bench scaling

and ``mini-sglang.json``: that engine's figures, by the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Files = Mapping[str, dict[str, Any]]
"""The content of files by their names without suffix."""

_KINDS = {
    "attention": "tab:blue",
    "gemm": "tab:orange",
    "norms": "tab:green",
    "sampling": "tab:red",
    "communication": "tab:purple",
    "other": "tab:brown",
    "idle": "lightgray",
}


def throughput_figure(files: Files, others: Files) -> Figure:
    """Tokens per second of each case: here, and with mini-sglang if that was measured."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = [name for name in sorted(files) if name.startswith(("offline-", "server-"))]
    sides = {
        "here": [files[name]["tokens_per_s"] for name in names],
        "mini-sglang": [others.get(name, {}).get("mini_sglang", 0.0) for name in names],
    }
    for index, (side, heights) in enumerate(sides.items()):
        places = [place + 0.4 * (index - 0.5) for place in range(len(names))]
        bars = axes.bar(places, heights, width=0.38, label=side)
        labels = [f"{height:,.0f}" if height else "" for height in heights]
        axes.bar_label(bars, labels=labels, fontsize=8)
    axes.set_xticks(range(len(names)), [_label(name) for name in names])
    _finish(axes, "throughput, 256 requests at once", "", "output tokens a second")
    return figure


def prefill_figure(files: Files, others: Files) -> Figure:
    """Time to the first token of a lone request by prompt length, one panel per model."""
    names = [name for name in sorted(files) if name.startswith("prefill-")]
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        lengths = [row["prompt_tokens"] for row in files[name]["rows"]]
        times_ms = others.get(name, {}).get("mini_sglang_ms", {})
        sides = {
            "here": [row["median_ms"] for row in files[name]["rows"]],
            "mini-sglang": [times_ms.get(str(length), 0) for length in lengths],
        }
        for index, (side, times) in enumerate(sides.items()):
            places = [place + 0.4 * (index - 0.5) for place in range(len(lengths))]
            bars = axes.bar(places, times, width=0.38, label=side)
            axes.bar_label(bars, fmt="{:.1f}", fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        _finish(axes, f"first token, {_label(name)}", "prompt length", "ms")
    return figure


def decode_figure(files: Files, others: Files) -> Figure:
    """Time of a decode step by batch size, one panel per model: here, its replay, mini-sglang."""
    names = [name for name in sorted(files) if name.startswith("decode-")]
    num_rows = -(-len(names) // 2)
    figure = Figure(figsize=(10, 3.5 * num_rows), layout="constrained")
    for place, name in enumerate(names, 1):
        times_ms = others.get(name, {}).get("mini_sglang_ms", {})
        _draw_steps(figure.add_subplot(num_rows, 2, place), name, files[name]["rows"], times_ms)
    return figure


def _draw_steps(
    axes: Axes, name: str, rows: list[dict[str, Any]], others: Mapping[str, float]
) -> None:
    """``others`` are mini-sglang's times in milliseconds by batch size."""
    batches = [row["batch"] for row in rows]
    axes.plot(batches, [row["mean_ms"] for row in rows], "o-", label="step of the engine")
    for figure, style, label in (
        ("replay_ms", "x--", "its graph alone"),
        ("eager_ms", "^:", "without CUDA graphs"),
    ):
        times = {row["batch"]: row[figure] for row in rows if row.get(figure, "-") != "-"}
        if times:
            axes.plot(list(times), list(times.values()), style, label=label)
    if others:
        axes.plot([int(batch) for batch in others], list(others.values()), "s", label="mini-sglang")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    _finish(axes, f"decode, {_label(name)}", "batch size", "ms a step")


def breakdown_figure(files: Files) -> Figure:
    """Where the GPU's time went: one bar per trace, as shares of the wall time."""
    traces = [name for name in files if name.startswith("trace-")]
    names = sorted(traces, key=_natural, reverse=True)  # bars are drawn from below
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    lefts = [0.0] * len(names)
    for kind, color in _KINDS.items():
        shares = [100 * files[name]["info"].get(f"{kind}_share", 0.0) for name in names]
        label = "GEMMs" if kind == "gemm" else kind
        bars = axes.barh(range(len(names)), shares, left=lefts, label=label, color=color)
        axes.bar_label(
            bars,
            labels=[f"{share:.0f}" if share >= 3 else "" for share in shares],
            label_type="center",
            fontsize=8,
        )
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_xlim(0, 100)
    axes.set_title("where the time goes")
    axes.set_xlabel("% of the time between the first and the last kernel")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(_KINDS), fontsize=8)
    return figure


def scaling_figure(files: Files) -> Figure:
    """Throughput, and time of a decode step, by number of GPUs and communication library."""
    names = [name for name in sorted(files) if name.startswith("scaling-")]
    figure = Figure(figsize=(10, 4 * len(names)), layout="constrained")
    for panels, name in zip(figure.subplots(len(names), 2, squeeze=False), names, strict=True):
        _draw_scaled_throughput(panels[0], name, files[name]["rows"])
        _draw_scaled_steps(panels[1], name, files[name]["rows"])
    return figure


def _draw_scaled_throughput(axes: Axes, name: str, all_rows: list[dict[str, Any]]) -> None:
    rows = [row for row in all_rows if row["offline_tokens_per_s"] != "-"]
    one, most = rows[0], max(row["ranks"] for row in rows)
    for comm in dict.fromkeys(row["comm"] for row in rows[1:]):
        line = [one, *(row for row in rows[1:] if row["comm"] == comm)]
        tokens_per_s = [row["offline_tokens_per_s"] for row in line]
        axes.plot([row["ranks"] for row in line], tokens_per_s, "o-", label=comm)
    ideal = [one["offline_tokens_per_s"] * ranks / one["ranks"] for ranks in (1, most)]
    axes.plot([1, most], ideal, ":", color="gray", label="as many times as GPUs")
    axes.set_xticks(sorted({row["ranks"] for row in rows}))
    axes.set_ylim(bottom=0)
    _finish(axes, f"offline, {_label(name)}", "GPUs", "output tokens a second")


def _draw_scaled_steps(axes: Axes, name: str, rows: list[dict[str, Any]]) -> None:
    columns = [key for key in rows[0] if re.fullmatch(r"batch_\d+_ms", key)]
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        times = [0 if row[column] == "-" else row[column] for column in columns]
        places = [place + width * (index - (len(rows) - 1) / 2) for place in range(len(columns))]
        label = "1 GPU" if row["ranks"] == 1 else f"{row['ranks']} GPUs, {row['comm']}"
        bars = axes.bar(places, times, width=0.9 * width, label=label)
        axes.bar_label(bars, fmt="{:.1f}", fontsize=7)
    axes.set_xticks(range(len(columns)), [column.split("_")[1] for column in columns])
    _finish(axes, f"decode, {_label(name)}", "batch size", "ms a step")


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts batch-64 before batch-256."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _label(name: str) -> str:
    """``offline-qwen3-0.6b-fp8`` is shown as ``qwen3-0.6b-fp8``; a server's case says so."""
    kind, _, model = name.partition("-")
    return f"{model}\nthrough tritonserver" if kind == "server" else model


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if "tokens" in y:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def write_plots(folder: Path) -> list[Path]:
    """Draw the pictures for which the folder has figures; returns their paths."""
    files = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    others = files.pop("mini-sglang", {})
    figures: dict[str, tuple[tuple[str, ...], Callable[[], Figure]]] = {
        "throughput": (("offline-", "server-"), lambda: throughput_figure(files, others)),
        "prefill": (("prefill-",), lambda: prefill_figure(files, others)),
        "decode": (("decode-",), lambda: decode_figure(files, others)),
        "breakdown": (("trace-",), lambda: breakdown_figure(files)),
        "scaling": (("scaling-",), lambda: scaling_figure(files)),
    }
    written = []
    for name, (prefixes, draw) in figures.items():
        if any(file.startswith(prefixes) for file in files):
            path = folder / f"{name}.png"
            draw().savefig(path, dpi=90)
            written.append(path)
    return written


@click.command()
@click.argument(
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(__file__).parents[1] / "docs" / "figures",
)
def main(folder: Path) -> None:
    """Draw the pictures of docs/performance.md from the figures in FOLDER."""
    for path in write_plots(folder):
        click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
