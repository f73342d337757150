"""The command with a server that others run, and what it refuses."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.server.supervisor import Supervisor
from minisgl_check import command, run
from minisgl_check.asking import Extent
from minisgl_check.case import Case
from minisgl_check.catalogue import entries
from minisgl_check.leavers import Leavers
from minisgl_check.mixes import Mixes
from minisgl_check.own_server import OwnServer, started
from minisgl_check.rates import Rates
from tests.check.promises import Broken
from tests.fakes.answers import answering

pytestmark = pytest.mark.server
NOBODY = "http://127.0.0.1:1"
ELSEWHERE = ["--url", "grpc://127.0.0.1:1", "--http-url", NOBODY, "--health-url", NOBODY]


def addresses(own: OwnServer) -> list[str]:
    grpc = f"grpc://{own.grpc_address}"
    return ["--url", grpc, "--http-url", own.http_url, "--health-url", own.health_url]


@pytest.fixture
def few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out most loads; `test_short` has them all."""
    for owner, name in (
        (Rates, "overload"),
        (Mixes, "churn"),
        (Mixes, "small_pool"),
        (Mixes, "poisoned"),
        (Leavers, "cancel_storm"),
        (Leavers, "slow_readers"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name: Case(name))


@pytest.mark.usefixtures("few_inputs", "few_loads")
def test_a_server_of_others_gets_no_faults(
    own: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Extent(load_s=0.3, num_cut=3, num_churned=12)
    monkeypatch.setattr(command, "SHORT", tiny)
    pids = {name: process["pid"] for name, process in own.stats().processes.items()}
    path = tmp_path / "figures.json"
    metrics = f"http://127.0.0.1:{own.server.metrics_port}/metrics"
    arguments = ["check", *addresses(own), "--metrics-url", metrics, "--json", str(path)]
    result = CliRunner().invoke(main, [*arguments, "--seed", "7"])
    assert result.exit_code == 0, result.output
    cases = {case["case"]: case for case in json.loads(path.read_text())["cases"]}
    assert "metrics agree with the engine" in cases
    assert not [name for name in cases if name.startswith("F") or "log" in name]
    assert {name: it["pid"] for name, it in own.stats().processes.items()} == pids


def test_a_failure_is_the_exit_code(own: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SHORT", Extent(0.1, 1, 4))
    with own.switch.on(Broken.PATH):
        result = CliRunner().invoke(main, ["check", *addresses(own)])
    assert result.exit_code == 1
    assert "FAIL canary: could not be recorded: cannot read" in result.output


@pytest.mark.usefixtures("few_loads")
def test_a_long_run_that_is_interrupted_reports_what_it_has(
    own: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SOAK", Extent(0.1, 3, 4))
    monkeypatch.setattr(run, "bad_inputs", lambda target, is_timed: [Case("bad inputs")])
    monkeypatch.setattr(run, "bad_gateway_inputs", lambda target, is_timed: [Case("gateway")])
    num_bursts = 0
    burst = Rates.burst

    def interrupted(rates: Rates) -> Case:
        nonlocal num_bursts
        num_bursts += 1
        if num_bursts == 2:
            raise KeyboardInterrupt
        return burst(rates)

    monkeypatch.setattr(Rates, "burst", interrupted)
    result = CliRunner().invoke(main, ["check", *addresses(own), "--hours", "1", "--seed", "3"])
    assert result.exit_code == 130, result.output
    assert "seed 3, extent 1 hours, interrupted" in result.output
    assert result.output.count("pass    memory:") == 1
    assert result.output.count("pass    canary:") == 1


def test_a_run_that_is_interrupted_before_its_first_case_writes_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> OwnServer:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "started", interrupted)
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(main, ["check", "--json", str(path)])
    assert result.exit_code == 130, result.output
    content = json.loads(path.read_text())
    assert content["cases"] == [] and content["info"]["extent"] == "short, interrupted"


def test_no_run_is_endless() -> None:
    result = CliRunner().invoke(main, ["check", "--hours", "nan"])
    assert result.exit_code == 2
    assert "'--hours': 'nan' is not finite" in result.output


def test_a_server_that_breaks_meanwhile_is_told_with_the_rest(
    own: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(*_: object, **__: object) -> Iterator[Case]:
        yield Case("burst", 3)
        raise KeyError("scheduler")

    monkeypatch.setattr(run, "run_cases", cases)
    full = "/dev/full"  # accepts nothing
    result = CliRunner().invoke(main, ["check", *addresses(own), "--json", full])
    assert result.exit_code == 1
    assert "pass    burst" in result.output
    assert "FAIL the check itself: stumbled over KeyError: 'scheduler'" in result.output
    assert "Error: /dev/full cannot be written: No space left on device" in result.output


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"\0\0\0 no HTTP\r\n",
    ],
)
def test_a_health_port_that_is_something_else(answer: bytes) -> None:
    with answering(answer) as url:
        elsewhere = ["--url", "grpc://127.0.0.1:1", "--http-url", "http://127.0.0.1:1"]
        result = CliRunner().invoke(main, ["check", *elsewhere, "--health-url", url])
    assert result.exit_code == 2
    assert f"Error: {url} does not answer as a health port does" in result.output


@pytest.mark.parametrize(
    ("option", "address", "message"),
    [
        ("--url", "127.0.0.1:1", "--url 127.0.0.1:1 does not answer as Triton's grpc port does"),
        ("--url", NOBODY, f"--url {NOBODY} does not answer as Triton's grpc port does"),
        ("--http-url", "localhost:1", "--http-url http://localhost:1 does not answer as Triton's"),
    ],
)
def test_a_port_that_does_not_answer_is_no_fault_of_the_server(
    option: str, address: str, message: str, own: OwnServer
) -> None:
    result = CliRunner().invoke(main, ["check", *addresses(own), option, address])
    assert result.exit_code == 2, result.output
    assert f"Error: {message}" in result.output


def test_ctrl_c_before_the_server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(queue.SimpleQueue[Supervisor | None]):
        def get(self, *_: object) -> Supervisor | None:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt), started():
        pass
    assert set(threading.enumerate()) <= before


def test_the_catalogue_has_every_fault() -> None:
    result = CliRunner().invoke(main, ["check", "--list"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    numbers = {f"F{number}" for number in range(1, 30)}
    assert {line.split()[0] for line in lines} == numbers
    assert len({line.split(maxsplit=2)[2] for line in lines}) == len(lines)
    assert {line.split()[1] for line in lines} == {"short", "figures", "full"}


def test_single_faults_are_provoked_without_loads() -> None:
    result = CliRunner().invoke(main, ["check", "--fault", "F18"])
    assert result.exit_code == 0, result.output
    cases = [line for line in result.output.splitlines() if line.startswith(("pass", "FAIL"))]
    assert [line.split()[1] for line in cases] == ["F18"]


def test_the_documentation_has_every_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checking.md").read_text("utf-8")
    rows = re.findall(r"^\| (F\d+(?:, F\d+)*) \|.*\| (short|figures|full) \|", text, re.M)
    documented = {(number, extent) for numbers, extent in rows for number in numbers.split(", ")}
    assert documented == {(entry.number, entry.extent) for entry in entries()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ELSEWHERE,
            "http://127.0.0.1:1 does not answer as a health port does",
        ),
        (["--tritonserver", "/nowhere"], "there is no tritonserver at '/nowhere'"),
        (["--tritonserver", "/nowhere", "--fault", "F18"], "no tritonserver at '/nowhere'"),
        (["--fault", "F18", "--fault", "F99"], "there is no fault F99: see minisgl check --list"),
    ],
)
def test_servers_and_files_that_do_not_exist(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["check", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "grpc://127.0.0.1:1"], "--url, --http-url and --health-url go together"),
        ([*ELSEWHERE[:-1], ""], "--url, --http-url and --health-url go together"),
        (
            ["--metrics-url", "http://127.0.0.1:1/metrics"],
            "--metrics-url is for a server that runs",
        ),
        ([*ELSEWHERE, "--tritonserver", "/x"], "--tritonserver is for servers of the check's own"),
        ([*ELSEWHERE, "--full", "--requests", "5"], "--requests is for F28"),
        (["--full", "--short"], "--short, --figures, --full and --hours exclude each other"),
        (["--hours", "1", "--full"], "--short, --figures, --full and --hours exclude each other"),
        (["--fault", "F28", "--full"], "--fault goes with servers of the check's own"),
        (["--requests", "5", "--fault", "F18"], "--requests is for F28"),
    ],
)
def test_wrong_usage_has_a_code_of_its_own(arguments: list[str], message: str) -> None:
    """Code 1 would mean that the server is broken."""
    result = CliRunner().invoke(main, ["check", *arguments])
    assert result.exit_code == 2
    assert message in result.output
