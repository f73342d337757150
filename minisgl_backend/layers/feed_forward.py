"""The part of a decoder layer that computes each token for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.kernels.moe import fused_experts, fused_experts_reference
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.matrix import MakeMatrix
from minisgl_backend.layers.norm import Normed, RMSNorm, add_sum
from minisgl_backend.layers.weight_place import WeightPlace, even_share, whole
from minisgl_backend.parallel.group import Group

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
        make: MakeMatrix,
    ):
        """``name`` is the module's in the checkpoint."""
        super().__init__()
        share = even_share(intermediate_size, group, "intermediate_size")
        parts = {"gate_proj": share, "up_proj": share}
        self.gate_up_proj = MergedColumnLinear(
            name, hidden_size, parts, bias=bias, make=make, gated=True
        )
        self.down_proj = RowLinear(
            f"{name}.down_proj", intermediate_size, hidden_size, bias=bias, group=group, make=make
        )

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit them by ``kernels``. Only with dense weights."""
        self.gate_up_proj.use_tensor_cores(kernels)
        self.down_proj.use_tensor_cores(kernels)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, *, pdl: bool
    ) -> tuple[Tensor, Normed]:
        inner = self.gate_up_proj(x, pdl=pdl)  # [num_tokens, share.size]
        return self.down_proj.add_to(residual, inner, norm, pdl=pdl)


class ExpertsMLP(nn.Module):
    """Gated MLPs behind a router (``FeedForward``): a mixture of experts.

    The router picks for each token the ``top_k`` experts of the highest softmax probability, and
    weighs their outputs by it (Switch Transformer, arXiv 2101.03961; Mixtral, arXiv 2401.04088).
    Every rank holds a slice of each expert, and the whole router. With ``normalize``, the weights
    of a token's experts sum to 1. Unless ``fused``, the kernel's twin computes one expert after
    another, which waits for the device.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        normalize: bool,
        fused: bool,
        group: Group,
    ):
        super().__init__()
        self.group = group
        self.top_k = top_k
        self.normalize = normalize
        self.fused = fused
        self.inner = even_share(intermediate_size, group, "moe_intermediate_size")
        share = self.inner.size
        self.gate = _parameter(num_experts, hidden_size)
        self.gate_up = _parameter(num_experts, 2 * share, hidden_size)
        self.down = _parameter(num_experts, hidden_size, share)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, *, pdl: bool
    ) -> tuple[Tensor, Normed]:
        part = self.part(x.normalized(pdl=pdl))
        return residual, add_sum(residual, part, norm, self.group, pdl=pdl)

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks, [num_tokens, hidden_size]."""
        weights, experts = self.route(x)  # [num_tokens, top_k] each
        compute = fused_experts if self.fused else fused_experts_reference
        return compute(x, self.gate_up, self.down, experts, weights.float())

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of each token's experts, both [num_tokens, top_k]."""
        probabilities = F.linear(x, self.gate).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        yield "gate.weight", whole(self.gate)
        num_experts, hidden_size, share = self.down.shape
        total, start = self.inner.total, self.inner.start
        inner, outer = (total, hidden_size), (hidden_size, total)
        for expert in range(num_experts):
            gate_up, down = self.gate_up.data[expert], self.down.data[expert]
            gate, up = gate_up[:share], gate_up[share:]
            yield f"experts.{expert}.gate_proj.weight", WeightPlace(gate, inner, 0, start)
            yield f"experts.{expert}.up_proj.weight", WeightPlace(up, inner, 0, start)
            yield f"experts.{expert}.down_proj.weight", WeightPlace(down, outer, 1, start)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
