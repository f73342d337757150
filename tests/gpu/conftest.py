"""Kernels on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1) on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.kernels.dispatch import has_triton, is_interpreted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder carries the mark, and says why if it cannot run."""
    runnable = has_triton() and (torch.cuda.is_available() or is_interpreted())
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not runnable:
                item.add_marker(pytest.mark.skip(reason="no GPU, or no Triton"))


@pytest.fixture
def device() -> torch.device:
    torch.manual_seed(0)
    return torch.device("cpu" if is_interpreted() else "cuda")


@pytest.fixture
def dtype() -> torch.dtype:
    """The interpreter computes with numpy, which cannot multiply in bfloat16."""
    return torch.float32 if is_interpreted() else torch.bfloat16
