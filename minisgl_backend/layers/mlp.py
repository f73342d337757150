"""The gated feed-forward block of Llama and its successors: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.share import even_share
from minisgl_backend.parallel.group import Group


class GatedMLP(nn.Module):
    """[num_tokens, hidden_size] -> the same."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, group: Group):
        super().__init__()
        share = even_share(intermediate_size, group, "intermediate_size")
        parts = {"gate_proj": share, "up_proj": share}
        self.gate_up_proj = MergedColumnLinear(hidden_size, parts, bias=bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias=bias, group=group)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [num_tokens, share.size] each
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out
