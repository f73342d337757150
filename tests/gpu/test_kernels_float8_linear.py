"""GEMMs of weights and tokens in float8 on Hopper against plain torch on the same numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.float8_cut import Float8Cut
from minisgl_backend.kernels.float8_rows import float8_rows
from minisgl_backend.kernels.packed_weight import PackedWeight, pack
from minisgl_backend.kernels.quantized import FP8_MAX, dequantized, quantize
from minisgl_backend.weight_format import Encoding
from tests.gpu.compare import assert_close

pytestmark = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")

CUTS = [Float8Cut(tokens, shared) for tokens in (64, 96, 128) for shared in (False, True)]
GATES: dict[str, Gate] = {"two share a tile": "silu", "two share a tile, gelu": "gelu"}
SHAPES = {
    "a step each": (1024, 512),
    "many share a tile": (1536, 5120),
    **dict.fromkeys(GATES, (256 * 138, 512)),
    "some of all": (5120, 1280),
}


def made(
    height: int, in_features: int, device: torch.device, *, block: tuple[int, int], gated: bool
) -> tuple[PackedWeight, Tensor]:
    """A weight as kernels take it, and its numbers."""
    plain = torch.randn(height, in_features, device=device) * in_features**-0.5
    weight = quantize(plain, Encoding.E4M3, block, symmetric=True)
    numbers = dequantized(weight, torch.float32)
    packed = pack(weight, gated=gated)
    assert packed is not None
    return packed, numbers


def rounded(x: Tensor) -> Tensor:
    scales = x.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (x.float() / scales).to(torch.float8_e4m3fn).float() * scales


def expected(x: Tensor, numbers: Tensor, bias: Tensor | None, gate: Gate | None) -> Tensor:
    y = rounded(x) @ numbers.T
    if bias is not None:
        y += bias.float()
    return (y if gate is None else open_gates_reference(y, gate)).to(x.dtype)


@cache
def case_of(
    sizes: str, device: torch.device
) -> tuple[PackedWeight, Tensor, Any, dict[Float8Cut, Any]]:
    """A weight, its numbers, the kernels' memory, and a kernel per cut, compiled in parallel."""
    from minisgl_backend.kernels.cuda.float8_linear import Float8Kernel, Workspace

    height, in_features = SHAPES[sizes]
    block = (1, in_features) if sizes == "some of all" else (128, 128)
    gate = GATES.get(sizes)
    packed, numbers = made(height, in_features, device, block=block, gated=gate is not None)
    workspace = Workspace(device)

    def compiled(cut: Float8Cut) -> Float8Kernel:
        shape = height, in_features
        return Float8Kernel(shape, workspace, codes=packed.kind, gate=gate, cut=cut)

    with ThreadPoolExecutor() as pool:
        kernels = dict(zip(CUTS, pool.map(compiled, CUTS), strict=True))
    return packed, numbers, workspace, kernels


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.tokens}{'-shared' * cut.shared}")
def test_every_cut(device: torch.device, cut: Float8Cut, sizes: str) -> None:
    """Twice in a row, the second run starting early: the same bits, and counters are 0 again."""
    torch.backends.cuda.matmul.allow_tf32 = False
    packed, numbers, workspace, kernels = case_of(sizes, device)
    kernel, (height, in_features) = kernels[cut], SHAPES[sizes]
    bias = torch.randn(height, device=device).bfloat16()
    for num_rows in (1, 65, 96, 200, 256, 500):
        x = torch.randn(num_rows, in_features, device=device).bfloat16()
        x *= torch.rand(num_rows, 1, device=device) * 4
        for given in (None, bias):
            y = kernel(float8_rows(x, in_features), packed, bias=given)
            rows = float8_rows(x, in_features, pdl=True)
            again = kernel(rows, packed, bias=given, pdl=True)
            assert_close(y, expected(x, numbers, given, GATES.get(sizes)))
            assert torch.equal(y, again)
    assert not workspace.counters.any()
