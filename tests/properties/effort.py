"""How many examples a test gets under the profile in force (see ``conftest``)."""

from __future__ import annotations

from hypothesis import settings

_BASE = 100


def examples(count: int) -> int:
    """``count`` under the default profile, proportionally more under a larger one."""
    profile = settings.default
    assert profile is not None
    return count * profile.max_examples // _BASE
