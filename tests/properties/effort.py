"""How many examples a test gets under the profile in force (see ``tests/conftest.py``)."""

from __future__ import annotations

from hypothesis import settings

_BASE = 100


def examples(count: int) -> int:
    """``count`` under a profile of 100 examples, scaled in proportion under others."""
    profile = settings.default
    assert profile is not None
    return count * profile.max_examples // _BASE
