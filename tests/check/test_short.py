"""The command as an operator runs it: its own server, everything passes, and the table says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

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
    figures = content["figures"]
    for way in ("HTTP", "gRPC"):
        assert figures[f"bad inputs over {way}, clean"] == figures[f"bad inputs over {way}, tried"]
    assert figures["canary mismatches"] == 0 < figures["canary runs"]
    assert all(figures[f"requests {how}"] > 0 for how in ("answered", "refused", "cut", "failed"))
