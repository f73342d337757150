"""Requests that could never run are refused with exact numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.runtime.capacity import Capacity


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty"),
        (1, -1, "max_tokens must be at least 0, got -1"),
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
        Capacity(max_sequence_length=4096, num_pages=193, page_size=16).check(
            num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens
        )
    assert str(refusal.value) == message


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 40), st.sampled_from([1, 7, 16]))
def test_the_most_tokens_just_fit(prompt: int, context: int, num_pages: int, size: int) -> None:
    capacity = Capacity(max_sequence_length=context, num_pages=num_pages, page_size=size)
    most = capacity.most_tokens(prompt)
    if most >= 1:
        capacity.check(num_prompt_tokens=prompt, max_tokens=most)
    with pytest.raises(InvalidRequest):
        capacity.check(num_prompt_tokens=prompt, max_tokens=max(most + 1, 1))


def test_what_just_fits_is_accepted() -> None:
    by_token = Capacity(max_sequence_length=4096, num_pages=4095, page_size=1)
    by_token.check(num_prompt_tokens=4095, max_tokens=1)
    by_token.check(num_prompt_tokens=4000, max_tokens=96)
    by_page = Capacity(max_sequence_length=4096, num_pages=2, page_size=16)
    by_page.check(num_prompt_tokens=17, max_tokens=16)
