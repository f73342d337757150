"""``python tools/stack.py DRIVER``: which stack ``make`` installs, and why if a GPU stays unused.

Prints ``gpu``, or ``cpu`` and a sentence. DRIVER is the file in which NVIDIA's kernel module gives
its version. Runs before anything is installed: needs only the standard library, on any Python 3.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

LEAST_DRIVER = 580
"""The first branch for CUDA 13, which PyTorch 2.11's default build brings."""
PYTHONS = ((3, 10), (3, 13))
MACHINES = ("x86_64", "aarch64")
"""First and last Python, and the processors, for which every package of constraints/gpu.txt that
has compiled code for GPUs has a wheel."""

_COST = "installing the stack for CPUs, and the GPU stays unused; STACK=gpu overrides this"


def chosen(driver: str, python: tuple[int, int], machine: str) -> tuple[str, str]:
    """The stack, and why it is not the one for GPUs; ``driver`` is what the kernel module says."""
    why = _obstacle(driver, python, machine)
    return ("cpu", f"{why}: {_COST}") if why else ("gpu", "")


def _obstacle(driver: str, python: tuple[int, int], machine: str) -> str:
    found = re.search(r"\b(\d{3,})\.\d+(\.\d+)?\b", driver)
    if found is None:
        return "the version of the NVIDIA driver cannot be read"
    if int(found.group(1)) < LEAST_DRIVER:
        return f"NVIDIA driver {found.group()} is older than {LEAST_DRIVER}, which CUDA 13 needs"
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        return f"there are wheels for Python 3.10 to 3.13, and this is {python[0]}.{python[1]}"
    if machine not in MACHINES:
        return f"PyTorch for CUDA and sglang-kernel have no wheels for {machine}"
    return ""


if __name__ == "__main__":
    print(*chosen(Path(sys.argv[1]).read_text(), sys.version_info[:2], platform.machine()))
