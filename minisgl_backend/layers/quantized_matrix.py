"""The matrix of a quantized weight, and the choice between it and a dense one.

A weight that is quantized in the checkpoint becomes a ``QuantizedMatrix`` if there are kernels for
its format. Otherwise it becomes a ``DenseMatrix``, and is dequantized while it loads. ``Matrices``
decides. Must not know which layers there are, or what a model consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels import linear_cut
from minisgl_backend.kernels.activation import open_gates
from minisgl_backend.kernels.float8_cut import cuts_of
from minisgl_backend.kernels.packed_weight import (
    CodesKind,
    PackedWeight,
    dequantize_weight,
    pack,
)
from minisgl_backend.kernels.quantized import quantize
from minisgl_backend.kernels.quantized_linear import (
    MAX_ROWS,
    Float8Weight,
    float8_linear,
    quantized_linear,
)
from minisgl_backend.layers.matrix import DenseMatrix, Matrix
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_place import place_in
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import Place, Share
from minisgl_backend.layers.weight_share import block_of
from minisgl_backend.weight_format import Encoding, Layout, WeightFormat

if TYPE_CHECKING:  # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.float8_linear import Float8Linear
    from minisgl_backend.kernels.cuda.linear import LinearKernel, TensorCores


class QuantizedMatrix(Matrix):
    """A weight that stays quantized: the checkpoint's codes and scales, always in the layout of
    ``kernels.quantized``.

    The formats of all parts have the same encoding. Kernels take ``weight``. Its
    ``QuantizedWeight.block`` is what ``block_of`` finds for the parts: the format's block, unless a
    part begins inside a block. ``form`` is the format of the first part. The number of tokens
    decides what computes a GEMM:

        tensor cores   as many tokens as the kernels take, if ``use_tensor_cores`` was called
        float8         more tokens, rounded to 8 bits, on tensor cores, if the weight's scales allow
                       it; by kernels up to the number in ``float8_cut``, if ``use_for_many`` was
                       called, otherwise by the library
        more tokens    up to some hundred with other weights, by kernels whose tiles have more
                       tokens (``linear_cut.cuts_of_many``), if ``use_for_many`` was called
        codes          up to 64, for weights that tensor cores do not take
        library        everything else: the whole weight is dequantized for the GEMM

    On a CPU, and unless ``fused``, it is always the last one.
    """

    def __init__(
        self,
        parts: Mapping[str, Share],
        ins: Share,
        out_features: int,
        *,
        formats: Mapping[str, WeightFormat],
        fused: bool,
    ):
        super().__init__(parts, ins, out_features)
        self._formats = dict(formats)
        self._fused = fused
        first = next(iter(formats.values()))
        begins = [(self.rows[name].start, outs) for name, outs in parts.items()]
        self.storage = StoredWeight(
            first, block_of(first, begins, ins), (out_features, ins.size), num_inputs=ins.total
        )
        self.form = first
        self._packed: PackedWeight | None = None
        self._float8: Float8Weight | None = None
        self._float8_linear: Float8Linear | None = None
        self._for_many: LinearKernel | None = None

    @property
    def operand(self) -> PackedWeight:
        assert self._packed is not None
        return self._packed

    @property
    def takes_float8(self) -> bool:
        """Whether many tokens are rounded to 8 bits; known once the weight is arranged."""
        return self._float8 is not None

    def rounding(self, num_tokens: int) -> int | None:
        kernel = self._gemm_kernel or self._add_kernel
        if self._float8 is None or (kernel is not None and num_tokens <= kernel.most_tokens):
            return None
        is_by_row = self._fits_float8_kernels(num_tokens)
        return self.in_features if is_by_row else self._float8.group

    def leaves_gate(self, num_tokens: int) -> bool:
        is_fused = self._fits_float8_kernels(num_tokens)
        return self.rounding(num_tokens) is not None and not is_fused

    def _fits_float8_kernels(self, num_tokens: int) -> bool:
        """Whether ``use_for_many`` has made float8 kernels for this number of tokens."""
        kernels = self._float8_linear
        return kernels is not None and num_tokens <= kernels.most_rows

    def fits_tensor_cores(self, *, gated: bool = False) -> bool:
        fits = linear_cut.takes_codes(self.out_features, self.in_features)
        return fits and self.arrange(gated=gated) is not None

    def use_for_many(self, kernels: TensorCores, *, gate: Gate | None = None) -> None:
        codes = self.arrange(gated=gate is not None)
        shape = self.out_features, self.in_features
        if codes is None:
            return
        if not self.takes_float8:
            self._for_many = kernels.for_many(shape, codes=codes, gate=gate)
        elif cuts_of(*shape, more_than=kernels.most_tokens):
            self._float8_linear = kernels.float8(shape, codes=codes, gate=gate)

    def arrange(self, *, gated: bool = False) -> CodesKind | None:
        if self._packed is None:
            self._packed = pack(self.storage.weight, gated=gated)
            if self._packed is not None and self._fused:
                self._float8 = Float8Weight.of(self._packed)
        return None if self._packed is None else self._packed.kind

    def cast(self, dtype: torch.dtype) -> None:
        self.storage.cast(dtype)

    def _fallback_gemm(
        self, x: Normed, *, bias: Tensor | None, gate: Gate | None, out: Tensor | None, pdl: bool
    ) -> Tensor:
        of_some, float8 = self._float8_linear, self._float8
        if of_some is not None and of_some.gate == gate and len(x.x) <= of_some.most_rows:
            rounded = x.in_float8(self.in_features, pdl=pdl)
            return of_some(rounded, self.operand, bias=bias, pdl=pdl)
        if float8 is not None:
            rounded = x.in_float8(float8.group, pdl=pdl)
            y = float8_linear(rounded, float8, x.x.dtype, bias)
            return y if gate is None else open_gates(y, gate, pdl=pdl)
        rows, packed, many = x.normalized(pdl=pdl), self._packed, self._for_many
        if many is not None and many.gate == gate and len(rows) <= many.most_tokens:
            return many(rows, self.operand, bias=bias, out=out, pdl=pdl)
        if packed is not None:
            rows = packed.ordered(rows)
        weight = self.storage.weight if packed is None else packed.weight
        if self._fused and packed is None and len(rows) <= MAX_ROWS:
            y = quantized_linear(rows, weight, bias)
        else:
            numbers = dequantize_weight(weight, rows.dtype, packed=packed is not None)
            if out is not None:
                return torch.mm(rows, numbers.t(), out=out)
            y = F.linear(rows, numbers, bias)
        return y if gate is None else open_gates(y, gate, pdl=pdl)

    def place(self, part: str) -> Place:
        form = self._formats[part]
        return place_in(self.storage, self.rows[part], form, self.parts[part], self.ins)


def rounded(matrix: DenseMatrix) -> QuantizedMatrix:
    """A copy of a loaded matrix in 8-bit floats, with a scale for each output. It may have more
    outputs, as many as kernels on tensor cores need; the last ones mean nothing."""
    height, width, name = matrix.out_features, matrix.in_features, "rounded"
    form = WeightFormat(layout=Layout.CONVERTED, encoding=Encoding.E4M3, block=(1, None))
    with matrix.weight.device:
        copy = QuantizedMatrix(
            {name: Share(height, 0, height)},
            matrix.ins,
            linear_cut.padded(height),
            formats={name: form},
            fused=matrix.weight.is_cuda,
        )
    copy.storage.put_into(copy.rows[name])(quantize(matrix.weight, form.encoding, (1, width)))
    return copy


@dataclass(frozen=True, slots=True)
class Matrices:
    """Makes the matrices of a model.

    ``format_of`` says how a projection is stored, by its name in the checkpoint; None stands for
    plain numbers. ``keep_quantized``: the device has kernels for quantized weights;
    ``keeps_experts`` says the same for those of experts, by their format, and ``takes`` whether the
    kernels for a format take [out_features, in_features]. ``fused``: matrices use this package's
    kernels.
    """

    format_of: Callable[[str], WeightFormat | None]
    keep_quantized: bool
    keeps_experts: Callable[[WeightFormat], bool]
    fused: bool
    takes: Callable[[WeightFormat, int, int], bool]

    def of_plain(self) -> Matrices:
        """The same for weights that are plain in the checkpoint, and stay so."""
        return replace(self, format_of=lambda name: None)

    def unconverted(self, name: str) -> Matrices:
        """The same, but that the projection ``name`` is not converted if it is plain."""
        form = self.format_of(name)
        if form is None or form.layout is not Layout.CONVERTED:
            return self
        return replace(
            self, format_of=lambda other: None if other == name else self.format_of(other)
        )

    def make(
        self,
        parts: Mapping[str, Share],
        ins: Share,
        *,
        out_features: int | None = None,
        padded: bool = False,
    ) -> Matrix:
        """The matrix of projections of the same input; ``parts`` has each one's share of outputs by
        name. By default it has only their rows. If ``padded``, and if kernels are used, it has as
        many rows as kernels on tensor cores need."""
        if out_features is None:
            out_features = sum(share.size for share in parts.values())
            if padded and self.fused:
                out_features = linear_cut.padded(out_features)
        formats = {name: form for name in parts if (form := self.format_of(name)) is not None}
        if not all(self.takes(form, out_features, ins.size) for form in formats.values()):
            # conversion would only round numbers
            of_checkpoint = {
                name: form for name, form in formats.items() if form.layout is not Layout.CONVERTED
            }
            return DenseMatrix(parts, ins, out_features, formats=of_checkpoint, fused=self.fused)
        is_whole = len(formats) == len(parts)
        if self.keep_quantized and is_whole and _are_one_weight(list(formats.values())):
            return QuantizedMatrix(parts, ins, out_features, formats=formats, fused=self.fused)
        return DenseMatrix(parts, ins, out_features, formats=formats, fused=self.fused)

    def stays_quantized(self, name: str) -> bool:
        """Whether a projection is quantized and stays so."""
        return self.keep_quantized and self.format_of(name) is not None

    def experts_kept(self, formats: Sequence[WeightFormat | None]) -> bool:
        """Whether one ``StoredWeight`` holds the weights of all experts, in these formats, for
        kernels to compute with."""
        stored = [form for form in formats if form is not None]
        if len(stored) < len(formats) or not _are_one_weight(stored):
            return False
        return self.keeps_experts(stored[0])


def _are_one_weight(formats: Sequence[WeightFormat]) -> bool:
    """Whether one weight can hold several of these formats: they are the same, and not such that
    each may have a different order of inputs."""
    first = formats[0]
    alike = all(form.stored_as == first.stored_as for form in formats)
    return alike and not (first.reorders and len(formats) > 1)
