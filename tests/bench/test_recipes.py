"""The recipes for perf_analyzer in docs/benchmarks.md, run as they are written there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from minisgl_backend.server.process import TritonServer
from minisgl_bench.perf_analyzer_binary import find_perf_analyzer
from tests.docs.markdown import Page

PAGE = Page(Path(__file__).parents[2] / "docs" / "benchmarks.md")
RECIPES = [block.text for block in PAGE.blocks if "\nperf_analyzer -m" in block.text]


@pytest.mark.server
@pytest.mark.parametrize("recipe", RECIPES, ids=["vllm_backend", "tensorrtllm_backend"])
def test_a_recipe_does_what_it_says(
    server: TritonServer, perf_analyzer_wheel: Path, recipe: str, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    environment = find_perf_analyzer(folder, binary=None, wheel=perf_analyzer_wheel).environment
    done = subprocess.run(
        ["bash", "-ec", recipe.replace("localhost:8001", f"127.0.0.1:{server.grpc_port}")],
        cwd=tmp_path,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": environment["LD_LIBRARY_PATH"],
            "PATH": os.pathsep.join((str(folder), os.environ["PATH"])),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("export*.json")
    export = json.loads(file.read_text())
    answers = export["experiments"][0]["requests"]
    assert len(answers) >= 16
    assert all(len(answer["response_timestamps"]) > 1 for answer in answers)
    for answer in answers:
        assert "".join(one.get("text_output", "") for one in answer["response_outputs"])
