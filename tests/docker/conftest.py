"""What the tests of docker/ share: its files, the tools that check them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DOCKER: Final = ROOT / "docker"


def tool(name: str) -> str:
    """The path of a program, from this environment first; skips the test where it is missing."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; .ci/run installs it")
    return path
