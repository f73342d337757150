"""An engine with the default sizes, for tests that need no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.runtime.bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench() as it:
        yield it
