"""Requests that could never run are refused with exact numbers."""

from __future__ import annotations

import pytest

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.scheduling.capacity import check_fits


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty"),
        (1, 0, "max_tokens must be at least 1, got 0"),
        (5000, 1, "prompt of 5000 tokens does not fit the context of 4096"),
        (4096, 1, "prompt of 4096 tokens does not fit the context of 4096"),
        (4000, 100, "max_tokens 100 with a prompt of 4000 tokens exceeds the context of 4096"),
        (
            3000,
            98,
            "max_tokens 98 with a prompt of 3000 tokens needs 194 pages of 16 tokens, "
            "the KV cache has 193",
        ),
    ],
)
def test_what_cannot_fit_is_refused(num_prompt_tokens: int, max_tokens: int, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_fits(num_prompt_tokens, max_tokens, 4096, num_pages=193, page_size=16)
    assert str(refusal.value) == message


def test_what_just_fits_is_accepted() -> None:
    check_fits(4095, 1, 4096, num_pages=4095, page_size=1)
    check_fits(4000, 96, 4096, num_pages=4095, page_size=1)
    check_fits(17, 16, 4096, num_pages=2, page_size=16)
