"""The weight matrix of a linear layer in its format, and the forms of its GEMM.

A ``Matrix`` is this rank's part of a weight. Its class is the weight format: ``DenseMatrix`` here
holds numbers of the activations' own dtype. Kernels may fuse the operations around a GEMM: the norm
of its input before it; after it the gate of a feed-forward block, or the residual add and the next
norm. What a kernel fuses is the format's business: a layer only says what it wants.

Must not know which layers there are, or what a model consists of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.kernels import small_batch, wide_linear
from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.kernels.rms_norm import rms_norm
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.rank_sum import add_rms_norm_of_sum
from minisgl_backend.layers.share import Share
from minisgl_backend.layers.weight_place import WeightPlace
from minisgl_backend.parallel.group import Group


class Form(Enum):
    """How the layers of a step are computed; one for all layers of a step."""

    PLAIN = auto()
    """By PyTorch, operation by operation: on a CPU."""
    SMALL = auto()
    """Up to 8 tokens: GEMMs with the norm before and the residual add after them in one kernel."""
    WIDE = auto()
    """More tokens: each norm in one kernel with the residual add before it."""
    TENSOR_CORE = auto()
    """Up to 256 tokens on Hopper: as SMALL, by kernels on its tensor cores."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels of a step are launched: their form, and whether each may start before its
    predecessor has ended (``pdl``, see ``kernels``)."""

    form: Form
    pdl: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """The input of a GEMM: hidden states, [num_tokens, hidden_size] and the norm to apply.

    If ``norm`` is None, ``x`` is normalized already. With ``squares`` the norm's weight has been
    applied, but not its scale (``kernels.cuda.linear.Normalized``).
    """

    x: Tensor
    norm: RMSNorm | None = None
    squares: Tensor | None = None

    def normalized(self, *, pdl: bool) -> Tensor:
        """The normalized hidden states, [num_tokens, hidden_size]."""
        assert self.squares is None
        if self.norm is None:
            return self.x
        return rms_norm(self.x, self.norm.weight, self.norm.eps, pdl=pdl)


class Matrix(nn.Module, ABC):
    """This rank's part of a weight, [out_features, in_features], in some format.

    A format defines ``gemm`` and ``places``, and may override ``add_gemm`` if it has a kernel that
    fuses the add.
    """

    out_features: int
    in_features: int

    @abstractmethod
    def gemm(
        self, x: Normed, launch: Launch, *, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        """x W^T + bias, [num_tokens, out_features]; if ``gated``, silu(x G^T) * (x U^T) of half
        that width, for a weight that holds G and then U."""

    @abstractmethod
    def places(
        self, name: str, rows: slice, outs: Share, ins: Share
    ) -> Iterator[tuple[str, WeightPlace]]:
        """Where the checkpoint's tensors of one projection go: into ``rows`` of this matrix.

        ``name`` is the projection's in the checkpoint; ``outs`` and ``ins`` are this rank's share
        of its outputs and inputs.
        """

    def cast(self, dtype: torch.dtype) -> None:
        """Give ``dtype`` to the numbers that have the activations' type: here to all."""
        self.to(dtype)

    def lay_out(self, device: torch.device) -> None:
        """Arrange the memory for ``device``, before the weights are loaded."""

    def add_gemm(
        self,
        residual: Tensor,
        x: Tensor,
        norm: RMSNorm,
        launch: Launch,
        *,
        bias: Tensor | None,
        group: Group,
    ) -> tuple[Tensor, Normed]:
        """The residual stream after adding every rank's x W^T and ``bias``, and its norm.

        ``residual`` [num_tokens, out_features] may be overwritten; ``x`` [num_tokens, in_features].
        """
        own_bias = bias if group.rank == 0 else None  # to be in the sum over the ranks once
        part = self.gemm(Normed(x), launch, bias=own_bias)
        return residual, add_sum(residual, part, norm, launch, group)


def add_sum(residual: Tensor, part: Tensor, norm: RMSNorm, launch: Launch, group: Group) -> Normed:
    """residual += the sum of every rank's ``part``, in place; its norm."""
    x = add_rms_norm_of_sum(part, group, residual, norm.weight, norm.eps, pdl=launch.pdl)
    return Normed(x)


class TensorCoreGemm(Protocol):
    """``Matrix.gemm`` of a dense weight by a compiled kernel (``models.tensor_core``)."""

    def __call__(self, x: Normed, weight: Tensor, *, bias: Tensor | None, pdl: bool) -> Tensor: ...


class TensorCoreAdd(Protocol):
    """``Matrix.add_gemm`` of a dense weight by a compiled kernel; ``residual`` is overwritten."""

    def __call__(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        norm: RMSNorm,
        *,
        bias: Tensor | None,
        pdl: bool,
    ) -> Normed: ...


class DenseMatrix(Matrix):
    """An unquantized weight, of the activations' own dtype."""

    def __init__(self, out_features: int, in_features: int):
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.tensor_core_gemm: TensorCoreGemm | None = None
        self.tensor_core_add: TensorCoreAdd | None = None

    @classmethod
    def of(cls, names: Sequence[str], out_features: int, in_features: int) -> DenseMatrix:
        """The same for all projections (``MakeMatrix``)."""
        return cls(out_features, in_features)

    def lay_out(self, device: torch.device) -> None:
        """On a CPU store the weight with its inputs outermost in memory; its shape stays the same.

        This suits GEMMs of few tokens with weights that are not in the processor's cache: they take
        a third to two thirds of the time. Those of 16 bits are faster as they are.
        """
        if device.type == "cpu" and self.weight.itemsize > 2:
            self.weight.data = self.weight.data.mT.contiguous().mT

    def gemm(
        self, x: Normed, launch: Launch, *, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        weight, form, pdl = self.weight, launch.form, launch.pdl
        if form is Form.TENSOR_CORE:
            assert self.tensor_core_gemm is not None
            return self.tensor_core_gemm(x, weight, bias=bias, pdl=pdl)
        if form is not Form.PLAIN and small_batch.is_faster(
            len(x.x), self.in_features, gated=gated
        ):
            norm = x.norm if form is Form.SMALL else None
            return small_batch.small_batch_linear(
                x.normalized(pdl=pdl) if norm is None else x.x,
                weight,
                bias=bias,
                norm_weight=None if norm is None else norm.weight,
                eps=0.0 if norm is None else norm.eps,
                gated=gated,
                pdl=pdl,
            )
        rows = x.normalized(pdl=pdl)
        width = self.out_features // 2 if gated else self.out_features
        if form is Form.WIDE and wide_linear.is_faster(
            len(rows), width, self.in_features, gated=gated
        ):
            return wide_linear.wide_linear(rows, weight, bias=bias, gated=gated, pdl=pdl)
        y = F.linear(rows, weight, bias)
        return silu_mul(y, pdl=pdl) if gated else y

    def add_gemm(
        self,
        residual: Tensor,
        x: Tensor,
        norm: RMSNorm,
        launch: Launch,
        *,
        bias: Tensor | None,
        group: Group,
    ) -> tuple[Tensor, Normed]:
        weight, form, pdl = self.weight, launch.form, launch.pdl
        if form is Form.TENSOR_CORE and self.tensor_core_add is not None:
            normed = self.tensor_core_add(residual, x, weight, norm, bias=bias, pdl=pdl)
            return residual, normed
        if form is Form.SMALL:
            # Rank 0 adds the residual stream to its part, so that the sum over the ranks has it.
            is_first = group.rank == 0
            part = small_batch.small_batch_linear(
                x,
                weight,
                bias=bias if is_first else None,
                residual=residual if is_first else None,
                pdl=pdl,
            )
            summed = group.all_reduce(part)
            return summed, Normed(summed, norm)
        if form is Form.WIDE and group.size == 1 and self._can_split(len(x)):
            parts = wide_linear.linear_parts(x, weight, pdl=pdl)
            normed_x = wide_linear.add_rms_norm_parts(
                parts, residual, norm.weight, norm.eps, bias=bias, pdl=pdl
            )
            return residual, Normed(normed_x)
        return super().add_gemm(residual, x, norm, launch, bias=bias, group=group)

    def _can_split(self, num_tokens: int) -> bool:
        """Whether cutting the GEMM along in_features is faster than the library."""
        sizes = num_tokens, self.out_features, self.in_features
        return wide_linear.is_faster(*sizes, parts=True)

    def places(
        self, name: str, rows: slice, outs: Share, ins: Share
    ) -> Iterator[tuple[str, WeightPlace]]:
        target, shape = self.weight.data[rows], (outs.total, ins.total)
        dim, share = (0, outs) if outs.size < outs.total else (1, ins)
        yield f"{name}.weight", WeightPlace(target, shape, dim, share.start)
