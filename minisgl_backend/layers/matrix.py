"""The weight matrix of a linear layer, and the choice of the kernels for its GEMMs.

A ``Matrix`` is this rank's part of a weight. ``DenseMatrix``, here, holds numbers of the
activations' own dtype; ``QuantizedMatrix`` (``quantized_matrix``) holds codes and scales. Kernels
may fuse the operations around a GEMM: before it the norm of its input, and after it the gate of a
feed-forward block, or the residual add and the next norm. What a kernel fuses is the matrix's
business: a layer only says what it wants. (Only ``SelfAttention`` takes its own kernel, which also
stores keys and values.)

Must not know which layers there are, or what a model consists of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.gates import Gate
from minisgl_backend.kernels import linear_cut, small_batch, wide_linear
from minisgl_backend.kernels.activation import open_gates
from minisgl_backend.kernels.adapters import (
    Adaptation,
    AdaptersShape,
    Shrink,
    adapter_delta,
    add_adapter_delta,
    open_adapted_gates,
)
from minisgl_backend.kernels.packing import is_packable, packed, packed_linear
from minisgl_backend.layers.norm import Normed, RMSNorm, add_sum, is_sum_fused
from minisgl_backend.layers.quantized_place import place_in
from minisgl_backend.layers.weight_place import Place, Share, empty_parameter
from minisgl_backend.parallel.group import Group
from minisgl_backend.weight_format import WeightFormat

if TYPE_CHECKING:  # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.invariant_linear import InvariantKernels, InvariantLinear
    from minisgl_backend.kernels.cuda.linear import LinearKernel, ResidualKernel, TensorCores
    from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight


class Matrix(nn.Module, ABC):
    """This rank's part of a weight, [out_features, in_features].

    It holds ``parts``, one below the other, for the inputs ``ins``: this rank's share of the
    outputs of one or several projections, by their names in the checkpoint. (Rows beyond the last
    part are never read.) Which kernel computes a GEMM may depend on the number of tokens. A
    subclass defines ``operand``, ``place``, and what ``gemm`` and ``add_gemm`` do with more tokens
    than kernels on tensor cores take. ``pdl``: kernels may start before their predecessors have
    ended (``kernels``).
    """

    def __init__(self, parts: Mapping[str, Share], ins: Share, out_features: int):
        super().__init__()
        self.out_features, self.in_features = out_features, ins.size
        self.parts, self.ins = dict(parts), ins
        begin = 0
        self.rows: dict[str, slice] = {}
        """The rows of each part."""
        for name, share in parts.items():
            self.rows[name] = slice(begin, begin + share.size)
            begin += share.size
        self._gemm_kernel: LinearKernel | None = None
        self._add_kernel: ResidualKernel | None = None
        self._shrink: Shrink | None = None
        """Not None if the kernels on tensor cores take adapters."""
        self._streams_a_row = False

    @property
    @abstractmethod
    def operand(self) -> Tensor | PackedWeight:
        """What kernels on tensor cores multiply by, after ``arrange``."""

    def arrange(self, *, gated: bool = False) -> CodesKind | None:
        """Arrange the loaded weight for kernels on tensor cores. Returns the kind of its codes, if
        it has any."""
        return None

    def fits_tensor_cores(self, *, gated: bool = False) -> bool:
        """Whether there are such kernels for this weight. This may arrange it."""
        return linear_cut.why_not(self.out_features, self.in_features, whole=gated) is None

    def use_tensor_cores(
        self,
        kernels: TensorCores,
        *,
        gate: Gate | None = None,
        adds: bool = False,
        adapters: AdaptersShape | None = None,
        streams_a_row: bool = False,
    ) -> None:
        """Compute ``gemm`` by ``kernels`` or, if it ``adds``, the ``add_gemm`` of a single rank.
        With ``adapters``, there may be an adaptation of that shape. ``streams_a_row``: if the
        weight is plain, one row is left to a kernel without tensor cores. With ``pdl`` that kernel
        lets its successor start before its predecessors have ended, which must not happen before a
        sum over the ranks."""
        shape = self.out_features, self.in_features
        codes = self.arrange(gated=gate is not None)
        self._streams_a_row = streams_a_row
        if adapters is not None:
            self.use_shrink(kernels)
        if adds:
            self._add_kernel = kernels.residual(shape, codes=codes, adapters=adapters)
        else:
            self._gemm_kernel = kernels.linear(shape, gate=gate, codes=codes, adapters=adapters)
        self.use_for_many(kernels, gate=gate)

    def use_shrink(self, kernels: TensorCores) -> None:
        """Compute x A^T of adapters by ``kernels``, with more tokens than their GEMMs take, too."""
        self._shrink = kernels.shrink

    def use_for_many(self, kernels: TensorCores, *, gate: Gate | None = None) -> None:
        """Compute ``gemm`` of more tokens by the ``kernels`` for quantized weights, if this is
        one."""

    def rounding(self, num_tokens: int) -> int | None:
        """If ``gemm`` rounds this number of tokens to 8 bits: how many neighbours share a scale."""
        return None

    def leaves_gate(self, num_tokens: int) -> bool:
        """Whether no kernel fuses the gate with a gated weight's GEMM for this number of tokens."""
        return False

    def gemm(
        self,
        x: Normed,
        *,
        bias: Tensor | None = None,
        gate: Gate | None = None,
        out: Tensor | None = None,
        adaptation: Adaptation | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """x W^T + bias, [num_tokens, out_features]; with a ``gate``, gate(x G^T) * (x U^T) of half
        that width, for a weight that holds G and then U. ``adaptation``: the weight's adapters add
        to the product.

        The result is what is returned; ``out``, of its shape, may hold it. Not with a bias, a gate
        or adapters.
        """
        kernel = self._gemm_kernel if adaptation is None or self._shrink is not None else None
        if adaptation is None and self._is_streamed(len(x.x)):
            kernel = None
        if kernel is not None and len(x.x) <= kernel.most_tokens:
            rows, squares = x.unscaled(pdl=pdl)
            return kernel(
                rows,
                self.operand,
                squares=squares,
                eps=x.eps,
                bias=bias,
                adaptation=adaptation,
                pdl=pdl,
            )
        if adaptation is None:
            return self._fallback_gemm(x, bias=bias, gate=gate, out=out, pdl=pdl)
        rows, shrink = x.normalized(pdl=pdl), self._shrink
        if gate is not None:
            y = self._fallback_gemm(Normed(rows), bias=bias, gate=None, out=None, pdl=pdl)
            return open_adapted_gates(y, rows, adaptation, gate, shrink=shrink, pdl=pdl)
        added = adapter_delta(rows, adaptation, bias=bias, shrink=shrink, pdl=pdl)
        return self._add_product(added, rows, pdl=pdl)

    def _is_streamed(self, num_tokens: int) -> bool:
        """Whether ``_fallback_gemm`` replaces tensor cores, because it is faster."""
        return False

    @abstractmethod
    def _fallback_gemm(
        self, x: Normed, *, bias: Tensor | None, gate: Gate | None, out: Tensor | None, pdl: bool
    ) -> Tensor:
        """``gemm`` without tensor-core kernels of this package, and without adapters."""

    def _add_product(self, added: Tensor, x: Tensor, *, pdl: bool) -> Tensor:
        """``added`` + x W^T without tensor-core kernels of this package; ``added`` may be
        overwritten, ``x`` is normalized."""
        y = self._fallback_gemm(Normed(x), bias=None, gate=None, out=None, pdl=pdl)
        return y.add_(added)

    @abstractmethod
    def place(self, part: str) -> Place:
        """Where the checkpoint's weight of one of the ``parts`` goes."""

    def cast(self, dtype: torch.dtype) -> None:
        """Give ``dtype`` to the numbers that have the activations' type; here these are all."""
        self.to(dtype)

    def lay_out(self, device: torch.device) -> None:
        """Arrange the memory for ``device``, before the weights are loaded. Only for linear layers:
        the rows of a vocabulary's matrix are also read one by one."""

    def pack(self, *, keep: bool = False) -> None:
        """Arrange a copy of the loaded weights for ``gemm`` if that pays, and drop the weights
        themselves unless other uses need them (``keep``)."""

    def add_gemm(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        bias: Tensor | None,
        group: Group,
        pdl: bool,
        adaptation: Adaptation | None = None,
    ) -> tuple[Tensor, Normed]:
        """The residual stream after adding every rank's x W^T and ``bias``, and its norm.

        ``residual`` [num_tokens, out_features] may be overwritten; ``x`` has no norm to be applied.
        ``adaptation``: the weight's adapters also add to it; only with one rank.
        """
        add, gemm, num_tokens = self._add_kernel, self._gemm_kernel, len(x.x)
        if add is not None and num_tokens > add.most_tokens:
            add = None
        if adaptation is not None and (add is None or self._shrink is None):
            assert group.size == 1
            x = Normed(x.normalized(pdl=pdl))
            add_adapter_delta(residual, x.x, adaptation, shrink=self._shrink, pdl=pdl)
            adaptation = None
        if add is not None:
            rows, weight = x.normalized(pdl=pdl), self.operand
            scaled, squares = add(
                rows, weight, residual, norm.weight, bias=bias, adaptation=adaptation, pdl=pdl
            )
            return residual, Normed(scaled, norm, squares)
        if gemm is None or num_tokens > gemm.most_tokens:
            added = self._fallback_add_gemm(residual, x, norm, bias=bias, group=group, pdl=pdl)
            if added is not None:
                return added
        own_bias = bias if group.rank == 0 else None  # once in the sum over the ranks
        part = self.gemm(x, bias=own_bias, pdl=pdl)
        return residual, add_sum(residual, part, norm, group, pdl=pdl)

    def _fallback_add_gemm(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        bias: Tensor | None,
        group: Group,
        pdl: bool,
    ) -> tuple[Tensor, Normed] | None:
        """``add_gemm`` by other kernels that fuse the add, if there are any."""
        return None


def pack_matrices(module: nn.Module) -> None:
    """Pack all matrices in a module, whose weights nothing else needs."""
    for child in module.modules():
        if isinstance(child, Matrix):
            child.pack()


class DenseMatrix(Matrix):
    """A weight in the activations' own dtype.

    ``formats`` are those of the parts that are quantized in the checkpoint.

    Unless ``fused`` (on a CPU), PyTorch computes everything, operation by operation. On a GPU the
    number of tokens decides:

        tensor cores   as many tokens as the kernels take (on Hopper, if ``use_tensor_cores`` was
                       called), except one row of some weights: the norm before the GEMM and
                       the residual add after it are in the same kernel
        small batch    up to 8 tokens, for wide gated weights up to 1: the same, on any GPU
        wide           up to a few hundred, for weights of a few million elements: the norm is in
                       one kernel with the residual add before it
        library        everything else

    After ``use_invariant_kernels`` it does not depend on the number, and only a bias is fused.
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
        self.weight = empty_parameter(out_features, ins.size)
        self._formats = dict(formats)
        self._fused = fused
        self._packed: Tensor | None = None
        self._invariant: InvariantLinear | None = None

    def use_invariant_kernels(self, kernels: InvariantKernels) -> None:
        """Compute any number of tokens by ``kernels``, whose results do not depend on it."""
        self._invariant = kernels.linear(tuple(self.weight.shape))

    @property
    def operand(self) -> Tensor:
        return self.weight

    def lay_out(self, device: torch.device) -> None:
        """On a CPU, store the weight with its inputs outermost in memory; its shape stays the same.

        This suits GEMMs of few tokens with weights that are not in the processor's cache: they take
        a third to two thirds of the time. 16-bit weights are packed instead.
        """
        if device.type == "cpu" and self.weight.itemsize > 2:
            self.weight.data = self.weight.data.mT.contiguous().mT

    def pack(self, *, keep: bool = False) -> None:
        if not self._fused and is_packable(self.weight):
            self._packed = packed(self.weight.data)
            if not keep:
                self.weight = nn.Parameter(self._packed, requires_grad=False)

    def _fallback_gemm(
        self, x: Normed, *, bias: Tensor | None, gate: Gate | None, out: Tensor | None, pdl: bool
    ) -> Tensor:
        weight, num_tokens = self.weight, x.x.shape[0]
        if x.gate is not None:
            x = Normed(x.normalized(pdl=pdl))
        if self._invariant is not None:
            y = self._invariant(x.normalized(pdl=pdl), weight, bias=bias, out=out, pdl=pdl)
            return y if gate is None else open_gates(y, gate, pdl=pdl)
        gated = gate is not None
        is_small = small_batch.is_faster(num_tokens, self.in_features, gated=gated)
        if self._fused and is_small and (x.squares is None or num_tokens == 1):
            return small_batch.small_batch_linear(
                x.x,
                weight,
                bias=bias,
                norm_weight=None if x.norm is None or x.squares is not None else x.norm.weight,
                squares=x.squares,
                eps=x.eps,
                gate=gate,
                pdl=pdl,
            )
        rows = x.normalized(pdl=pdl)
        width = self.out_features // 2 if gated else self.out_features
        if self._is_wide(num_tokens) and wide_linear.is_faster(
            num_tokens, width, self.in_features, gated=gated
        ):
            return wide_linear.wide_linear(rows, weight, bias=bias, gate=gate, pdl=pdl)
        if out is not None and self._packed is None:
            return torch.mm(rows, weight.t(), out=out)
        if self._packed is None:
            y = F.linear(rows, weight, bias)
        else:
            y = packed_linear(rows, self._packed, bias)
        return y if gate is None else open_gates(y, gate, pdl=pdl)

    def _is_streamed(self, num_tokens: int) -> bool:
        return self._streams_a_row and num_tokens == 1

    def _add_product(self, added: Tensor, x: Tensor, *, pdl: bool) -> Tensor:
        if self._packed is not None:
            return super()._add_product(added, x, pdl=pdl)
        return torch.addmm(added, x, self.weight.t(), out=added)

    def _fallback_add_gemm(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        bias: Tensor | None,
        group: Group,
        pdl: bool,
    ) -> tuple[Tensor, Normed] | None:
        if self._invariant is not None:
            return None
        weight, num_tokens = self.weight, len(x.x)
        if self._is_small(num_tokens) and not is_sum_fused(group, norm, num_tokens, x.x.dtype):
            # Rank 0 adds the residual stream to its part, so that it is in the sum over the ranks.
            is_first = group.rank == 0
            part = small_batch.small_batch_linear(
                x.normalized(pdl=pdl),
                weight,
                bias=bias if is_first else None,
                residual=residual if is_first else None,
                pdl=pdl,
            )
            summed = group.all_reduce(part)
            return summed, Normed(summed, norm)
        if (
            self._is_wide(num_tokens)
            and group.size == 1
            and wide_linear.is_faster(num_tokens, self.out_features, self.in_features, parts=True)
        ):
            parts = wide_linear.linear_parts(x.normalized(pdl=pdl), weight, pdl=pdl)
            normalized = wide_linear.add_rms_norm_parts(
                parts, residual, norm.weight, norm.eps, bias=bias, pdl=pdl
            )
            return residual, Normed(normalized)
        return None

    def _is_small(self, num_tokens: int) -> bool:
        return self._fused and num_tokens <= small_batch.MAX_TOKENS

    def _is_wide(self, num_tokens: int) -> bool:
        # its tensor cores would round float32 to tf32
        is_16_bit = self.weight.element_size() == 2
        return self._fused and is_16_bit and num_tokens > small_batch.MAX_TOKENS

    def place(self, part: str) -> Place:
        form, weight = self._formats.get(part), self.weight.data
        return place_in(weight, self.rows[part], form, self.parts[part], self.ins)
