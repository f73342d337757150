"""A matrix computes the same however it is kept and wherever the result goes."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.packing import is_packable
from minisgl_backend.layers.matrix import DenseMatrix
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.weight_place import Share

_BF16_IS_PACKED = is_packable(torch.ones(2, 2, dtype=torch.bfloat16))


@pytest.mark.skipif(not _BF16_IS_PACKED, reason="this processor lacks instructions for bfloat16")
def test_a_packed_matrix_takes_memory_for_its_result() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = DenseMatrix({"head": Share(48, 0, 48)}, Share(32, 0, 32), 48, formats={}, fused=False)
    matrix.to(torch.bfloat16)
    matrix.weight.data.normal_(generator=generator)
    x = torch.randn(3, 32, generator=generator).bfloat16()
    expected = x @ matrix.weight.data.T
    matrix.pack()
    y = matrix.gemm(Normed(x), out=torch.empty(3, 48, dtype=torch.bfloat16))
    torch.testing.assert_close(y, expected)
