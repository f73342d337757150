"""Which steps are captured in CUDA graphs, and which options are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.attention.base import AttentionSetting, AttentionShape, PagedAttention
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.graph_sizes import (
    batch_sizes,
    graph_sizes,
    max_captured_batch_size,
    most_decode_rows,
    token_counts,
)

SDPA = SdpaAttention(
    AttentionSetting(
        shape=AttentionShape(
            num_heads=2, num_kv_heads=2, head_dim=64, scale=0.125, windows=(None,)
        ),
        page_size=16,
        max_sequence_length=128,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        max_batch_size=8,
        max_captured_batch_size=0,
        device=torch.device("cpu"),
    )
)
TRITON = PagedAttention("triton", SDPA, SDPA)
FI = PagedAttention("fi", SDPA, SDPA, captures_chunks=False)
SDPA_TRITON = PagedAttention("sdpa,triton", SDPA, SDPA, captures_chunks=False)
PLAIN = PagedAttention("sdpa", SDPA, SDPA, can_capture=False, captures_chunks=False)


def sizes(
    attention: PagedAttention, weights_per_layer: int = 3 * 10**8, **options: Any
) -> tuple[list[int], list[int]]:
    chosen = EngineOptions(max_running_requests=16, max_prefill_tokens=4000, **options)
    most = chosen.cuda_graph_max_batch_size
    return graph_sizes(
        chosen,
        attention,
        max_batch_size=16 if most is None else most,
        weights_per_layer=weights_per_layer,
    )


def test_large_models_capture_shorter_steps() -> None:
    decodes, large = sizes(TRITON)
    assert decodes == [1, 2, 4, 8, 16]
    assert large[-1] == 1024
    assert sizes(TRITON, 10**8)[1][-1] == 2000
    assert sizes(TRITON, 10**7)[1][-1] == 4016  # chunks and decoding rows


def test_the_option_decides() -> None:
    assert sizes(TRITON, cuda_graph_max_tokens=100)[1] == [16, 32, 64, 100]
    assert sizes(TRITON, cuda_graph_max_tokens=10**6)[1][-1] == 4016
    assert sizes(TRITON, cuda_graph_max_tokens=0) == ([1, 2, 4, 8, 16], [])


@pytest.mark.parametrize(
    ("attention", "options", "expected"),
    [
        (FI, {}, ([1, 2, 4, 8, 16], [])),
        (SDPA_TRITON, {"cuda_graph_max_tokens": 0}, ([1, 2, 4, 8, 16], [])),
        (TRITON, {"cuda_graph_max_batch_size": 0}, ([], [])),
        (PLAIN, {}, ([], [])),
        (PLAIN, {"cuda_graph_max_batch_size": 0, "cuda_graph_max_tokens": 0}, ([], [])),
    ],
)
def test_what_cannot_be_captured_is_not(
    attention: PagedAttention, options: dict[str, Any], expected: tuple[list[int], list[int]]
) -> None:
    assert sizes(attention, **options) == expected


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (FI, {"cuda_graph_max_tokens": 64}, "fi cannot be captured in steps with prompts"),
        (SDPA_TRITON, {"cuda_graph_max_tokens": 64}, "sdpa,triton cannot be captured in steps"),
        (PLAIN, {"cuda_graph_max_tokens": 64}, "sdpa cannot be captured in CUDA graphs"),
        (PLAIN, {"cuda_graph_max_batch_size": 4}, "sdpa cannot be captured in CUDA graphs"),
        (PLAIN, {"cuda_graph_batch_sizes": "1,2"}, "sdpa cannot be captured in CUDA graphs"),
        (
            TRITON,
            {"cuda_graph_batch_sizes": "1,2", "cuda_graph_max_batch_size": 0},
            "cuda_graph_batch_sizes=1,2 does not go with cuda_graph_max_batch_size=0",
        ),
    ],
)
def test_options_that_ask_for_it_are_refused(
    attention: PagedAttention, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(attention, **options)


@pytest.mark.parametrize(
    ("options", "weights_per_layer", "most"),
    [
        ({}, 2 * 10**7, 2048),
        ({}, 4 * 10**8, 500),
        ({}, 10**9, 256),
        ({"cuda_graph_max_batch_size": 200}, 2 * 10**7, 200),
        ({"max_running_requests": 64}, 10**9, 64),
    ],
)
def test_decode_steps_are_captured_up_to_the_most_running_requests(
    options: dict[str, Any], weights_per_layer: int, most: int
) -> None:
    chosen = EngineOptions(**{"max_running_requests": 2048, **options})
    assert max_captured_batch_size(chosen, weights_per_layer) == most


def test_batch_sizes_to_capture() -> None:
    assert batch_sizes(0, None) == []
    assert batch_sizes(1, None) == [1]
    assert batch_sizes(20, None) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(256, None)[-2:] == [248, 256]
    assert batch_sizes(600, None)[34:] == [256, *range(272, 512, 16), 512, 544, 576, 600]
    assert batch_sizes(256, "8, 1,8") == [1, 8]
    for wrong in ("0", "257", "1,x", ""):
        with pytest.raises(ConfigError, match="cuda_graph_batch_sizes"):
            batch_sizes(256, wrong)


@pytest.mark.parametrize(
    ("whole_step", "most", "sizes"),
    [
        (1000, 0, []),
        (1, 1000, [1]),
        (10, 1000, [10]),
        (16, 1000, [16]),
        (80, 1000, [16, 32, 64, 80]),
        (80, 40, [16, 32, 40]),
        (8448, 256, [16, 32, 64, 128, 160, 192, 224, 256]),
        (300, 8448, [16, 32, 64, 128, 160, 192, 224, 256, 300]),
    ],
)
def test_token_counts_to_capture(whole_step: int, most: int, sizes: list[int]) -> None:
    assert token_counts(whole_step, most) == sizes


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_token_counts_leave_little_to_padding(whole_step: int, most: int) -> None:
    sizes = token_counts(whole_step, most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(whole_step, most)
    for smaller, size in pairwise(sizes):
        assert size <= (2 if size <= 128 else 1.25) * smaller


@pytest.mark.parametrize(
    ("chosen", "most"),
    [
        ({}, 256),
        ({"speculative_tokens": 7}, 256),
        ({"speculative_tokens": 63, "max_running_requests": 100}, 8 + 8 * 63),
        ({"speculative_tokens": 7, "max_running_requests": 4}, 4 + 4 * 7),
        ({"speculative_tokens": 64, "max_running_requests": 8, "max_prefill_tokens": 64}, 8 + 32),
        ({"speculative_tokens": 64, "speculative_max_requests": 256}, 256 + 4096),
    ],
)
def test_a_decode_step_has_a_row_for_each_guess(chosen: dict[str, Any], most: int) -> None:
    options = EngineOptions(**chosen)
    assert most_decode_rows(options) == most
    assert most <= options.max_running_requests + options.most_guesses, (
        "the table has as many lines"
    )
