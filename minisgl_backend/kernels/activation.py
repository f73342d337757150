"""The gate of Llama's feed-forward block: silu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_jit


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up in float32, rounded once.

    ``gate_up`` [num_tokens, 2 * intermediate_size]: the gates, then the ups. Returns
    [num_tokens, intermediate_size].
    """
    if not use_jit(gate_up):
        return silu_mul_reference(gate_up)
    from minisgl_backend.kernels.jit import activation as jit

    num_tokens, width = gate_up.shape
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    jit.launch_silu_mul(out, gate_up, pdl=pdl)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The twin of ``silu_mul``; float64 stays so."""
    gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)
