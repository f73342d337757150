"""Clients that need their own environment, in their default modes.

Instructor, LiteLLM and LlamaIndex hold the openai package at 2, and Vercel's SDK runs in node.
Their programs are in ``sdks``; each runs once, and its cases are tests here. The versions are
locked in ``constraints/clients.txt`` and ``sdks/package-lock.json``. They are installed into
pytest's cache; without a package index, or without node, the tests are skipped.

Reports of the demo model are real: its constrained tokens make them. Tool loops run on the agent of
``agent``, as does whatever mentions a schema only in the prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.agent import ANSWER, REPORT
from tests.gateway.conftest import Gateway
from tests.gateway.sdks.cases import Report

pytestmark = pytest.mark.server

PROGRAMS = Path(__file__).with_name("sdks")
ROOT = Path(__file__).parents[2]
_LOCKED = ROOT / "constraints" / "clients.txt"
_UNREACHABLE = re.compile(
    r"dns error|error sending request|failed to fetch|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT",
    re.I,
)

Check = Callable[[Any], bool]


def _is_report(found: Any) -> bool:
    return bool(Report.model_validate(found))


def _is_one_report(found: Any) -> bool:
    (report,) = found
    return _is_report(report)


def _is(expected: Any) -> Check:
    return lambda found: bool(found == expected)


_AGENT = _is([ANSWER, [{"city": "Bogotá"}]])
_CASES: dict[str, dict[str, Check]] = {
    "instructor": {
        "tools": _is_report,
        "tools_streamed": _is_report,
        "json_schema": _is_report,
        "json_mode": _is(REPORT),
    },
    "llama_index": {
        "by_tools": _is_report,
        "by_schema": _is_report,
        "by_schema_streamed": _is_report,
        "predict_and_call": _is("rain in Bogotá"),
        "agent": _AGENT,
        "agent_streamed": _AGENT,
    },
    "litellm": {
        f"{case}_{provider}": check
        for provider in ("openai", "hosted_vllm")
        for case, check in {
            "required": _is([None, [{"city": "Bogotá"}]]),
            "named": _is([None, [{"city": "Bogotá"}]]),
            "schema": _is_report,
            "agent": _is(ANSWER),
        }.items()
    },
    "vercel": {
        "json": _is(REPORT),
        **{
            f"{case}_{provider}": check
            for provider in ("compatible", "chat", "responses")
            for case, check in {
                "object": _is_report,
                "object_streamed": _is_report,
                "required": _is(["", [{"city": "Bogotá"}]]),
                "named": _is_one_report,
                "agent": _AGENT,
                "agent_streamed": _AGENT,
                "agent_reports": _is([REPORT, 2]),
            }.items()
        },
    },
}
_PARAMETERS = [
    pytest.param(sdk, case, id=f"{sdk}-{case}") for sdk, cases in _CASES.items() for case in cases
]


@pytest.mark.parametrize(("sdk", "case"), _PARAMETERS)
def test_sdk(results: Callable[[str], dict[str, Any]], sdk: str, case: str) -> None:
    outcome = results(sdk)[case]
    assert "error" not in outcome, outcome["error"]
    assert _CASES[sdk][case](outcome["result"])


def test_every_case_has_its_test(results: Callable[[str], dict[str, Any]]) -> None:
    assert {sdk: set(results(sdk)) for sdk in _CASES} == {
        sdk: set(cases) for sdk, cases in _CASES.items()
    }


# --- environments ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(
    agent: Gateway, gateway: Gateway, request: pytest.FixtureRequest
) -> Callable[[str], dict[str, Any]]:
    """What an SDK's program found, by the SDK's name."""
    found: dict[str, dict[str, Any]] = {}

    def of(sdk: str) -> dict[str, Any]:
        if sdk not in found:
            command = request.getfixturevalue("node" if sdk == "vercel" else "python")(sdk)
            found[sdk] = _printed([*command, f"{agent.url}/v1", f"{gateway.url}/v1"])
        return found[sdk]

    return of


def _printed(command: list[str]) -> dict[str, Any]:
    # LiteLLM would fetch a list of prices
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def python(pytestconfig: pytest.Config) -> Callable[[str], list[str]]:
    """The command that runs a program in an environment with the locked packages."""

    def install(folder: Path) -> None:
        uv = [sys.executable, "-m", "uv", "--quiet"]
        _install([*uv, "venv", "--python", sys.executable, str(folder)])
        interpreter = str(folder / "bin" / "python")
        locked = ["--no-deps", "-r", str(_LOCKED)]
        _install([*uv, "pip", "install", "--python", interpreter, *locked])

    folder = _cached(pytestconfig, f"python{sys.version_info.minor}", _LOCKED.read_bytes(), install)
    interpreter = str(folder / "bin" / "python")
    return lambda sdk: [interpreter, "-m", f"tests.gateway.sdks.with_{sdk}"]


@pytest.fixture(scope="module")
def node(pytestconfig: pytest.Config) -> Callable[[str], list[str]]:
    """The command that runs a program next to the locked node packages."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node or npm is not installed")

    def install(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PROGRAMS / name, folder)
        _install(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder)

    locked = (PROGRAMS / "package-lock.json").read_bytes()
    folder = _cached(pytestconfig, "node", locked, install)

    def command(sdk: str) -> list[str]:
        # node finds packages only next to the program
        return ["node", str(shutil.copy(PROGRAMS / f"with_{sdk}.mjs", folder))]

    return command


def _cached(
    config: pytest.Config, name: str, locked: bytes, install: Callable[[Path], None]
) -> Path:
    """A folder in pytest's cache with what ``install`` puts there for these locked versions."""
    assert config.cache is not None
    folder = Path(config.cache.mkdir(f"sdks-{name}-{hashlib.sha256(locked).hexdigest()[:16]}"))
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder)
        folder.mkdir()
        install(folder)
        complete.touch()
    return folder


def _install(command: list[str], folder: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if _UNREACHABLE.search(line)]
        if lines:
            pytest.skip(f"no package index: {lines[0]}")
    assert done.returncode == 0, done.stderr
