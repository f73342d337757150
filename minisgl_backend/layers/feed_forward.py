"""The part of a decoder layer that computes each token for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.kernels.moe import fused_experts, fused_experts_reference
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed, RMSNorm, add_sum
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.quantized_place import place_in, stacked_place
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import Place, Share, even_share
from minisgl_backend.layers.weight_share import block_of
from minisgl_backend.parallel.group import Group
from minisgl_backend.weight_format import Layout, WeightFormat

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import TensorCores


class FeedForward(Protocol):
    """One kind of this part."""

    def __call__(
        self, residual: Tensor, x: Normed, norm: RMSNorm, *, pdl: bool
    ) -> tuple[Tensor, Normed]:
        """The residual stream [num_tokens, hidden_size] after this part of the layer, and under
        ``norm``. ``x`` is its input under the layer's second norm; ``residual`` may be overwritten.
        """


class GatedMLP(nn.Module):
    """The block of Llama and its successors (``FeedForward``): down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: Group,
        matrices: Matrices,
    ):
        """``name`` is the module's in the checkpoint."""
        super().__init__()
        share = even_share(intermediate_size, group, "intermediate_size")
        parts = {"gate_proj": share, "up_proj": share}
        self.gate_up_proj = MergedColumnLinear(
            name, hidden_size, parts, bias=bias, matrices=matrices, gated=True
        )
        self.down_proj = RowLinear(
            f"{name}.down_proj",
            intermediate_size,
            hidden_size,
            bias=bias,
            group=group,
            matrices=matrices,
        )

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit them by ``kernels``, which the weights fit."""
        self.gate_up_proj.use_tensor_cores(kernels)
        self.down_proj.use_tensor_cores(kernels)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, *, pdl: bool
    ) -> tuple[Tensor, Normed]:
        inner = self.gate_up_proj(x, pdl=pdl)  # [num_tokens, share.size]
        return self.down_proj.add_to(residual, inner, norm, pdl=pdl)

    def output(self, x: Normed, *, pdl: bool) -> Tensor:
        """What ``forward`` adds, [num_tokens, hidden_size], for layers that change it before."""
        output: Tensor = self.down_proj(self.gate_up_proj(x, pdl=pdl), pdl=pdl)
        return output


class ExpertsMLP(nn.Module):
    """Gated MLPs behind a router (``FeedForward``): a mixture of experts.

    The router picks for each token the ``top_k`` experts of the highest softmax probability, and
    weighs their outputs by it (Switch Transformer, arXiv 2101.03961; Mixtral, arXiv 2401.04088).
    Every rank holds a slice of each expert, and the whole router. With ``normalize``, the weights
    of a token's experts sum to 1. Unless ``fused``, the kernel's twin computes one expert after
    another, which waits for the device. The weights of all experts are one tensor, or one
    ``StoredWeight`` if there are kernels for their format.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        normalize: bool,
        fused: bool,
        group: Group,
        matrices: Matrices,
    ):
        """``name`` is the module's in the checkpoint."""
        super().__init__()
        self.group = group
        self.top_k = top_k
        self.normalize = normalize
        self.fused = fused
        self.inner = inner = even_share(intermediate_size, group, "moe_intermediate_size")
        self.outer = outer = Share(hidden_size, 0, hidden_size)
        self._formats = {
            (expert, part): matrices.format_of(f"{name}.experts.{expert}.{part}")
            for expert in range(num_experts)
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        self._gate_format = matrices.format_of(f"{name}.gate")
        self.gate = _parameter(num_experts, hidden_size)
        of_down = [form for (_, part), form in self._formats.items() if part == "down_proj"]
        of_gate_up = [form for (_, part), form in self._formats.items() if part != "down_proj"]
        up_begin = inner.size
        self.gate_up = _stack(
            matrices, of_gate_up, [(0, inner), (up_begin, inner)], outer, 2 * inner.size
        )
        self.down = _stack(matrices, of_down, [(0, outer)], inner, hidden_size)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, *, pdl: bool
    ) -> tuple[Tensor, Normed]:
        part = self.part(x.normalized(pdl=pdl))
        return residual, add_sum(residual, part, norm, self.group, pdl=pdl)

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks, [num_tokens, hidden_size]."""
        weights, experts = self.route(x)  # [num_tokens, top_k] each
        compute = fused_experts if self.fused else fused_experts_reference
        gate_up, down = (
            weight.weight if isinstance(weight, StoredWeight) else weight.data
            for weight in (self.gate_up, self.down)
        )
        return compute(x, gate_up, down, experts, weights.float())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of each token's experts, both [num_tokens, top_k]."""
        probabilities = F.linear(x, self.gate).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def places(self) -> Iterator[tuple[str, Place]]:
        num_experts, hidden_size = self.gate.shape
        routed = Share(num_experts, 0, num_experts)
        router = self.gate.data
        yield "gate.weight", place_in(router, slice(None), self._gate_format, routed, self.outer)
        inner, outer = self.inner, self.outer
        gate_up, down = _memory(self.gate_up), _memory(self.down)
        first = self._formats[0, "down_proj"]
        if first is not None and first.layout is Layout.MX_STACKED:
            yield "experts.gate_up_proj", stacked_place(gate_up, first, inner, outer, pairs=True)
            yield "experts.down_proj", stacked_place(down, first, outer, inner, pairs=False)
            return
        rows = {"gate_proj": slice(0, inner.size), "up_proj": slice(inner.size, 2 * inner.size)}
        for (expert, part), form in self._formats.items():
            name = f"experts.{expert}.{part}.weight"
            if part == "down_proj":
                held = slice(0, hidden_size)
                yield name, place_in(down, held, form, outer, inner, expert=expert)
            else:
                yield name, place_in(gate_up, rows[part], form, inner, outer, expert=expert)


def _stack(
    matrices: Matrices,
    formats: list[WeightFormat | None],
    parts: list[tuple[int, Share]],
    ins: Share,
    out_features: int,
) -> nn.Parameter | StoredWeight:
    """Memory for the same matrix of each expert, [num_experts, out_features, ins.size].

    ``formats`` are those of all experts and ``parts``, pairs of a part's first row and its share.
    """
    shape = len(formats) // len(parts), out_features, ins.size
    stored = [form for form in formats if form is not None]
    if len(stored) < len(formats) or not matrices.experts_kept(stored):
        return _parameter(*shape)
    return StoredWeight(stored[0], block_of(stored[0], parts, ins), shape, num_inputs=ins.total)


def _memory(weight: nn.Parameter | StoredWeight) -> Tensor | StoredWeight:
    """What places write to."""
    return weight if isinstance(weight, StoredWeight) else weight.data


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
