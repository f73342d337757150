"""The gates of feed-forward blocks (arXiv 2002.05202), Llama's silu(gate) * up and Gemma's with the
tanh approximation of GELU (arXiv 1606.08415); and the gate of attention's output
(arXiv 2505.06708).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up in float32, rounded once.

    ``gate_up`` [num_tokens, 2 * intermediate_size]: the gates, then the ups. Returns
    [num_tokens, intermediate_size].
    """
    if not use_triton(gate_up):
        return silu_mul_reference(gate_up)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_gated_mul

    num_tokens, width = gate_up.shape
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    launch_gated_mul(out, gate_up, pdl=pdl)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The twin of ``silu_mul``; float64 stays float64."""
    gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """The same as ``silu_mul`` with gelu(gate), approximated by tanh."""
    if not use_triton(gate_up):
        return gelu_mul_reference(gate_up)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_gated_mul

    num_tokens, width = gate_up.shape
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    launch_gated_mul(out, gate_up, gelu=True, pdl=pdl)
    return out


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """The twin of ``gelu_mul``; float64 stays float64."""
    gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up).to(gate_up.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor, *, pdl: bool = False) -> Tensor:
    """x * sigmoid(gate) in float32, rounded once.

    ``x`` [num_tokens, num_heads, head_dim] is contiguous. ``gate`` has that shape, and its tokens
    and heads may be strided. Returns [num_tokens, num_heads * head_dim].
    """
    if not use_triton(x):
        return sigmoid_mul_reference(x, gate)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_sigmoid_mul

    out = torch.empty((len(x), x[0].numel()), dtype=x.dtype, device=x.device)
    launch_sigmoid_mul(out, x, gate, pdl=pdl)
    return out


def sigmoid_mul_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The twin of ``sigmoid_mul``; float64 stays float64."""
    return (at_least_float32(x) * at_least_float32(gate).sigmoid()).to(x.dtype).flatten(1)
