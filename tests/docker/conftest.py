"""What the tests of docker/ share: its files, the tools that check them, one running server."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.server.conftest import server

__all__ = ["server"]  # a fixture

ROOT: Final = Path(__file__).parents[2]
DOCKER: Final = ROOT / "docker"


def tool(name: str) -> str:
    """The path of a program, from this environment first; skips the test where it is missing."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; .ci/run installs it")
    return path
