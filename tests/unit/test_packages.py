"""The line that tells an operator which packages a GPU lacks."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from minisgl_backend import packages


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that seem to be installed; no others that speed up a GPU do."""
    found: set[str] = set()

    def import_module(name: str) -> ModuleType:
        if name not in found:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return sys.modules[__name__]

    monkeypatch.setattr("minisgl_backend.packages.importlib.import_module", import_module)
    return found


def test_with_all_packages_nothing_is_said(installed: set[str]) -> None:
    installed |= {"cuda.bindings", "sgl_kernel.flash_attn"}
    assert packages.slower_without(9) is None


def test_what_hopper_lacks_is_one_line_with_cost_and_command(installed: set[str]) -> None:
    line = packages.slower_without(9)
    assert line is not None
    assert "\n" not in line
    assert "without cuda (No module named 'cuda.bindings') decoding runs on Triton" in line
    assert packages.CUDA_BINDINGS in line
    assert packages.FLASH_ATTN in line


def test_only_what_the_gpu_would_use_is_missed(installed: set[str]) -> None:
    assert packages.slower_without(8) is None
    blackwell = packages.slower_without(10)
    assert blackwell is not None
    assert packages.FLASH_ATTN not in blackwell
