"""Quantized weights: their only layout in memory, and the numbers that they stand for.

Whatever the layout in a checkpoint (``layers.weight_layouts``), in memory a weight is a
``QuantizedWeight``: codes, scales and, if there are any, zero points. This is the input of kernels
for quantized weights. Their twin is ``dequantize`` and a plain GEMM. The twin does not quantize
activations. A kernel may do so, and then this is part of its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.weight_format import GROUP_OF_NVFP4, Encoding

FP8_MAX: Final = 448.0
"""The largest finite value of float8_e4m3fn."""
_LEAST_FLOAT8: Final = 2.0**-9
"""Its smallest value above 0."""
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BETWEEN: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_NUMBERS_ON_CPU: Final = 2**20
_NUMBERS_ON_GPU: Final = 2**22
"""How many numbers of a weight are taken at a time, which bounds the memory of float32 copies. A
CPU is several times faster if these stay in its caches."""

KINDS: Final = {Encoding.E4M3: 1, Encoding.INT8: 2, Encoding.INT4: 3, Encoding.E2M1: 4}
"""What kernels call encodings: KIND in Triton, CODE of ``cuda/codes.cuh``."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]; with a leading dimension, the weights of all experts.

    The number for output o and input i is (code[o, i] - zero) * scale, with the zero and the scale
    of the block that o and i are in, and with ``row_scales`` times that of o.

        codes    E4M3   float8_e4m3fn [out, in]
                 INT8   uint8 [out, in]; 128 stands for 0 if there are no zeros
                 INT4   uint8 [out, in / 2], the even input in the low half; 8 stands for 0
                 E2M1   uint8 [out, in / 2], likewise; bit 3 of a code is the sign, the others
                        count through 0, 0.5, 1, 1.5, 2, 3, 4, 6
        scales   [ceil(out / block[0]), ceil(in / block[1])]: floats, in float32 for E4M3 and in
                 kept weights for whole rows; for E2M1 uint8, exponents of 2 plus 127, or with
                 ``row_scales`` float8_e4m3fn, not negative
        zeros    uint8 in the shape of ``scales``, from 0 to 16 for INT4; None: 8, or 128
        groups   int32 [in]: each input's column of ``scales``; None: i // block[1]. With
                 ``groups``, ``scales`` has a column for every group of the checkpoint's whole
                 weight, of which a rank may need only some.
        row_scales   float32 [out], of E2M1 in NVFP4; None: 1
    """

    encoding: Encoding
    block: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None
    row_scales: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.codes.shape[-1] * (2 if self.encoding.bits == 4 else 1)

    def expert(self, index: int) -> QuantizedWeight:
        """One of a stack of weights."""
        zeros, groups, row_scales = (
            None if tensor is None else tensor[index]
            for tensor in (self.zeros, self.groups, self.row_scales)
        )
        return QuantizedWeight(
            self.encoding,
            self.block,
            self.codes[index],
            self.scales[index],
            zeros,
            groups,
            row_scales,
        )


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of the same shape and format, as one with a leading dimension."""
    first = weights[0]

    def together(parts: Iterable[Tensor | None]) -> Tensor | None:
        held = [part for part in parts if part is not None]
        return torch.stack(held) if held else None

    return QuantizedWeight(
        first.encoding,
        first.block,
        torch.stack([weight.codes for weight in weights]),
        torch.stack([weight.scales for weight in weights]),
        together(weight.zeros for weight in weights),
        together(weight.groups for weight in weights),
        together(weight.row_scales for weight in weights),
    )


def dequantize(weight: QuantizedWeight, out: Tensor) -> Tensor:
    """Write the numbers into ``out`` [out_features, in_features], computed in float32."""
    for rows in _row_blocks(out, step=weight.block[0]):
        numbers = _numbers(weight, weight.codes[rows])  # [rows, in_features]
        if weight.zeros is not None:
            numbers -= _of_elements(weight, weight.zeros.float(), rows)
        elif weight.encoding in (Encoding.INT4, Encoding.INT8):
            numbers -= 1 << (weight.encoding.bits - 1)
        numbers *= _of_elements(weight, factors_of(weight), rows)
        if weight.row_scales is not None:
            numbers *= weight.row_scales[rows, None]
        out[rows] = numbers
    return out


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers, [out_features, in_features], of one weight or of a stack of them."""
    if weight.codes.dim() == 3:
        return torch.stack(
            [dequantized(weight.expert(index), dtype) for index in range(len(weight.codes))]
        )
    shape = len(weight.codes), weight.in_features
    return dequantize(weight, torch.empty(shape, dtype=dtype, device=weight.codes.device))


def quantize(
    weight: Tensor, encoding: Encoding, block: tuple[int, int], *, symmetric: bool = True
) -> QuantizedWeight:
    """The nearest numbers that ``encoding`` has, [out_features, in_features], without calibration.

    A scale maps the largest absolute value of its block to the largest code. If not ``symmetric``,
    which only integers can be, it maps the smallest and largest values to the smallest and largest
    codes. E2M1 in groups of ``GROUP_OF_NVFP4`` is NVFP4, otherwise MXFP4.
    """
    rows, columns = block
    (out_features, in_features), device = weight.shape, weight.device
    shape = -(-out_features // rows), -(-in_features // columns)
    scales = torch.empty(shape, dtype=torch.float32, device=device)
    zeros = None if symmetric else torch.empty(shape, dtype=torch.uint8, device=device)
    width = in_features // 2 if encoding.bits == 4 else in_features
    dtype = torch.float8_e4m3fn if encoding is Encoding.E4M3 else torch.uint8
    codes = torch.empty((out_features, width), dtype=dtype, device=device)
    row_scales = None
    if encoding is Encoding.E2M1 and columns == GROUP_OF_NVFP4:
        scales = scales.to(torch.float8_e4m3fn)
        largest_scale = (weight.abs().max().float() / (FP8_MAX * _E2M1[-1])).clamp_min(2.0**-120)
        row_scales = largest_scale.expand(out_features).contiguous()
    elif encoding is Encoding.E2M1:
        scales = scales.to(torch.uint8)
    found = QuantizedWeight(encoding, block, codes, scales, zeros, row_scales=row_scales)
    by_encoding = {Encoding.E2M1: _encode_e2m1, Encoding.E4M3: _encode_e4m3}
    encode = by_encoding.get(encoding, _encode_integers)
    for part in _row_blocks(weight, step=rows):
        lines = slice(part.start // rows, -(-min(part.stop, out_features) // rows))
        encode(found, weight[part].float(), part, lines)
    return found


def _encode_e2m1(out: QuantizedWeight, numbers: Tensor, part: slice, lines: slice) -> None:
    """Write scales and codes of ``numbers``, the rows ``part``, whose blocks are ``lines``."""
    largest = _largest(numbers, out.block)
    if out.row_scales is None:
        exponents = largest.clamp_min(2.0**-120).frexp().exponent - 3  # the largest is >= 4
        out.scales[lines] = (exponents + 127).to(torch.uint8)
    else:
        of_groups = largest / (out.row_scales[part, None] * _E2M1[-1])
        out.scales[lines] = of_groups.clamp(_LEAST_FLOAT8, FP8_MAX).to(out.scales.dtype)
        numbers = numbers / out.row_scales[part, None]
    scaled = numbers / _of_elements(out, factors_of(out), part)
    index = torch.bucketize(scaled.abs(), scaled.new_tensor(_E2M1_BETWEEN), right=True)
    out.codes[part] = joined(index.to(torch.uint8) + 8 * scaled.signbit().to(torch.uint8))


def _encode_e4m3(out: QuantizedWeight, numbers: Tensor, part: slice, lines: slice) -> None:
    """The same."""
    largest = _largest(numbers, out.block)
    out.scales[lines] = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    scaled = numbers / _of_elements(out, out.scales, part)
    out.codes[part] = scaled.clamp_(-FP8_MAX, FP8_MAX).to(out.codes.dtype)


def _encode_integers(out: QuantizedWeight, numbers: Tensor, part: slice, lines: slice) -> None:
    """The same, and zeros, if there are any."""
    bits, zeros = out.encoding.bits, out.zeros
    most = (1 << bits) - 1
    low, high = _extremes(numbers, out.block)
    low, high = low.clamp_max(0), high.clamp_min(0)
    steps = torch.maximum(high, -low) / (most // 2) if zeros is None else (high - low) / most
    steps = torch.where(steps > 0, steps, 1.0)
    out.scales[lines] = steps
    if zeros is not None:
        zeros[lines] = (-low / steps).round().clamp(0, most).to(torch.uint8)
    counts = (numbers / _of_elements(out, out.scales, part)).round_()
    counts += (most + 1) // 2 if zeros is None else _of_elements(out, zeros.float(), part)
    integers = counts.clamp_(0, most).to(torch.uint8)
    out.codes[part] = joined(integers) if bits == 4 else integers


def _row_blocks(weight: Tensor, *, step: int) -> Iterator[slice]:
    """Slices of the rows of a weight, each but the last a multiple of ``step``."""
    out_features, in_features = weight.shape
    most = _NUMBERS_ON_CPU if weight.device.type == "cpu" else _NUMBERS_ON_GPU
    at_once = max(1, most // max(1, in_features) // step) * step
    for start in range(0, out_features, at_once):
        yield slice(start, min(start + at_once, out_features))


def _numbers(weight: QuantizedWeight, codes: Tensor) -> Tensor:
    """Codes as float32 numbers, [rows, in_features], not scaled."""
    if weight.encoding.bits == 8:
        return codes.float()
    halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)  # [rows, in_features]
    if weight.encoding is Encoding.INT4:
        return halves.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    return table[halves.long()]


def joined(halves: Tensor) -> Tensor:
    """4-bit codes, given as uint8 [rows, in_features], two in each byte."""
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def factors_of(weight: QuantizedWeight) -> Tensor:
    """The scales of blocks as float32 numbers."""
    if weight.scales.dtype == torch.uint8:
        return weight.scales.view(torch.float8_e8m0fnu).float()
    return weight.scales.float()


def _of_elements(weight: QuantizedWeight, values: Tensor, rows: slice) -> Tensor:
    """The value of its block for each number of these rows, [rows, in_features]."""
    outputs, inputs = weight.block
    lines = torch.arange(rows.start, rows.stop, device=values.device) // outputs
    values = values[lines]
    if weight.groups is not None:
        return values[:, weight.groups.long()]
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(inputs, dim=1)[:, : weight.in_features]


def _largest(numbers: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest absolute value of each block."""
    low, high = _extremes(numbers, block)
    return torch.maximum(high, -low)


def _extremes(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of each block."""
    rows, columns = block
    lines, width = -(-len(numbers) // rows), -(-numbers.shape[1] // columns)

    def padded(value: float) -> Tensor:
        more = (0, width * columns - numbers.shape[1], 0, lines * rows - len(numbers))
        whole = F.pad(numbers, more, value=value) if any(more) else numbers
        return whole.view(lines, rows, width, columns)

    return padded(torch.inf).amin(dim=(1, 3)), padded(-torch.inf).amax(dim=(1, 3))
