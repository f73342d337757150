"""A benchmark's own gateway that does not start."""

from __future__ import annotations

import pytest

from minisgl_backend.errors import EngineFailure
from minisgl_kit import own_gateway


def test_a_gateway_that_refuses_an_option_is_quoted() -> None:
    with (
        pytest.raises(EngineFailure, match=r"does not start: Error: No such option.*nonsense"),
        own_gateway.gateway_of("127.0.0.1:1", "--nonsense"),
    ):
        pass


def test_a_gateway_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_gateway, "_STARTS_WITHIN_S", 0.01)
    with (
        pytest.raises(EngineFailure, match="does not start: it says nothing"),
        own_gateway.gateway_of("127.0.0.1:1"),
    ):
        pass
