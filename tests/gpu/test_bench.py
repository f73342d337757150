"""The benchmarks of an engine on a GPU, run small on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.kernels.dispatch import is_interpreted

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")


def test_kernels_are_timed_beside_their_twins(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = ["bench", "kernels", "--model", "qwen3-0.6b", "--batch-size", "2", "--only", "norm"]
    result = CliRunner().invoke(main, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["kernel"] for row in rows] == [
        "norm + qkv",
        "norm + gate/up + silu",
        "norm",
        "add + norm",
        "qk-norm + rope + store",
    ]
    for row in rows:
        assert row["us"] > 0
        assert (row["twin"] is None) == (row["kernel"] == "qk-norm + rope + store")


@pytest.mark.parametrize("most", ["4", "0"])
def test_a_captured_step_is_timed_beside_its_replay(most: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = ["bench", "decode", "--batch-size", "2", "--context", "20", "--steps", "5"]
    command += ["--num-pages", "256", "--max-running-requests", "4", "--json", str(file)]
    result = CliRunner().invoke(main, [*command, "--cuda-graph-max-batch-size", most])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["step_ms"] > 0
    assert (row["replay_ms"] == "-") == (most == "0")
