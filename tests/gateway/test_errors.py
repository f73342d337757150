"""What a caller is told of errors of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from minisgl_client.errors import Closed, error_from
from minisgl_gateway.errors import _LOST, api_error

from minisgl_backend.errors import EngineFailure

BACKEND = Path(__file__).parents[2] / "minisgl_backend"


@pytest.mark.parametrize(
    "sentence",
    [
        *(f"{EngineFailure.code}: {text}" for text in sorted(_LOST)),
        "Stub process 'llm_engine_0_0' is not healthy.",
    ],
)
def test_a_request_that_is_lost_with_a_process_may_come_again(sentence: str) -> None:
    error = api_error(error_from(f"in ensemble 'minisgl', {sentence}"), ())
    assert (error.status, error.code) == (503, "engine_unavailable")
    assert error.headers == {"Retry-After": "1"}


def test_the_engine_speaks_so() -> None:
    sources = [path.read_text("utf-8") for path in BACKEND.rglob("*.py")]
    assert [text for text in _LOST if not any(f'"{text}"' in source for source in sources)] == []


def test_a_client_that_is_closed_means_that_the_gateway_ends() -> None:
    error = api_error(Closed("the client was closed"), ())
    assert (error.status, error.code) == (503, "shutting_down")


def test_other_failures_of_the_engine_are_bugs() -> None:
    error = api_error(error_from(f"{EngineFailure.code}: a step breaks with this request"), ())
    assert (error.status, error.message) == (500, "internal error")
