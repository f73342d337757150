"""One LLM with the demo model, which the tests share; some need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl_backend import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(seed=1) as shared:
        yield shared
