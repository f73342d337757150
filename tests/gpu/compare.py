"""How a kernel's result is compared with its twin's."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, both as vectors; NaN never passes a bound."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def assert_close(actual: Tensor, expected: Tensor, *, tolerance: float | None = None) -> None:
    """Equal shape and dtype, and values within the rounding of the dtype."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if tolerance is None:
        tolerance = TOLERANCE[expected.dtype]
    assert relative_error(actual, expected) < tolerance
