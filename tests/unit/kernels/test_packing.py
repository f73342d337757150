"""Packed weights compute what the plain ones do."""

from __future__ import annotations

from typing import Final

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels.packing import is_packable, packed, packed_linear

PACKABLE: Final = [
    dtype for dtype in (torch.bfloat16, torch.float16) if is_packable(torch.ones(2, 2, dtype=dtype))
]
"""The types that this processor can pack."""


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
@pytest.mark.parametrize(("out_features", "in_features"), [(192, 64), (37, 23)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_weight_gives_the_same_outputs(
    dtype: torch.dtype, num_tokens: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    draws = torch.Generator().manual_seed(0)
    weight, wide = (
        torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype)
        for shape in ((out_features, in_features), (num_tokens, 2 * in_features))
    )
    bias = weight[:, 0].contiguous() if has_bias else None
    x = wide[:, in_features:]  # rows are strided
    with torch.inference_mode():
        actual = packed_linear(x, packed(weight), bias)
        torch.testing.assert_close(actual, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_weights_stay_as_they_are(dtype: torch.dtype) -> None:
    assert not is_packable(torch.ones(64, 32, dtype=dtype))
