"""One LLM with the demo model that tests share; some need their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl_backend import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(seed=1) as shared:
        yield shared
