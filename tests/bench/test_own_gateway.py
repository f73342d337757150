"""A benchmark's own gateway that does not start, or is left with its work."""

from __future__ import annotations

import signal

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


def test_a_gateway_is_not_asked_to_finish_its_requests() -> None:
    """That may take longer than an interrupted benchmark has to clean up."""
    with own_gateway.gateway_of("127.0.0.1:1") as gateway:
        gateway.process.send_signal(signal.SIGSTOP)  # it would not even begin with it
    assert gateway.process.returncode == -signal.SIGKILL
