"""The gates of feed-forward blocks (arXiv 2002.05202), Llama's silu(gate) * up and Gemma's with the
tanh approximation of GELU (arXiv 1606.08415); what blocks without gates have instead, GELU, ReLU or
its square (arXiv 2109.08668) and xIELU (arXiv 2411.13010); the gate of attention's output (arXiv
2505.06708); and Gemma's bound of logits (arXiv 2408.00118).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate, LimitedGate, OutputGate, PlainActivation
from minisgl_backend.kernels.dispatch import at_least_float32, use_triton


def gate_mul(
    gate: Tensor, up: Tensor, function: Gate | LimitedGate, *, pdl: bool = False
) -> Tensor:
    """``function``(gate) * up in float32, rounded once.

    ``gate``, ``up`` [num_tokens, size], whose rows may be strided. Returns [num_tokens, size].
    """
    if not use_triton(gate):
        return gate_mul_reference(gate, up, function)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_gated_mul

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    limited = function if isinstance(function, LimitedGate) else None
    launch_gated_mul(out, gate, up, gelu=function == "gelu", limited=limited, pdl=pdl)
    return out


def gate_mul_reference(gate: Tensor, up: Tensor, function: Gate | LimitedGate) -> Tensor:
    """The twin of ``gate_mul``; float64 stays float64."""
    wide = at_least_float32(gate)
    if isinstance(function, LimitedGate):
        limit = function.limit
        if function.on_input:
            opened = F.silu(wide.clamp(max=limit))
        else:
            opened = F.silu(wide).clamp(max=limit)
        return opened.mul_(up.clamp(-limit, limit)).to(gate.dtype)
    opened = F.silu(wide) if function == "silu" else F.gelu(wide, approximate="tanh")
    return opened.mul_(up).to(gate.dtype)


def open_gates(gate_up: Tensor, gate: Gate | LimitedGate, *, pdl: bool = False) -> Tensor:
    """The same for ``gate_up`` [num_tokens, 2 * size]: the gates, then the ups."""
    closed, up = gate_up.chunk(2, dim=-1)
    return gate_mul(closed, up, gate, pdl=pdl)


def open_gates_reference(gate_up: Tensor, gate: Gate | LimitedGate) -> Tensor:
    """The twin of ``open_gates``."""
    closed, up = gate_up.chunk(2, dim=-1)
    return gate_mul_reference(closed, up, gate)


def activate(x: Tensor, function: PlainActivation, *, pdl: bool = False) -> Tensor:
    """The ``function`` in float32, rounded once, for a contiguous ``x`` [num_tokens, size]."""
    if not use_triton(x):
        return activate_reference(x, function)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_activate

    out = torch.empty_like(x)
    launch_activate(out, x, function, pdl=pdl)
    return out


def activate_reference(x: Tensor, function: PlainActivation) -> Tensor:
    """The twin of ``activate``; float64 stays float64."""
    wide = at_least_float32(x)
    if function in ("gelu", "exact gelu"):
        y = F.gelu(wide, approximate="tanh" if function == "gelu" else "none")
    else:
        y = wide.relu() if function == "relu" else wide.relu().square()
    return y.to(x.dtype)


def xielu(x: Tensor, numbers: Tensor, *, pdl: bool = False) -> Tensor:
    """xIELU in float32, rounded once, for a contiguous ``x`` [num_tokens, size].

    ``numbers`` [4], of the same type, are p, n, beta and eps. With a = softplus(p) and b = beta +
    softplus(n), the result is a x^2 + beta x where x is above 0, and elsewhere b (exp(min(x, eps))
    - 1 - x) + beta x.
    """
    if not use_triton(x):
        return xielu_reference(x, numbers)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_xielu

    out = torch.empty_like(x)
    launch_xielu(out, x, numbers, pdl=pdl)
    return out


def xielu_reference(x: Tensor, numbers: Tensor) -> Tensor:
    """The twin of ``xielu``; float64 stays float64."""
    wide = at_least_float32(x)
    p, n, beta, eps = at_least_float32(numbers).unbind()
    below = (torch.minimum(wide, eps).expm1() - wide) * (beta + F.softplus(n))
    curve = torch.where(wide > 0, F.softplus(p) * wide.square(), below)
    return (curve + beta * wide).to(x.dtype)


def gate_output(x: Tensor, gate: Tensor, function: OutputGate, *, pdl: bool = False) -> Tensor:
    """x * ``function``(gate) in float32, rounded once.

    ``x`` [num_tokens, num_heads, head_dim] is contiguous. ``gate`` has that shape; its tokens and
    heads may be strided, and the elements of a head may be one. Returns [num_tokens, num_heads *
    head_dim].
    """
    if not use_triton(x):
        return gate_output_reference(x, gate, function)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_gate_output

    out = torch.empty((len(x), x[0].numel()), dtype=x.dtype, device=x.device)
    launch_gate_output(out, x, gate, softplus=function == "softplus", pdl=pdl)
    return out


def gate_output_reference(x: Tensor, gate: Tensor, function: OutputGate) -> Tensor:
    """The twin of ``gate_output``; float64 stays float64."""
    wide = at_least_float32(gate)
    opened = wide.sigmoid() if function == "sigmoid" else F.softplus(wide)
    return (at_least_float32(x) * opened).to(x.dtype).flatten(1)


def soft_cap(x: Tensor, cap: float) -> None:
    """Replace ``x`` by cap * tanh(x / cap), in float32, rounded once.

    ``x`` [num_rows, size], whose rows may be strided.
    """
    if not use_triton(x):
        soft_cap_reference(x, cap)
        return
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_soft_cap

    launch_soft_cap(x, cap)


def soft_cap_reference(x: Tensor, cap: float) -> None:
    """The twin of ``soft_cap``; float64 stays float64."""
    x.copy_(at_least_float32(x).div(cap).tanh_().mul_(cap))
