"""Checkpoints to split."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.checkpoints import write_checkpoint, write_checkpoint_of_eight_heads


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by case; all have four query heads and two key-value heads, except
    ``eight-heads``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in ("llama", "qwen3", "qwen3-moe", "gpt-oss", "llama4", "mistral-window", "qwen3.5"):
        write_checkpoint(case, folder / case)
    write_checkpoint_of_eight_heads(folder / "eight-heads")
    return folder
