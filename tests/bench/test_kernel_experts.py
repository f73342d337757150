"""The bytes that the bound of `minisgl bench kernels` counts for experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_bench.kernel_experts import FORMS, weight_bytes

HIDDEN, INNER = 256, 256


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", 2 * 3 * HIDDEN * INNER),
        # a float32 scale per 8 rows and 128 inputs
        ("fp8", 3 * HIDDEN * INNER + 4 * (2 * INNER // 8 * 2 + HIDDEN // 8 * 2)),
        # a scale with its zero point, 4 bytes, per row and 128 inputs
        ("int4", 3 * HIDDEN * INNER // 2 + 4 * (2 * INNER * 2 + HIDDEN * 2)),
        # an exponent per row and 32 inputs, and biases in bfloat16
        (
            "mxfp4",
            3 * HIDDEN * INNER // 2 + 2 * INNER * 8 + HIDDEN * 8 + 2 * (2 * INNER + HIDDEN),
        ),
    ],
)
def test_bytes_of_the_experts_that_are_used(name: str, expected: int) -> None:
    form = replace(FORMS[name], num_experts=4, top_k=2, hidden=HIDDEN, inner=INNER)
    experts = form.made(torch.device("cpu"))
    assert weight_bytes(experts, 3) == 3 * expected
