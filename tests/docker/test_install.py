"""Which stack `make` installs, and that the constraints files name every package in it.

Nothing is installed: make prints its commands, with files in place of the NVIDIA driver's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.conftest import ROOT
from tests.docker.constraints import pinned
from tools.stack import chosen

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"
    "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"
)
EXTRAS = {"cpu": {"server", "dev"}, "gpu": {"server", "gpu", "dev"}}


def dry_run(tmp_path: Path, *variables: str) -> str:
    """What `make serve` would do in a fresh clone."""
    command = ["make", "--dry-run", "--always-make", "-C", str(ROOT), "serve"]
    given = [f"VENV={tmp_path / 'venv'}", *variables]
    return subprocess.run([*command, *given], capture_output=True, text=True, check=True).stdout


def driver(tmp_path: Path, version: str) -> str:
    """The variable assignment that names a driver of this version."""
    file = tmp_path / "driver"
    file.write_text(DRIVER.format(version), "utf-8")
    return f"DRIVER={file}"


def test_with_a_driver_make_serve_installs_the_stack_that_was_measured(tmp_path: Path) -> None:
    commands = dry_run(tmp_path, driver(tmp_path, "580.159.04"))
    assert "torch==2.11.0" in commands
    assert "-c constraints/gpu.txt -e '.[server,gpu]'" in commands
    assert "unused" not in commands


def test_without_a_driver_make_serve_installs_the_stack_for_cpus(tmp_path: Path) -> None:
    commands = dry_run(tmp_path, f"DRIVER={tmp_path / 'none'}")
    assert "torch==2.13.0+cpu" in commands
    assert "-c constraints/cpu.txt -e '.[server]'" in commands
    assert "unused" not in commands


def test_with_a_driver_that_is_too_old_make_says_so_and_what_it_costs(tmp_path: Path) -> None:
    commands = dry_run(tmp_path, driver(tmp_path, "570.124.06"))
    assert "-c constraints/cpu.txt" in commands
    (said,) = re.findall(r'echo "(NVIDIA driver.*)"', commands)
    assert "570.124.06 is older than 580" in said
    assert "the GPU stays unused" in said


def test_the_operator_may_choose_the_stack(tmp_path: Path) -> None:
    old = driver(tmp_path, "570.124.06")
    assert "-c constraints/gpu.txt" in dry_run(tmp_path, old, "STACK=gpu")
    new = driver(tmp_path, "580.159.04")
    assert "-c constraints/cpu.txt" in dry_run(tmp_path, new, "STACK=cpu")


@pytest.mark.parametrize(
    ("text", "python", "machine", "missing"),
    [
        (DRIVER.format("580.159.04"), (3, 14), "x86_64", "this is 3.14"),
        (DRIVER.format("580.159.04"), (3, 12), "riscv64", "no wheels for riscv64"),
        ("", (3, 12), "x86_64", "cannot be read"),
    ],
)
def test_a_fallback_names_what_is_missing(
    text: str, python: tuple[int, int], machine: str, missing: str
) -> None:
    stack, why = chosen(text, python, machine)
    assert stack == "cpu"
    assert missing in why


def needed(extras: set[str], python: str) -> list[Requirement]:
    """What the project needs on Linux x86-64 for these extras, according to its metadata."""
    project = metadata.distribution("minisgl-triton")
    found, done, todo = [], set(), {"", *extras}
    while todo:
        extra = todo.pop()
        done.add(extra)
        for requirement in map(Requirement, project.requires or ()):
            environment = {"extra": extra, "python_version": python}
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            if canonicalize_name(requirement.name) == "minisgl-triton":
                todo |= requirement.extras - done
            else:
                found.append(requirement)
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("stack", EXTRAS)
def test_what_the_project_needs_is_pinned(stack: str, python: str) -> None:
    versions = pinned(stack, python)
    for requirement in needed(EXTRAS[stack], python):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned"
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_what_those_packages_need_is_pinned_too() -> None:
    """For the stack installed here: every package that its metadata leads to."""
    stack = "gpu" if metadata.version("torch").startswith("2.11.") else "cpu"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = pinned(stack, python)
    todo = [(requirement.name, requirement.extras) for requirement in needed(EXTRAS[stack], python)]
    seen: set[tuple[str, str]] = set()
    while todo:
        name, extras = todo.pop()
        for extra in {"", *extras}:
            if (canonicalize_name(name), extra) in seen:
                continue
            seen.add((canonicalize_name(name), extra))
            for requirement in map(Requirement, metadata.requires(name) or ()):
                marker = requirement.marker
                if marker is None or marker.evaluate({"extra": extra}):
                    assert canonicalize_name(requirement.name) in versions, f"{name}: {requirement}"
                    todo.append((requirement.name, requirement.extras))
    assert len(seen) > 100
