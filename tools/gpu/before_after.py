"""``python3 -m tools.gpu.before_after BASE [PART ...]``: two trees, measured in alternating runs.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. BASE is the
tree of an older commit in an ignored folder that travels along:

    mkdir .baseline && git archive COMMIT minisgl_backend client | tar -x -C .baseline

Each part is one ``minisgl bench`` command. It runs in BASE, here, in BASE and here again, each time
in a process of its own, so that a change of the machine's clocks affects both. The table has a row
for each figure: the mean of each tree's runs, the spread of the runs, and the ratio. The JSON is
written after each part, since a command on that machine may be killed at any time.

Must not know what the engine is made of: it knows commands and the figures that they write.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

_OFFLINE: Final = (
    "offline --requests 256 --input-length 100 1024 --output-length 100 1024 --temperature 0.6"
)


@dataclass(frozen=True, slots=True)
class Part:
    """A command, the shape of its model, and the figure of each row; ``key`` tells rows apart."""

    shape: str
    command: str
    figure: str
    key: str | None = None
    more_is_better: bool = False


PARTS: Final[Mapping[str, Part]] = {
    "offline": Part("qwen3-0.6b", _OFFLINE, "tokens_per_s", more_is_better=True),
    "offline-fp8": Part(
        "qwen3-0.6b", f"{_OFFLINE} --kv-cache-dtype fp8_e4m3", "tokens_per_s", more_is_better=True
    ),
    "decode": Part(
        "qwen3-0.6b",
        "decode --steps 60 --batch-size 1 --batch-size 64 --batch-size 256"
        " --cuda-graph-max-batch-size 256 --cuda-graph-batch-sizes 1,64,256",
        "step_ms",
        key="batch",
    ),
    "decode-14b": Part(
        "qwen3-14b",
        "decode --steps 60 --batch-size 1 --batch-size 256"
        " --cuda-graph-max-batch-size 256 --cuda-graph-batch-sizes 1,256",
        "step_ms",
        key="batch",
    ),
    "prefill": Part(
        "qwen3-0.6b", "prefill --length 128 --length 4000", "median_ms", key="prompt_tokens"
    ),
}

Figures = Mapping[str, float]
"""The figure of each row of one run."""


def figures_of(part: Part, content: Mapping[str, Any]) -> Figures:
    """The figures by key, from what ``--json`` wrote."""
    return {
        "" if part.key is None else f"{part.key}={row[part.key]}": float(row[part.figure])
        for row in content["rows"]
    }


def compared(
    part: Part, before: Sequence[Figures], after: Sequence[Figures]
) -> list[dict[str, Any]]:
    """A row for each figure that every run has; ``gain`` is above 1 if the second tree is better.

    ``spread`` is the largest deviation of a run from the mean of its tree, as a share of the mean.
    """
    rows = []
    for key in before[0]:
        old, new = ([run[key] for run in runs] for runs in (before, after))
        mean_old, mean_new = statistics.fmean(old), statistics.fmean(new)
        spread = max(
            abs(value / mean - 1)
            for values, mean in ((old, mean_old), (new, mean_new))
            for value in values
        )
        gain = mean_new / mean_old if part.more_is_better else mean_old / mean_new
        rows.append(
            {"row": key, "before": mean_old, "after": mean_new, "gain": gain, "spread": spread}
        )
    return rows


def run(tree: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """What the command writes with ``--json`` when it runs the code of ``tree``."""
    folders = [path for path in (tree, tree / "client", tree / "workbench") if path.is_dir()]
    kernels = Path(os.environ.get("MINISGL_GPU_SITE", ""), "kernels")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in (kernels, *folders)),
    }
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, "-m", "minisgl_backend.cli", "bench", *arguments]
        # the working directory comes first on the path of `python -m`
        done = subprocess.run(
            [*command, "--json", str(file)],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise click.ClickException(f"in {tree}: {' '.join(arguments)}\n{done.stdout}")
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return content


@click.command()
@click.argument("base", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--rounds", default=2, show_default=True, help="runs of each tree")
@click.option("--budget-s", default=540.0, show_default=True, help="begin no part after that")
@click.option("--option", "options", multiple=True, help="one more word of every command")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="[default: $OUT/before_after.json]"
)
def before_after(
    base: Path,
    parts: Sequence[str],
    rounds: int,
    budget_s: float,
    options: Sequence[str],
    json_path: Path | None,
) -> None:
    """Measure the tree BASE and this one by turns; PART is all of them by default."""
    started_s = time.monotonic()
    json_path = json_path or Path(os.environ.get("OUT", "."), "before_after.json")
    report: dict[str, Any] = {"rows": [], "runs": []}
    with tempfile.TemporaryDirectory(prefix="minisgl-models-") as models:
        for name in parts or PARTS:
            if time.monotonic() - started_s > budget_s:
                click.echo(f"no time is left for {name}", err=True)
                continue
            part = PARTS[name]
            model = Path(models, part.shape)
            if not model.exists():
                _write_model(part.shape, model)
            command = [*part.command.split(), "--model", str(model), "--load-format", "dummy"]
            runs: dict[Path, list[Figures]] = {base: [], Path.cwd(): []}
            for _ in range(rounds):
                for tree, figures in runs.items():
                    content = run(tree, [*command, *options])
                    figures.append(figures_of(part, content))
                    report["runs"].append({"part": name, "tree": str(tree), **content})
                    seconds = time.monotonic() - started_s
                    click.echo(f"{seconds:5.0f} s  {name}  {tree.name}  {figures[-1]}")
            rows = compared(part, *runs.values())
            report["rows"] += [{"part": name, "figure": part.figure, **row} for row in rows]
            json_path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    _show(report["rows"])


def _write_model(shape: str, folder: Path) -> None:
    command = [sys.executable, "-m", "minisgl_backend.cli", "bench", "dummy-model"]
    subprocess.run([*command, shape, str(folder)], check=True, stdout=subprocess.DEVNULL)


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="before and after, alternating runs")
    for name in ("part", "row", "figure", "before", "after", "gain", "spread"):
        table.add_column(name, justify="left" if name in ("part", "row", "figure") else "right")
    for row in rows:
        shown = [f"{row[name]:,.3f}" for name in ("before", "after", "gain")]
        table.add_row(row["part"], row["row"], row["figure"], *shown, f"{row['spread']:.1%}")
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    before_after()
