"""GEMMs with quantized weights against plain torch on the numbers that these stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.float8_rows import float8_rows
from minisgl_backend.kernels.linear_cut import Cut
from minisgl_backend.kernels.packed_weight import (
    PackedWeight,
    dequantize_weight,
    pack,
)
from minisgl_backend.kernels.quantized import QuantizedWeight, dequantized, quantize
from minisgl_backend.kernels.quantized_linear import (
    Float8Weight,
    float8_linear,
    float8_linear_reference,
    quantized_linear,
    quantized_linear_reference,
)
from minisgl_backend.layers.matrix import DenseMatrix
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_matrix import rounded
from minisgl_backend.layers.weight_place import Share
from minisgl_backend.weight_format import Encoding
from tests.gpu.compare import assert_close
from tests.gpu.test_kernels_linear import check_residual, half_way, normal, normalized

needs_gpu = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")
ALL = 0
"""In a block's size: every output, or every input."""
FORMATS = {
    "fp8-tensor": (Encoding.E4M3, (ALL, ALL), True),
    "fp8-channel": (Encoding.E4M3, (1, ALL), True),
    "fp8-blocks": (Encoding.E4M3, (128, 128), True),
    "fp8-cut-blocks": (Encoding.E4M3, (32, 64), True),
    "mxfp8": (Encoding.E4M3, (1, 32), True),
    "int8-channel": (Encoding.INT8, (1, ALL), True),
    "int8-128": (Encoding.INT8, (1, 128), True),
    "int8-32-zeros": (Encoding.INT8, (1, 32), False),
    "int4-channel": (Encoding.INT4, (1, ALL), True),
    "int4-channel-zeros": (Encoding.INT4, (1, ALL), False),
    "int4-128": (Encoding.INT4, (1, 128), True),
    "int4-128-zeros": (Encoding.INT4, (1, 128), False),
    "int4-64-zeros": (Encoding.INT4, (1, 64), False),
    "int4-32": (Encoding.INT4, (1, 32), True),
    "mxfp4": (Encoding.E2M1, (1, 32), True),
    "nvfp4": (Encoding.E2M1, (1, 16), True),
}
BATCHES = [1, 8, 9, 17, 33, 64, 65, 96, 128, 129, 192, 200, 256]


def made(form: str, height: int, width: int, device: torch.device) -> QuantizedWeight:
    encoding, (rows, columns), symmetric = FORMATS[form]
    # scales and zero points differ from row to row and from group to group
    spread = torch.rand(height, 1, device=device) + torch.rand(1, width, device=device) + 0.1
    numbers = torch.randn(height, width, device=device) * spread / width**0.5
    if not symmetric:
        numbers += spread / width**0.5
    return quantize(numbers, encoding, (rows or height, columns or width), symmetric=symmetric)


def packed_of(weight: QuantizedWeight, *, gated: bool = False) -> tuple[PackedWeight, Tensor]:
    """The packed weight and its numbers, float32."""
    numbers = dequantized(weight, torch.float32)
    packed = pack(weight, gated=gated)
    assert packed is not None
    return packed, numbers


@needs_gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("size", "pdl"), [(1024, False), (1024, True), (1152, True)])
def test_gemms(device: torch.device, form: str, size: int, pdl: bool) -> None:
    """Several run in a row, so that each starts while another runs."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    pairs = [packed_of(made(form, 1280, size, device)) for _ in range(4)]
    kernel = LinearKernel((1280, size), device, codes=pairs[0][0].kind)
    for batch in BATCHES:
        x, bias = normal(batch, size, device=device), normal(1280, device=device)
        actual = [kernel(x, packed, bias=bias, pdl=pdl) for packed, _ in pairs]
        for of_kernel, (_, numbers) in zip(actual, pairs, strict=True):
            assert_close(of_kernel, F.linear(x.float(), numbers, bias.float()).bfloat16())


@needs_gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gated_gemms_of_rows_to_be_normalized(device: torch.device, form: str, gate: Gate) -> None:
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    packed, numbers = packed_of(made(form, 2560, 1024, device), gated=True)
    kernel = LinearKernel((2560, 1024), device, gate=gate, codes=packed.kind)
    for batch in BATCHES:
        x, norm = normal(batch, 1024, device=device, scale=3.0), normal(1024, device=device)
        actual = kernel(**half_way(x, norm), weight=packed)
        expected = open_gates_reference(F.linear(normalized(x, norm), numbers), gate)
        assert_close(actual, expected.bfloat16())


@needs_gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_gemms_of_many_tokens(device: torch.device, form: str, gate: Gate | None) -> None:
    from minisgl_backend.kernels.cuda.linear import TensorCores

    packed, numbers = packed_of(made(form, 2560, 1024, device), gated=gate is not None)
    make = TensorCores(device, 256)
    kernel = make.for_many((2560, 1024), codes=packed.kind, gate=gate)
    bias = normal(2560, device=device)
    for batch in (257, 320, 333, 512, 700, kernel.most_tokens):
        x = normal(batch, 1024, device=device)
        expected = F.linear(x.float(), numbers, bias.float())
        if gate is not None:
            expected = open_gates_reference(expected, gate)
        assert_close(kernel(x, packed, bias=bias), expected.bfloat16())


CUTS = [
    Cut(64, 8, 8),
    Cut(64, 64, 4, splits=4),
    Cut(128, 128, 3, splits=2),
    Cut(64, 16, 4, splits=8),
    Cut(64, 8, 8, even=True),
    Cut(128, 32, 5, even=True),
    Cut(64, 64, 4, even=True),
    Cut(128, 128, 3, even=True),
    Cut(128, 64, 4, splits=2),
    Cut(64, 96, 3),
    Cut(128, 8, 6, even=True, ways=2),
    Cut(128, 16, 4, splits=2, ways=2),
    Cut(64, 8, 8, ways=2),
]


@needs_gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ways_to_cut_a_gemm(device: torch.device, form: str, cut: Cut) -> None:
    """Added to the residual stream."""
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    packed, numbers = packed_of(made(form, 3072, 2048, device))
    cut = replace(cut, numbers=packed.kind.numbers(2048))
    if cut.shared_bytes > 227 * 1024:
        cut = replace(cut, stages=2)
    kernel = ResidualKernel((3072, 2048), device, cuts={256: cut}, codes=packed.kind)
    for batch in (5, 100, 256):
        x, norm = normal(batch, 2048, device=device), normal(3072, device=device)
        residual = normal(batch, 3072, device=device)
        expected = (residual.float() + F.linear(x.float(), numbers)).bfloat16()
        check_residual(kernel, x, packed, residual, norm, expected)


@needs_gpu
@pytest.mark.parametrize("form", ["fp8-blocks", "int4-128-zeros"])
@pytest.mark.parametrize(("height", "in_features"), [(7168, 5120), (34816, 5120), (5120, 17408)])
def test_gemms_of_large_weights(
    device: torch.device, form: str, height: int, in_features: int
) -> None:
    """The weights of Qwen3-14B, cut as they are there."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    packed, numbers = packed_of(made(form, height, in_features, device))
    kernel = LinearKernel((height, in_features), device, codes=packed.kind)
    for batch in BATCHES:
        x = normal(batch, in_features, device=device)
        assert_close(kernel(x, packed), F.linear(x.float(), numbers).bfloat16())


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_of_codes(device: torch.device, dtype: torch.dtype, form: str) -> None:
    weight = made(form, 128, 1152, device)
    expected = dequantized(weight, dtype)
    assert torch.equal(dequantize_weight(weight, dtype, packed=False), expected)
    packed = pack(weight)
    assert packed is not None
    assert torch.equal(dequantize_weight(packed.weight, dtype, packed=True), expected)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("height", "width"), [(96, 160), (100, 96)] if is_interpreted() else [(500, 544), (333, 96)]
)
def test_gemms_of_odd_sizes(
    device: torch.device, dtype: torch.dtype, form: str, height: int, width: int
) -> None:
    if math.gcd(width, 96) % 32:
        return
    weight = made(form, height, width, device)
    bias = torch.randn(height, device=device).to(dtype)
    for batch in (1, 17) if is_interpreted() else (1, 2, 15, 17, 63, 1000, 4096):
        x = torch.randn(batch, width + 8, device=device).to(dtype)[:, :width]
        for of_rows in (None, bias):
            expected = quantized_linear_reference(x, weight, of_rows)
            assert_close(quantized_linear(x, weight, of_rows), expected, tolerance=8e-3)


def test_reordered_inputs(device: torch.device, dtype: torch.dtype) -> None:
    weight = made("int4-32", 96, 160, device)
    order = torch.randperm(160, device=device)
    weight = replace(weight, groups=(torch.arange(160, device=device) // 32)[order].int())
    x = torch.randn(5, 160, device=device).to(dtype)
    expected = quantized_linear_reference(x, weight)
    assert_close(quantized_linear(x, weight), expected, tolerance=8e-3)


@pytest.mark.parametrize("form", ["fp8-blocks", "fp8-channel", "fp8-tensor"])
@pytest.mark.parametrize("batch", [1, 7, 63, 257, 1000, 4096])
@needs_gpu
def test_tokens_in_8_bits(device: torch.device, form: str, batch: int) -> None:
    packed, _ = packed_of(made(form, 1536, 1152, device))
    weight = Float8Weight.of(packed)
    assert weight is not None
    x, bias = normal(batch, 1152, device=device), normal(1536, device=device)
    rows = float8_rows(x, weight.group)
    expected = float8_linear_reference(rows, weight, x.dtype, bias)
    assert_close(float8_linear(rows, weight, x.dtype, bias), expected, tolerance=1e-2)


@needs_gpu
def test_a_rounded_copy_of_a_matrix(device: torch.device) -> None:
    """Its outputs are padded to the number that the kernels need."""
    from minisgl_backend.kernels.cuda.linear import TensorCores

    with device:
        parts, ins = {"head": Share(1008, 0, 1008)}, Share(384, 0, 384)
        matrix = DenseMatrix(parts, ins, 1008, formats={}, fused=True)
    matrix.to(torch.bfloat16)
    matrix.weight.copy_(normal(1008, 384, device=device))
    copy = rounded(matrix)
    assert copy.out_features == 1024 and copy.fits_tensor_cores()
    copy.use_tensor_cores(TensorCores(device, 64))
    numbers = dequantized(quantize(matrix.weight, Encoding.E4M3, (1, 384)), torch.float32)
    for batch in (1, 3, 8, 33, 64):
        x = normal(batch, 384, device=device)
        expected = F.linear(x.float(), numbers).bfloat16()
        assert_close(copy.gemm(Normed(x))[:, :1008], expected)
