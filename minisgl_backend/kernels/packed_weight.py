"""Quantized weights in the order in which ``cuda/linear.cu`` and the kernels beside it read them.

A ``PackedWeight`` is a ``QuantizedWeight`` whose inputs are permuted, within groups of 16 (8-bit
codes) or 32 (4-bit codes), so that a word of 4 bytes has the codes that one thread multiplies. The
bits of E2M1 are also spread over that word. If the checkpoint reorders inputs, they are first
sorted by group, and the columns of x must be sorted likewise. Scales are laid out for the kernel's
ring; the quantized weight keeps its own scales, which other kernels take.

Must not know layers. Nothing here waits for the device, except ``pack`` of a weight that reorders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.linear_cut import CODES_BLOCK, Numbers
from minisgl_backend.kernels.quantized import KINDS, QuantizedWeight, dequantize, factors_of, joined
from minisgl_backend.weight_format import GROUP_OF_MX, GROUP_OF_NVFP4, Encoding

_GROUPS: Final = (128, 64, 32)
"""in_features that may share a scale within a stage of the ring."""

_IN_WORD: Final = 4
"""Groups of E2M1 whose scales share a word."""

_MOST_EXPONENT: Final = 192
_EXPONENT_OFFSET: Final = 62
"""A scale of E2M1, 2 to the power of e - 127, is kept as the exponent e + 62 of a bfloat16. It must
not be larger than 2 to the power of 65."""

_FLOAT8_SCALES: Final = (0, 0, 8, 12, 16, 18, 20, 22)
_FLOAT8_OFFSET: Final = 16
"""A scale of NVFP4 is kept with 5 bits of exponent, to which ``cuda/codes.cuh`` adds, and 3 of
mantissa. So a normal float8 becomes its bits plus ``_FLOAT8_OFFSET``, and those that are subnormal
become ``_FLOAT8_SCALES``. A scale of 0 would need codes of its own: codes are 0 instead."""

_OF_ROW_SCALES: Final = 2.0**52
"""The factor by which sums are too small with such scales, as ``cuda/codes.cuh`` has them."""

_UNIT: Final = 64
"""Rows per warpgroup."""

_QUAD: Final = (0, 1, 2, 3)
PLACES_OF_BYTES: Final = tuple(
    k for quad in _QUAD for k in (8 + 2 * quad, 2 * quad, 9 + 2 * quad, 2 * quad + 1)
)
"""With 8-bit codes, which of 16 inputs is at each place."""

_OF_NIBBLES: Final = tuple(
    first + 2 * quad + odd for quad in _QUAD for odd in (0, 1) for first in (0, 8, 16, 24)
)
"""With 4-bit codes, which of 32 inputs is at each place, the lower half of a byte first."""


@dataclass(frozen=True, slots=True)
class CodesKind:
    """What a kernel for packed weights is compiled for.

    ``group``: in_features that share a scale, at most those of a stage of the ring; 0 if all do.
    ``shared_by``: rows that share a scale, 1 or 8. ``zeros``: the low 8 bits of a scale are a zero
    point. For E2M1 a scale has those of 4 groups: the group is 128 for MXFP4, and 64 for NVFP4, in
    which rows are scaled, too.
    """

    encoding: Encoding
    group: int
    shared_by: int
    zeros: bool

    @property
    def rounds_many_rows(self) -> bool:
        """Whether experts with many rows multiply the codes directly, by rows in float8."""
        in_blocks = self.group == CODES_BLOCK and self.shared_by > 1
        return self.encoding is Encoding.E4M3 and (in_blocks or self.group == 0)

    def numbers(self, in_features: int) -> Numbers:
        """What the cut of a GEMM depends on."""
        bits, block = self.encoding.bits, CODES_BLOCK
        if bits == 4 and in_features % (2 * block) == 0:
            block *= 2
        scales = block // self.group * _UNIT // self.shared_by if self.group else 0
        return Numbers(bits, block, scales)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] for the GEMMs of ``cuda/linear.cu``. With one more
    leading dimension everywhere, the weights of all experts for ``cuda/experts.cu``, except in int8
    also for ``cuda/expert_gemv.cu``, and in float8 also for ``cuda/experts_many.cu``.

    weight   its codes are permuted; it has no groups
    scales   of groups, 4 bytes each, [out_features / 64, in_features / 128, 128 / group,
             64 / shared_by], with rows in the order of tiles: if gated, 8 rows of the gate come
             right before the 8 that they open. None if kind.group is 0
    row_scales   float32 [out_features]: of whole rows, if kind.group is 0, or for NVFP4
    order    int64 [in_features]: the order of the columns of x, if they must be sorted
    """

    kind: CodesKind
    weight: QuantizedWeight
    scales: Tensor | None
    row_scales: Tensor | None
    order: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.weight.codes.shape[:-1], self.weight.in_features

    def expert(self, index: int) -> PackedWeight:
        """One of a stack of weights."""
        scales, row_scales = (
            None if tensor is None else tensor[index] for tensor in (self.scales, self.row_scales)
        )
        return PackedWeight(self.kind, self.weight.expert(index), scales, row_scales, None)

    def ordered(self, x: Tensor) -> Tensor:
        """``x`` [num_rows, in_features] with its columns in the weight's order."""
        return x if self.order is None else x.index_select(1, self.order)


def code_macros(kind: CodesKind | None) -> dict[str, int]:
    """The macros of CUDA sources (``cuda/codes.cuh``) for packed weights of this kind or, without
    one, for weights in bfloat16."""
    if kind is None:
        return {"CODE": 0, "GROUP": 0, "SHARED_BY": 1, "ZEROS": 0}
    return {
        "CODE": KINDS[kind.encoding],
        "GROUP": kind.group,
        "SHARED_BY": kind.shared_by,
        "ZEROS": kind.zeros,
    }


def numbers_and_scales(
    weight: Tensor | PackedWeight, kind: CodesKind | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What kernels made for this ``kind`` read of a weight: bfloat16 numbers, or codes, and the
    scales of groups and of rows, if there are such."""
    if isinstance(weight, Tensor):
        assert kind is None
        return weight, None, None
    assert weight.kind == kind
    return weight.weight.codes, weight.scales, weight.row_scales


def pack(weight: QuantizedWeight, *, gated: bool = False) -> PackedWeight | None:
    """The weight as kernels take it; None if they cannot. Its codes are permuted in place, and must
    not be used in any other way afterwards.

    ``gated``: the first half of its rows are gates. Kernels need a multiple of 64 rows (128 if
    gated) and of 128 in_features, and groups of a multiple of 32.
    """
    out_features, in_features = len(weight.codes), weight.in_features
    if out_features % (2 * _UNIT if gated else _UNIT) or in_features % CODES_BLOCK:
        return None
    order = None
    if weight.groups is not None:
        groups = weight.groups.long()
        order = groups.argsort(stable=True)
        counts = groups.bincount()
        used = counts.nonzero()[:, 0]  # a rank has only some groups' inputs
        size = in_features // len(used)
        if size % _GROUPS[-1] or bool((counts[used] != size).any()):
            return None
        zeros = None if weight.zeros is None else weight.zeros[:, used]
        weight = replace(
            weight,
            block=(weight.block[0], size),
            scales=weight.scales[:, used],
            zeros=zeros,
            groups=None,
        )
    kind = _kind_of(weight)
    if kind is None:
        return None
    scales = _scales(weight, kind, out_features, in_features, gated=gated)
    _clear_unscaled(weight)
    _permute(weight, order)
    return PackedWeight(kind, weight, scales, _row_scales(weight, kind), order)


def pack_experts(weight: QuantizedWeight, *, gated: bool) -> PackedWeight:
    """The same for the weights of all experts, [num_experts, out_features, in_features], of a
    format that ``expert_cut.fits``. Each expert has its own scales. Scales of groups are padded to
    multiples of 128 rows and 256 in_features."""
    _, out_features, _ = weight.codes.shape
    kind = _kind_of(weight)
    assert kind is not None and weight.groups is None
    rows = -(-out_features // (2 * _UNIT)) * 2 * _UNIT
    columns = -(-weight.in_features // (2 * CODES_BLOCK)) * 2 * CODES_BLOCK
    scales = _scales(weight, kind, rows, columns, gated=gated)
    for expert in range(len(weight.codes)):
        _clear_unscaled(weight.expert(expert))
        _permute(weight.expert(expert), None)
    return PackedWeight(kind, weight, scales, _row_scales(weight, kind), None)


def _kind_of(weight: QuantizedWeight) -> CodesKind | None:
    """None if kernels do not know such blocks."""
    rows, columns = weight.block
    whole = columns >= weight.in_features
    if weight.row_scales is not None:
        known = columns == GROUP_OF_NVFP4
        return CodesKind(weight.encoding, _IN_WORD * columns, 1, False) if known else None
    if weight.encoding is Encoding.E2M1:
        known = whole or columns % GROUP_OF_MX == 0
        return CodesKind(weight.encoding, CODES_BLOCK, 1, False) if known else None
    group: int | None = 0
    if not whole or weight.zeros is not None:
        group = next((size for size in _GROUPS if whole or columns % size == 0), None)
    if group is None:
        return None
    return CodesKind(weight.encoding, group, 1 if rows % 8 else 8, weight.zeros is not None)


def _scales(
    weight: QuantizedWeight, kind: CodesKind, out_features: int, in_features: int, *, gated: bool
) -> Tensor | None:
    """The scales of groups as a ``PackedWeight`` has them, also for a stack of weights. They are
    padded with zeros for rows and columns beyond the weight's own."""
    if kind.group == 0:
        return None
    num_rows, device = weight.codes.shape[-2], weight.scales.device
    lines = torch.arange(num_rows, device=device)
    if gated:
        lines = lines.view(2, -1, 8).transpose(0, 1).flatten()
    lines = lines[:: kind.shared_by] // weight.block[0]
    is_e2m1 = weight.encoding is Encoding.E2M1
    group = kind.group // _IN_WORD if is_e2m1 else kind.group
    columns = torch.arange(0, weight.in_features, group, device=device) // weight.block[1]
    if is_e2m1:
        if weight.row_scales is None:
            in_bytes = weight.scales.clamp(max=_MOST_EXPONENT) + _EXPONENT_OFFSET
        else:
            in_bytes = _float8_scales(weight.scales)
        in_bytes = in_bytes[..., lines, :][..., columns]
        words = F.pad(in_bytes, (0, -len(columns) % _IN_WORD)).view(torch.int32)
    else:
        words = factors_of(weight).view(torch.int32)
        if weight.zeros is not None:
            words = (words + 0x80 & ~0xFF) | weight.zeros.int()
        words = words[..., lines, :][..., columns]
    height, width = out_features // kind.shared_by, in_features // kind.group
    words = F.pad(words, (0, width - words.shape[-1], 0, height - words.shape[-2]))
    units, columns_of_unit = out_features // _UNIT, in_features // CODES_BLOCK
    shape = *words.shape[:-2], units, _UNIT // kind.shared_by, columns_of_unit, -1
    return words.view(shape).movedim(-3, -1).contiguous().view(torch.float32)


def _float8_scales(scales: Tensor) -> Tensor:
    """float8_e4m3fn scales as the bytes that kernels read, uint8."""
    bits = scales.view(torch.uint8) & 127
    small = torch.tensor(_FLOAT8_SCALES, dtype=torch.uint8, device=scales.device)
    return torch.where(bits < 8, small[bits.clamp(max=7).int()], bits + _FLOAT8_OFFSET)


def _row_scales(weight: QuantizedWeight, kind: CodesKind) -> Tensor | None:
    """The scales of rows as a ``PackedWeight`` has them, also for a stack of weights."""
    if weight.row_scales is not None:
        return weight.row_scales * _OF_ROW_SCALES
    if kind.group:
        return None
    lines = torch.arange(weight.codes.shape[-2], device=weight.scales.device) // weight.block[0]
    return factors_of(weight)[..., lines, 0].contiguous()


def _clear_unscaled(weight: QuantizedWeight) -> None:
    """Make codes 0 where the scale of NVFP4 is 0."""
    if weight.row_scales is not None:
        in_groups = weight.codes.view(*weight.scales.shape, -1)  # [out, groups, bytes]
        in_groups.masked_fill_((weight.scales.view(torch.uint8) & 127 == 0)[..., None], 0)


def _permute(weight: QuantizedWeight, order: Tensor | None) -> None:
    """Sort and permute the inputs of the codes, some rows at a time."""
    four, device = weight.encoding.bits == 4, weight.codes.device
    places = torch.tensor(_OF_NIBBLES if four else PLACES_OF_BYTES, device=device)
    at_once = max(1, 2**22 // weight.in_features)
    for start in range(0, len(weight.codes), at_once):
        codes = weight.codes.view(torch.uint8)[start : start + at_once]
        numbers = codes
        if four:
            numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        if order is not None:
            numbers = numbers[:, order]
        numbers = _rearranged(numbers, places)
        permuted = joined(numbers) if four else numbers
        codes.copy_(_unpacked(permuted) if weight.encoding is Encoding.E2M1 else permuted)


_PLACED: Final = 0x81C081C0
"""Mask of the bits of two bfloat16 where those of two E2M1 go (right but for a power of 2)."""

_LAST_PLACES: Final = (
    *((1, 6, 3), (1, 7, 4), (1, 8, 5)),
    *((3, 6, 12), (3, 7, 13), (3, 8, 14)),
    *((1, 15, 11), (3, 15, 10)),
)
"""For pairs 1 and 3, the bit of a bfloat16 and the place in a spread word that determines it. The
bit also depends on places that come before, here or in the word as it is without these pairs."""


def _unpacked(codes: Tensor) -> Tensor:
    """uint8 ``codes`` of E2M1 with the bits of every four bytes arranged as ``numbers`` of
    ``cuda/codes.cuh`` reads them: four pairs, with one number of a pair in each half."""
    words = codes.contiguous().view(torch.int32).long()

    def placed(pair: int) -> Tensor:
        of_pair = words >> 4 * pair
        return (of_pair & 0x00080008) << 12 | (of_pair & 0x00070007) << 6

    spread, owed = placed(0) | placed(2) >> 6, {pair: placed(pair) for pair in (1, 3)}
    for pair, bit, place in _LAST_PLACES:
        wrong = owed[pair] ^ _pair(spread, pair)
        spread |= (wrong >> bit & 0x00010001) << place
    return _as_bytes(spread)


def _gathered(codes: Tensor) -> Tensor:
    """The codes of E2M1 that ``_unpacked`` has turned into ``codes``."""
    words = codes.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    nibbles = [
        (of_pair >> 12 & 0x00080008 | of_pair >> 6 & 0x00070007) << 4 * pair
        for pair, of_pair in enumerate(_pair(words, pair) for pair in range(4))
    ]
    return _as_bytes(nibbles[0] | nibbles[1] | nibbles[2] | nibbles[3])


def _pair(words: Tensor, pair: int) -> Tensor:
    """A pair of numbers of E2M1, one in each half, as ``numbers`` of ``cuda/codes.cuh`` gets it."""
    match pair:
        case 0:
            shifted = words
        case 1:
            shifted = words << 3 ^ words << 4
        case 2:
            shifted = words << 6
        case _:
            shifted = words << 5 ^ words >> 6
    return shifted & _PLACED


def _as_bytes(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.uint8)


def _rearranged(numbers: Tensor, places: Tensor) -> Tensor:
    """Every ``len(places)`` columns in this order."""
    return numbers.view(len(numbers), -1, len(places))[:, :, places].flatten(1)


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype, *, packed: bool) -> Tensor:
    """The numbers, [out_features, in_features]; ``packed``: its codes are permuted."""
    shape = len(weight.codes), weight.in_features
    out = torch.empty(shape, dtype=dtype, device=weight.codes.device)
    if not use_triton(weight.codes):
        return dequantize_weight_reference(weight, out, packed=packed)
    from minisgl_backend.kernels.triton_kernels.quantized_kernels import launch_dequantize

    launch_dequantize(out, weight, packed=packed)
    return out


def dequantize_weight_reference(weight: QuantizedWeight, out: Tensor, *, packed: bool) -> Tensor:
    """The twin of ``dequantize_weight``; ``out`` has the shape of the result."""
    if not packed:
        return dequantize(weight, out)
    four, codes = weight.encoding.bits == 4, weight.codes.view(torch.uint8)
    places = torch.tensor(_OF_NIBBLES if four else PLACES_OF_BYTES, device=codes.device).argsort()
    if weight.encoding is Encoding.E2M1:
        codes = _gathered(codes)
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2) if four else codes
    numbers = _rearranged(numbers, places)
    plain = joined(numbers) if four else numbers.view(weight.codes.dtype)
    return dequantize(replace(weight, codes=plain), out)
