"""The check with a server of its own: everything passes, and the table says so.

By night it runs as an operator starts it. Otherwise its loads are short, all bad inputs are tried,
and of the faults only one is provoked; `tests/server` has the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_check import command, run
from minisgl_check.asking import Extent
from minisgl_check.catalogue import SHORT

pytestmark = pytest.mark.server

CASES = {
    "bad inputs over HTTP": 100,
    "bad inputs over gRPC": 100,
    "hostile grammars": 60,
    "each request ends once": 8,
    "closed loop": 1,
    "burst over the queue": 16,
    "open loop at twice the capacity": 1,
    "cancel storm": 60,
    "prefix churn": 40,
    "pages for 2.5 requests": 8,
    "slow readers beside normal ones": 1,
    "one request in five is bad": 40,
    "adapters come and go": 60,
    "cancel, one at a time": 10,
    "canary": 6,
    "memory": 10,
    "metrics agree with the engine": 8,
    "the server's log": 20,
    "F3 the engine pauses for 3 s": 1,
    "F2 kill -9 of llm_engine with 16 streams": 16,
    "F4 kill -9 of tokenizer with 16 streams": 16,
    "F5 kill -9 of detokenizer with 16 streams": 16,
    "F16 kill -9 of tritonserver with 16 streams": 16,
}
"""Every case, and the minimum number of its tries."""


def test_a_check_of_short_loads_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Extent(load_s=0.5, num_cut=6, num_churned=12, num_hostile=12, num_loads=12)
    monkeypatch.setattr(command, "SHORT", tiny)
    one = [fault for fault in SHORT if fault.number == "F2"]
    monkeypatch.setattr(run, "SHORT", one)
    path = tmp_path / "figures.json"
    done = CliRunner().invoke(main, ["check", "--seed", "1", "--json", str(path)])
    assert done.exit_code == 0, done.output[-8000:]
    content: dict[str, Any] = json.loads(path.read_text())
    faults = {f"{fault.number} {fault.sentence}" for fault in one}
    assert len(faults) == 1
    assert {case["case"] for case in content["cases"]} == {
        name for name in CASES if not name.startswith("F") or name in faults
    }
    for case in content["cases"]:
        assert case["result"] == "pass" and case["count"] and not case["failures"]
    _check_figures(content["figures"])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_short_check_passes(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [str(Path(sys.executable).with_name("minisgl")), "check", "--seed", "1"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.startswith("seed 1\n")
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["info"]["seed"] == "1"
    counts = {case["case"]: case["count"] for case in content["cases"]}
    assert counts.keys() == CASES.keys()
    for case in content["cases"]:
        assert case["result"] == "pass" and not case["failures"]
        assert case["count"] >= CASES[case["case"]]
        assert f"pass    {case['case']}: {case['what']}\n" in done.stdout
    _check_figures(content["figures"])


def _check_figures(figures: dict[str, float]) -> None:
    for way in ("HTTP", "gRPC"):
        assert figures[f"bad inputs over {way}, clean"] == figures[f"bad inputs over {way}, tried"]
    assert figures["canary mismatches"] == 0 < figures["canary runs"]
    assert all(figures[f"requests {how}"] > 0 for how in ("answered", "refused", "cut", "failed"))
