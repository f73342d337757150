"""The gateway that the tests of docker/ start."""

from __future__ import annotations

from tests.docker.conftest import gateway

__all__ = ["gateway"]
