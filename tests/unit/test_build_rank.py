"""Which steps of a GPU are captured, and options that ask for what cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.paged import PagedAttention
from minisgl_backend.attention.paged_sdpa import PagedSdpa
from minisgl_backend.build_rank import graph_sizes
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution import capture

SDPA = PagedSdpa(
    AttentionShape(num_heads=2, num_kv_heads=2, head_dim=64, scale=0.125, windows=(None,))
)
TRITON = PagedAttention("triton", SDPA, SDPA)
FI = PagedAttention("fi", SDPA, SDPA, captures_chunks=False)
SDPA_TRITON = PagedAttention("sdpa,triton", SDPA, SDPA, captures_chunks=False)
PLAIN = PagedAttention("sdpa", SDPA, SDPA, can_capture=False, captures_chunks=False)


def sizes(
    attention: PagedAttention, num_weights: int = 10**10, **options: Any
) -> tuple[list[int], list[int]]:
    chosen = EngineOptions(max_running_requests=16, max_prefill_tokens=4000, **options)
    most = chosen.cuda_graph_max_batch_size
    return graph_sizes(
        chosen, attention, max_batch_size=16 if most is None else most, num_weights=num_weights
    )


def test_large_models_capture_shorter_steps() -> None:
    decodes, large = sizes(TRITON)
    assert decodes == [1, 2, 4, 8, 16]
    assert large[-1] == 1024
    assert sizes(TRITON, 2 * 10**9)[1][-1] == 2000
    assert sizes(TRITON, 10**8)[1][-1] == 4016  # chunks and decoding rows


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
            {"cuda_graph_max_tokens": 64, "cuda_graph_max_batch_size": 0},
            "cuda_graph_max_tokens=64 does not go with cuda_graph_max_batch_size=0",
        ),
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


def test_too_little_memory_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(size: int) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    device: Any = SimpleNamespace(queue=torch.inference_mode, stream=None)
    with pytest.raises(ConfigError, match=r"number of tokens 64 does not fit .* or cuda_graph_x"):
        capture.capture(
            device,
            "number of tokens",
            [32, 64],
            work,
            prepare=lambda size: None,
            option="cuda_graph_x",
        )
