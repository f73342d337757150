"""Names of attention backends on a GPU, as far as they can be told apart without one."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.attention import choose
from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.paged import PagedAttention
from minisgl_backend.attention.triton import TritonDecode, TritonPrefill
from minisgl_backend.errors import ConfigError

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, windows=(None,))


def choice(option: str | None) -> PagedAttention:
    return choose.choose_attention(
        option,
        SHAPE,
        page_size=16,
        kv_dtype=torch.bfloat16,
        max_batch_size=4,
        device=torch.device("cpu"),
    )


@pytest.fixture(autouse=True)
def pretend_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_triton", lambda: True)


@pytest.mark.parametrize("option", [None, "triton", "triton,triton", "triton, triton"])
def test_own_kernels_need_nothing(option: str | None) -> None:
    attention = choice(option)
    assert attention.name == "triton"
    assert isinstance(attention.prefill, TritonPrefill)
    assert isinstance(attention.decode, TritonDecode)


@pytest.mark.parametrize("option", ["fi", "trtllm", "sdpa", "tritn", "triton,fi", ""])
def test_unknown_names_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="offered are triton, fa"):
        choice(option)


def test_three_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="one or two names"):
        choice("triton,triton,triton")


def test_flash_attention_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="attention_backend fa needs a GPU"):
        choice("fa,triton")


def test_missing_triton_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="pip install triton"):
        choice("triton")
