"""The command beside a server that others run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.check import command
from minisgl_backend.check.own_server import OwnServer
from minisgl_backend.check.shapes import Extent
from minisgl_backend.cli.main import main

pytestmark = pytest.mark.server


def addresses(own: OwnServer) -> list[str]:
    grpc = f"grpc://{own.grpc_address}"
    return ["--url", grpc, "--http-url", own.http_url, "--health-url", own.health_url]


def test_a_server_of_others_gets_no_faults(
    own: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Extent(load_s=0.3, num_cut=3, num_churned=12, is_timed=False)
    monkeypatch.setattr(command, "SHORT", tiny)
    pids = {name: process["pid"] for name, process in own.stats().processes.items()}
    path = tmp_path / "figures.json"
    metrics = f"http://127.0.0.1:{own.server.metrics_port}/metrics"
    arguments = ["check", *addresses(own), "--metrics-url", metrics, "--json", str(path)]
    result = CliRunner().invoke(main, [*arguments, "--seed", "7"])
    assert result.exit_code == 0, result.output
    cases = {case["case"]: case for case in json.loads(path.read_text())["cases"]}
    assert "metrics agree with the engine" in cases
    assert not [name for name in cases if name.startswith("kill") or "log" in name]
    assert {name: it["pid"] for name, it in own.stats().processes.items()} == pids


def test_a_failure_is_the_exit_code(own: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SHORT", Extent(0.1, 1, 4, is_timed=False))
    defect = own.server.repository / "defect"
    defect.write_text("an error tells a path")
    try:
        result = CliRunner().invoke(main, ["check", *addresses(own)])
    finally:
        defect.unlink()
    assert result.exit_code == 1
    assert "FAIL canary: could not be recorded: cannot read" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "grpc://127.0.0.1:1"], "--url, --http-url and --health-url go together"),
        (
            [
                *("--url", "grpc://127.0.0.1:1", "--http-url", "http://127.0.0.1:1"),
                *("--health-url", "http://127.0.0.1:1"),
            ],
            "http://127.0.0.1:1 does not answer as a health port does",
        ),
        (["--tritonserver", "/nowhere"], "there is no tritonserver at '/nowhere'"),
    ],
)
def test_what_the_operator_got_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["check", *arguments])
    assert result.exit_code == 1
    assert message in result.output
