"""What constraints/cpu.txt and constraints/gpu.txt pin."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FOLDER: Final = Path(__file__).parents[2] / "constraints"


def pinned(stack: str, python: str) -> dict[str, str]:
    """The version of each package of a stack on Linux x86-64, with a Python version like 3.12."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
    }
    found: dict[str, str] = {}
    for line in (_FOLDER / f"{stack}.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            assert canonicalize_name(requirement.name) not in found, line
            found[canonicalize_name(requirement.name)] = pin.version
    return found
