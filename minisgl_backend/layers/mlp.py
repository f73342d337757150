"""The gated feed-forward block of Llama and its successors: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor, nn

from minisgl_backend.layers.gemm import Launch, Normed
from minisgl_backend.layers.linear import MakeMatrix, MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.share import even_share
from minisgl_backend.parallel.group import Group


class GatedMLP(nn.Module):
    """Adds the block's output to the residual stream (``FeedForward``)."""

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
        self.gate_up_proj = MergedColumnLinear(name, hidden_size, parts, bias=bias, make=make)
        self.down_proj = RowLinear(
            f"{name}.down_proj", intermediate_size, hidden_size, bias=bias, group=group, make=make
        )

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, launch: Launch
    ) -> tuple[Tensor, Normed]:
        inner = self.gate_up_proj(x, launch, gated=True)  # [num_tokens, share.size]
        return self.down_proj.add_to(residual, inner, norm, launch)
