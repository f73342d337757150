"""Checkpoints to split, and one computing thread a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conformance.checkpoints import write_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_computing_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by case; all have four query heads and two key-value heads."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in ("llama", "qwen3", "qwen3-moe"):
        write_checkpoint(case, folder / case)
    return folder
