"""Linear layers, whole or split over the ranks of a group.

Column-parallel layers hold a slice of the outputs. Row-parallel layers hold a slice of the inputs
and sum over the ranks, as in Megatron-LM (arXiv 1909.08053). A layer multiplies by a ``Matrix``,
which knows how its weight is stored and which kernel computes a GEMM. Must not know what a model
consists of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.adapters import (
    IN_STEP,
    RANK_STEP,
    Adaptation,
    AdaptedTokens,
    AdapterMemory,
    AdaptersShape,
)
from minisgl_backend.kernels.small_batch import is_faster_for_a_token
from minisgl_backend.layers.norm import Normed, RMSNorm, add_sum
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import (
    Place,
    Share,
    WeightPlace,
    empty_parameter,
    even_share,
)
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import TensorCores


class MergedColumnLinear(nn.Module):
    """Several projections of the same input as one GEMM, each split over the ranks.

    ``parts`` maps the checkpoint's name of each projection to this rank's share of its outputs.
    With a ``gate`` there are two parts, and the result is gate(first) * second. ``adapters`` is set
    if requests may have LoRA adapters.
    """

    adapters: AdapterMemory | None = None

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, Share],
        *,
        bias: bool,
        matrices: Matrices,
        gate: Gate | None = None,
        padded: bool = False,
    ):
        """``name`` is the enclosing module's in the checkpoint. If ``padded``, results may be wider
        than their parts, for the sake of kernels on tensor cores."""
        super().__init__()
        self.gate = gate
        named = {f"{name}.{part}": share for part, share in parts.items()}
        self.matrix = matrices.make(named, Share(in_features, 0, in_features), padded=padded)
        size = self.matrix.out_features
        self.bias = empty_parameter(size) if bias else None

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit by ``kernels``, which the weight fits."""
        matrix, gate = self.matrix, self.gate
        matrix.use_tensor_cores(
            kernels,
            gate=gate,
            adapters=adapters_shape(self),
            streams_a_row=is_faster_for_a_token(
                matrix.out_features, matrix.in_features, gated=gate is not None
            ),
        )

    def forward(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum of the shares], in the order of the parts;
        with a gate, [num_tokens, share]. ``adapted``: the tokens by adapter, if any has one."""
        adaptation = adaptation_of(self, adapted)
        return self.matrix.gemm(x, bias=self.bias, gate=self.gate, adaptation=adaptation, pdl=pdl)

    def for_next(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Normed:
        """``forward`` of a layer with a gate as the input of the next GEMM. If no kernel fuses the
        gate with this GEMM, it is left to the next one."""
        if not self.matrix.leaves_gate(len(x.x)):
            return Normed(self(x, pdl=pdl, adapted=adapted))
        adaptation = adaptation_of(self, adapted)
        both = self.matrix.gemm(x, bias=self.bias, adaptation=adaptation, pdl=pdl)
        return Normed(both, gate=self.gate)

    def places(self) -> Iterator[tuple[str, Place]]:
        for part, share in self.matrix.parts.items():
            name = part.rpartition(".")[2]
            yield f"../{name}.weight", self.matrix.place(part)
            if self.bias is not None:
                bias = self.bias.data[self.matrix.rows[part]]
                yield f"../{name}.bias", WeightPlace(bias, (share.total,), 0, share.start)


class RowLinear(nn.Module):
    """A projection onto the residual stream, whose inputs are split over the ranks."""

    adapters: AdapterMemory | None = None

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group: Group,
        matrices: Matrices,
    ):
        """``name`` is the projection's in the checkpoint."""
        super().__init__()
        self.group = group
        inputs = even_share(in_features, group, "the inputs of a row-parallel layer")
        self.matrix = matrices.make({name: Share(out_features, 0, out_features)}, inputs)
        self.bias = empty_parameter(out_features) if bias else None

    def use_tensor_cores(self, kernels: TensorCores, *, adds: bool = True) -> None:
        """Compute steps that fit by ``kernels``, which the weight fits: ``add_to`` or, unless it
        ``adds``, ``forward``."""
        adds = adds and self.group.size == 1
        self.matrix.use_tensor_cores(kernels, adds=adds, adapters=adapters_shape(self))

    def add_to(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        pdl: bool,
        adapted: AdaptedTokens | None = None,
    ) -> tuple[Tensor, Normed]:
        """The residual stream [num_tokens, out_features] with the projection of ``x`` added, and
        the same under ``norm``.

        ``x`` [num_tokens, this rank's share] has no norm to be applied; ``residual`` may be
        overwritten. ``adapted``: the tokens by adapter, if any has one.
        """
        if adapted is not None and self.group.size > 1:  # each rank has only a part of the sum
            part = self.part(x, pdl=pdl, adapted=adapted)
            return residual, add_sum(residual, part, norm, self.group, pdl=pdl)
        return self.matrix.add_gemm(
            residual,
            x,
            norm,
            bias=self.bias,
            group=self.group,
            pdl=pdl,
            adaptation=adaptation_of(self, adapted),
        )

    def forward(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """The projection itself, summed over the ranks, [num_tokens, out_features]."""
        return self.group.all_reduce(self.part(x, pdl=pdl, adapted=adapted))

    def part(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """This rank's part of that sum."""
        bias = self.bias if self.group.rank == 0 else None  # in the sum over the ranks once
        adaptation = adaptation_of(self, adapted)
        return self.matrix.gemm(x, bias=bias, adaptation=adaptation, pdl=pdl)

    def places(self) -> Iterator[tuple[str, Place]]:
        (name,) = self.matrix.parts
        yield "weight", self.matrix.place(name)
        if self.bias is not None:
            yield "bias", WeightPlace(self.bias.data, (self.matrix.out_features,))


def adaptation_of(
    linear: MergedColumnLinear | RowLinear, adapted: AdaptedTokens | None
) -> Adaptation | None:
    """The layer's adapters and the tokens of a step, if any of these has an adapter."""
    if adapted is None:
        return None
    assert linear.adapters is not None
    return Adaptation(linear.adapters, adapted)


def adapters_shape(linear: MergedColumnLinear | RowLinear) -> AdaptersShape | None:
    """The shape of the adapters that kernels on tensor cores add to the projections, if they do.
    They can if each projection is made of whole MMA tiles, and the inputs of whole steps of the
    kernel for x A^T."""
    memory = linear.adapters
    if memory is None or linear.matrix.in_features % IN_STEP:
        return None
    return memory.shape if all(width % RANK_STEP == 0 for width in memory.widths) else None
