"""Settings of the tests that compute with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_computing_thread() -> Iterator[None]:
    """Models this small are computed fastest by one thread, whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
