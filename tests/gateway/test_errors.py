"""What a caller is told of errors of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from minisgl_client.errors import Closed, error_from
from minisgl_gateway.errors import _LOST, api_error

from minisgl_backend.errors import EngineFailure, InvalidRequest
from minisgl_backend.runtime.capacity import Capacity

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


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(5000, 1), (4000, 100)])
def test_what_exceeds_the_context_has_a_code_of_its_own(num_prompt: int, max_tokens: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        capacity = Capacity(max_sequence_length=4096, num_pages=10_000, page_size=1)
        capacity.check(num_prompt_tokens=num_prompt, max_tokens=max_tokens)
    sentence = f"{InvalidRequest.code}: {refusal.value}"
    error = api_error(error_from(sentence), ("messages", "max_tokens"))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == ("max_tokens" if num_prompt < 4096 else "messages")
    other = api_error(error_from(f"{InvalidRequest.code}: max_tokens must be >= 1, got 0"), ())
    assert other.code == "invalid_value"


def test_a_client_that_is_closed_means_that_the_gateway_ends() -> None:
    error = api_error(Closed("the client was closed"), ())
    assert (error.status, error.code) == (503, "shutting_down")


def test_other_failures_of_the_engine_are_bugs() -> None:
    error = api_error(error_from(f"{EngineFailure.code}: a step breaks with this request"), ())
    assert (error.status, error.message) == (500, "internal error")
