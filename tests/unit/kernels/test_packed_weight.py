"""The order of packed weights that Hopper's kernels read, and what it stands for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final

import pytest
import torch

from minisgl_backend.kernels.float8_rows import float8_rows
from minisgl_backend.kernels.packed_weight import (
    PLACES_OF_BYTES,
    dequantize_weight,
    pack,
)
from minisgl_backend.kernels.quantized import QuantizedWeight, dequantized, quantize
from minisgl_backend.kernels.quantized_linear import Float8Weight, float8_linear
from minisgl_backend.weight_format import GROUP_OF_NVFP4, Encoding

BLOCKS: Final = [(1, 256), (128, 128), (1, 32), (8, 64)]
KINDS: Final = [
    *product(Encoding, BLOCKS, [True]),
    *product([Encoding.INT4, Encoding.INT8], BLOCKS, [False]),
    (Encoding.E2M1, (1, GROUP_OF_NVFP4), True),
]
"""Encodings, blocks, and whether there are no zero points."""


def weight_of(
    encoding: Encoding, block: tuple[int, int], *, symmetric: bool = True, size: int = 256
) -> QuantizedWeight:
    torch.manual_seed(0)
    return quantize(torch.randn(128, size), encoding, block, symmetric=symmetric)


@pytest.mark.parametrize(("encoding", "block", "symmetric"), KINDS)
def test_a_packed_weight_stands_for_the_same_numbers(
    encoding: Encoding, block: tuple[int, int], symmetric: bool
) -> None:
    weight = weight_of(encoding, block, symmetric=symmetric)
    expected = dequantized(weight, torch.float32)
    packed = pack(weight)
    assert packed is not None and packed.shape == (128, 256)
    assert torch.equal(dequantize_weight(packed.weight, torch.float32, packed=True), expected)
    # decoded as by a thread of the kernel: scales from the ring, codes by the rules of codes.cuh
    kind, numbers = packed.kind, torch.empty(128, 256)
    for row, k in product(range(0, 128, 9), range(0, 256, 7)):
        code = code_of_thread(packed.weight, row, k)
        if kind.group == 0:
            assert packed.scales is None and packed.row_scales is not None
            scale, zero = packed.row_scales[row], None
        else:
            assert packed.scales is not None
            in_stage = k % 128 // kind.group, row % 64 // kind.shared_by
            at = packed.scales[row // 64, k // 128][in_stage]
            word = int(at.view(torch.int32))
            if packed.row_scales is not None:  # 8 bits of a bfloat16 for one of 4 groups
                word = (word >> k % 64 // 16 * 8 & 255) << 20 | 0x60000000
            elif encoding is Encoding.E2M1:  # the exponent of one of 4 groups, shifted by 62
                word = (word >> k % 128 // 32 * 8 & 255) - 62 << 23
            zero = word & 255 if kind.zeros else None
            scale = torch.tensor(word & ~255 if kind.zeros else word, dtype=torch.int32).view(
                torch.float32
            )
            if packed.row_scales is not None:  # made for numbers that are 2^126 too small
                scale = scale * 2.0**-126 * packed.row_scales[row]
        numbers[row, k] = number_of(encoding, code, zero) * scale
        torch.testing.assert_close(numbers[row, k], expected[row, k], rtol=1e-4, atol=0)


def test_all_scales_of_nvfp4_are_kept() -> None:
    """Where one is 0, so are the numbers, whatever the codes."""
    weight = weight_of(Encoding.E2M1, (1, GROUP_OF_NVFP4))
    scales = torch.arange(128).clamp(max=126).to(torch.uint8).view(torch.float8_e4m3fn)
    weight.scales.copy_(scales[:, None])
    weight.codes.fill_(0x77)  # 6
    packed = pack(weight)
    assert packed is not None and packed.scales is not None and packed.row_scales is not None
    kept = packed.scales[:, 0, 0].flatten().view(torch.int32) & 255  # of each row's first group
    in_kernel = (kept << 20 | 0x60000000).view(torch.float32) * 2.0**-126 * packed.row_scales
    assert weight.row_scales is not None
    assert torch.equal(in_kernel[1:], scales.float()[1:] * weight.row_scales[1:])
    numbers = dequantize_weight(packed.weight, torch.float32, packed=True)
    assert torch.equal(numbers, (6 * scales.float() * weight.row_scales)[:, None].expand(-1, 256))
    assert packed.weight.codes[0].eq(0).all()


def code_of_thread(weight: QuantizedWeight, row: int, k: int) -> int:
    """Thread ``quad`` of a group of four has a 4-byte word per 16 or 32 inputs."""
    quad, odd, upper = k % 8 // 2, k % 2, k % 16 // 8
    words = weight.codes.view(torch.uint8)[row].view(torch.int32)
    if weight.encoding.bits == 8:
        word = int(words[k // 16 * 4 + quad]) & 0xFFFFFFFF
        return word >> (16 * odd + (0 if upper else 8)) & 255
    word = int(words[k // 32 * 4 + quad]) & 0xFFFFFFFF
    pair = k % 32 // 16 * 2 + upper
    if weight.encoding is Encoding.INT4:
        return word >> (16 * odd + 4 * pair) & 15
    at = (word, word << 3 ^ word << 4, word << 6, word << 5 ^ word >> 6)[pair]
    at = at >> 16 * odd & 0x81C0
    return at >> 12 | at >> 6 & 7  # the sign, and what follows in bfloat16


def number_of(encoding: Encoding, code: int, zero: int | None) -> float:
    if encoding is Encoding.E4M3:
        return float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn))
    if encoding is Encoding.E2M1:
        return (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1.0 if code > 7 else 1.0)
    return code - (zero if zero is not None else 1 << encoding.bits - 1)


def test_rows_of_a_gated_weight_alternate_in_its_scales() -> None:
    weight = weight_of(Encoding.INT4, (1, 128))
    scales = weight.scales.clone()
    packed = pack(weight, gated=True)
    assert packed is not None and packed.scales is not None
    in_order = packed.scales[:, 1, 0].flatten()  # of the second 128 inputs
    rows = torch.arange(128).view(2, 8, 8).transpose(0, 1).flatten()
    assert torch.equal(in_order, scales[rows, 1])


@pytest.mark.parametrize("encoding", [Encoding.INT4, Encoding.INT8])
def test_reordered_inputs_are_sorted(encoding: Encoding) -> None:
    weight = weight_of(encoding, (1, 64))
    order = torch.randperm(256)
    weight = replace(weight, groups=(torch.arange(256) // 64)[order].int())
    x, expected = torch.randn(5, 256), dequantized(weight, torch.float32)
    packed = pack(weight)
    assert packed is not None and packed.kind.group == 64
    numbers = dequantize_weight(packed.weight, torch.float32, packed=True)
    torch.testing.assert_close(packed.ordered(x) @ numbers.t(), x @ expected.t(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", [(128, 128), (1, 256)])
def test_tokens_in_8_bits_are_near_to_what_they_were(block: tuple[int, int]) -> None:
    packed = pack(weight_of(Encoding.E4M3, block))
    assert packed is not None
    weight = Float8Weight.of(packed)
    assert weight is not None and weight.in_blocks == (block == (128, 128))
    x, bias = torch.randn(7, 256), torch.randn(128)
    numbers = dequantize_weight(packed.weight, torch.float32, packed=True)
    expected = x @ numbers.t() + bias
    rows = float8_rows(x, weight.group)
    found = float8_linear(rows, weight, torch.float32, bias)
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert (found - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize(
    ("encoding", "block"), [(Encoding.INT8, (1, 256)), (Encoding.E4M3, (64, 128))]
)
def test_other_weights_are_not_for_tokens_in_8_bits(
    encoding: Encoding, block: tuple[int, int]
) -> None:
    packed = pack(weight_of(encoding, block))
    assert packed is not None and Float8Weight.of(packed) is None


def test_weights_that_kernels_cannot_take_stay_as_they_are() -> None:
    uneven = torch.zeros(256, dtype=torch.int32)
    uneven[100:] = 1
    weights = [
        weight_of(Encoding.E4M3, (128, 128), size=192),
        weight_of(Encoding.INT4, (1, 48)),
        replace(weight_of(Encoding.INT4, (1, 128)), groups=uneven),
    ]
    for weight in weights:
        codes = weight.codes.clone()
        assert pack(weight) is None
        assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
    assert sorted(PLACES_OF_BYTES) == list(range(16))
