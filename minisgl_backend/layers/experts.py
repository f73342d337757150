"""Mixture of experts.

The router picks for each token the ``top_k`` experts of the highest softmax probability, and weighs
their outputs by it (Switch Transformer, arXiv 2101.03961; Mixtral, arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.kernels.moe import fused_experts, fused_experts_reference
from minisgl_backend.layers.gemm import Launch, Normed, add_sum
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.share import even_share
from minisgl_backend.layers.weight_place import WeightPlace, whole
from minisgl_backend.parallel.group import Group


class ExpertsMLP(nn.Module):
    """Gated MLPs behind a router (``FeedForward``).

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
        self, residual: Tensor, x: Normed, norm: RMSNorm, launch: Launch
    ) -> tuple[Tensor, Normed]:
        part = self.part(x.normalized(pdl=launch.pdl))
        return residual, add_sum(residual, part, norm, launch, self.group)

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
