"""Figures by the number of ranks, if one configuration cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_bench import scaling
from minisgl_bench.own_process import run_bench
from minisgl_check.processes import children_of, runs
from minisgl_check.waiting import wait_until

SMALL = ["--device", "cpu", "--num-pages", "64", "--max-sequence-length", "128"]


def test_what_fails_leaves_its_figures_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(arguments: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
        file = tmp_path / "one.json"
        result = CliRunner().invoke(main, ["bench", *arguments, "--json", str(file)])
        if result.exit_code:
            raise click.ClickException(result.output)
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures

    monkeypatch.setattr(scaling, "run_bench", in_this_process)
    file = tmp_path / "figures.json"
    command = ["bench", "scaling", "--sizes", "1,2", "--comms", "nccl", "--batches", "1,2"]
    command += ["--context", "20", "--steps", "4", "--requests", "2", "--output-length", "2", "4"]
    result = CliRunner().invoke(main, [*command, *SMALL, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "comm=nccl does not work on cpu" in result.output
    figures = json.loads(file.read_text(encoding="utf-8"))
    one, two = figures["rows"]
    assert one["batch_1_ms"] > 0 and one["batch_2_ms"] > 0 and one["offline_tokens_per_s"] > 0
    assert (two["ranks"], two["comm"], two["batch_1_ms"], two["efficiency"]) == (
        2,
        "nccl",
        "-",
        "-",
    )


def test_what_is_no_library_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "run_bench", pytest.fail)
    result = CliRunner().invoke(main, ["bench", "scaling", "--comms", "nccl,glo", *SMALL])
    assert result.exit_code == 2
    assert "Invalid value for '--comms': option comm must be one of nccl" in result.output


def test_a_command_of_which_nothing_could_be_measured_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise click.ClickException("minisgl bench decode ended with 2")

    monkeypatch.setattr(scaling, "run_bench", fails)
    result = CliRunner().invoke(main, ["bench", "scaling", "--sizes", "1,2", *SMALL])
    assert result.exit_code == 1
    assert result.output.endswith("no configuration could be measured\n")


def test_efficiency_is_throughput_a_rank_over_that_of_the_fewest() -> None:
    rows = [
        {"ranks": 1, "batch_1_ms": 8.0, "offline_tokens_per_s": 1000.0},
        {"ranks": 4, "batch_1_ms": 4.0, "offline_tokens_per_s": 3000.0},
    ]
    scaling.add_efficiency(rows)
    assert [row["batch_1_of_first"] for row in rows] == [1.0, 0.5]
    assert [row["efficiency"] for row in rows] == [1.0, 0.75]


def test_a_command_that_hangs_is_an_error() -> None:
    with pytest.raises(click.ClickException, match="bench offline was not done"):
        run_bench(["offline"], timeout_s=0.01)


def test_a_command_that_is_killed_takes_its_process_along(tmp_path: Path) -> None:
    code = """
from minisgl_bench.own_process import run_bench
run_bench(['offline', '--requests', '256', '--output-length', '4000', '4000'])
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as command:

        def is_started() -> bool:
            return any(
                b"minisgl_backend.cli" in Path(f"/proc/{child}/cmdline").read_bytes()
                for child in children_of(command.pid)
            )

        assert wait_until(is_started, 60)
        (child,) = children_of(command.pid)
        command.kill()
    assert wait_until(lambda: not runs(child), 20)
