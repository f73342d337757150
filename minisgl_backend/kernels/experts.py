"""What the experts of a mixture compute: gate and up, then down, then each token's weighted sum.
Experts without gates have only an up projection in the first place, and the square of ReLU.

Knows the experts' weights, and how a token's experts, its shared MLP and the residual are added up.
The first two are grouped GEMMs over the blocks of ``kernels.routing``, with the gate applied at the
end of the first. Must not know how experts are chosen. On Hopper ``cuda.expert_layers`` has kernels
for everything but the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import ClampedGate, ExpertsGate
from minisgl_backend.kernels.activation import activate_reference, open_gates_reference
from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.kernels.packed_weight import (
    CodesKind,
    PackedWeight,
    dequantize_weight,
    pack_experts,
)
from minisgl_backend.kernels.quantized import QuantizedWeight, dequantized
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm_reference, scales_of_squares
from minisgl_backend.kernels.routing import Choices, align

_COLUMNS: Final = 256
"""Columns per tile of ``add_outputs``, if the norm is half done."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The weights of the experts that a rank holds.

    ``gate_up`` [num_experts, 2 * intermediate_size, outer_size], gates first, or without a ``gate``
    [num_experts, intermediate_size, outer_size]; ``down`` [num_experts, outer_size,
    intermediate_size]; biases of the same shapes without the last dimension. The outer size is that
    of hidden states or of their latent. Only the kernels of ``cuda.expert_layers`` take packed
    weights.
    """

    gate_up: Tensor | QuantizedWeight | PackedWeight
    down: Tensor | QuantizedWeight | PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: ExpertsGate | None = "silu"

    @property
    def num_experts(self) -> int:
        return self.shapes[1][0]

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of ``gate_up`` and ``down``."""
        gate_up, down = (
            (*weight.codes.shape[:2], weight.in_features)
            if isinstance(weight, QuantizedWeight)
            else weight.shape
            for weight in (self.gate_up, self.down)
        )
        return (gate_up[0], gate_up[1], gate_up[2]), (down[0], down[1], down[2])

    @property
    def kinds(self) -> tuple[CodesKind, CodesKind] | None:
        """The kinds of packed weights."""
        if isinstance(self.gate_up, PackedWeight) and isinstance(self.down, PackedWeight):
            return self.gate_up.kind, self.down.kind
        return None

    def packed(self) -> ExpertWeights:
        """The same for ``cuda.expert_layers``: quantized weights are packed, their codes permuted
        in place (``packed_weight.pack_experts``)."""
        assert isinstance(self.gate_up, QuantizedWeight) and isinstance(self.down, QuantizedWeight)
        return replace(
            self,
            gate_up=pack_experts(self.gate_up, gated=self.gate is not None),
            down=pack_experts(self.down, gated=False),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SharedOutput:
    """The outputs of the MLP that all tokens take, ``rows`` [num_tokens, hidden_size].

    With a ``gate`` [hidden_size] they are multiplied by sigmoid(x . gate), with ``x`` [num_tokens,
    hidden_size] the experts' input. If its norm is half done, ``squares``, float32
    [tiles, num_tokens], and ``eps`` complete it (``cuda.linear``).
    """

    rows: Tensor
    gate: Tensor | None = None
    x: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0

    @property
    def opening(self) -> tuple[Tensor, Tensor, Tensor | None, float] | None:
        """If there is a gate, everything but ``rows``."""
        if self.gate is None or self.x is None:
            return None
        return self.gate, self.x, self.squares, self.eps

    def opened(self) -> Tensor:
        """[num_tokens, hidden_size] in float32 or float64."""
        rows = at_least_float32(self.rows)
        if self.opening is None:
            return rows
        gate, x, squares, eps = self.opening
        logits = at_least_float32(x) @ at_least_float32(gate)  # [num_tokens]
        if squares is not None:
            logits *= scales_of_squares(squares, x.shape[1], eps)
        return rows * logits.sigmoid()[:, None]

    def added_to(self, part: Tensor) -> Tensor:
        """The sum with ``part`` [num_tokens, hidden_size], of its dtype, rounded once."""
        return part + self.rows if self.opening is None else (part + self.opened()).to(part.dtype)


def fused_experts(
    x: Tensor, experts: ExpertWeights, choices: Choices, *, invariant: bool = False
) -> Tensor:
    """The sum over a token's experts e of weight_e * down_e(silu(gate_e x) * up_e x), or without
    gates of weight_e * down_e(relu(up_e x)^2), for ``x`` [num_tokens, hidden_size]; of the same
    shape.

    If ``invariant``, the order of a token's sums does not depend on the other tokens. Quantized
    weights have no kernel here, only the twin, which waits for the device.
    """
    if not has_kernel(x, experts):
        return fused_experts_reference(x, experts, choices)
    return sum_outputs(expert_outputs(x, experts, choices, invariant=invariant), choices)


def has_kernel(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether there are kernels for ``expert_outputs``."""
    gate_up, down = experts.gate_up, experts.down
    return use_triton(x) and isinstance(gate_up, Tensor) and isinstance(down, Tensor)


def expert_outputs(
    x: Tensor, experts: ExpertWeights, choices: Choices, *, invariant: bool = False
) -> Tensor:
    """The output of each of a token's experts, [num_tokens, top_k, hidden_size]; rows of experts of
    other ranks are not written. ``x`` is [num_tokens, hidden_size]. Only if ``has_kernel``.

    If ``invariant``, the order of a token's sums does not depend on the other tokens.
    """
    from minisgl_backend.kernels.triton_kernels.grouped_linear import launch_grouped_linear

    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    num_tokens, hidden_size = x.shape
    num_experts, top_k = experts.num_experts, choices.ids.shape[1]
    # small blocks waste less if experts see few tokens
    is_small = num_tokens * top_k <= 16 * num_experts and not invariant
    block = 16 if is_small else 64
    alignment = align(choices.ids, num_experts, block)
    inner = torch.empty((num_tokens * top_k, down.shape[2]), dtype=x.dtype, device=x.device)
    pairs, held = alignment.pairs, alignment.experts
    launch_grouped_linear(
        inner,
        x,
        gate_up,
        pairs,
        held,
        bias=experts.gate_up_bias,
        block=block,
        top_k=top_k,
        gate=experts.gate,
        squares_relu=experts.gate is None,
    )
    outer = torch.empty((num_tokens * top_k, hidden_size), dtype=x.dtype, device=x.device)
    launch_grouped_linear(
        outer,
        inner,
        down,
        pairs,
        held,
        bias=experts.down_bias,
        block=block,
        top_k=1,
        gate=None,
    )
    return outer.view(num_tokens, top_k, hidden_size)


def sum_outputs(
    outputs: Tensor, choices: Choices, shared: SharedOutput | None = None, *, pdl: bool = False
) -> Tensor:
    """Each token's weighted sum of its ``outputs`` [num_tokens, top_k, hidden_size], plus
    ``shared``."""
    if not use_triton(outputs):
        return sum_outputs_reference(outputs, choices, shared)
    out = torch.empty((len(outputs), outputs.shape[2]), dtype=outputs.dtype, device=outputs.device)
    _launch_sum(out, outputs, choices, shared, pdl=pdl)
    return out


def _launch_sum(
    out: Tensor, outputs: Tensor, choices: Choices, shared: SharedOutput | None, **rest: Any
) -> None:
    from minisgl_backend.kernels.triton_kernels.expert_sums import launch_sum_outputs

    launch_sum_outputs(
        out,
        outputs,
        choices.weights,
        choices.elsewhere_ids,
        None if shared is None else shared.rows,
        opening=None if shared is None else shared.opening,
        **rest,
    )


def sum_outputs_reference(outputs: Tensor, choices: Choices, shared: SharedOutput | None) -> Tensor:
    """The twin of ``sum_outputs``, in float32 or float64."""
    wide = at_least_float32(outputs)
    weighted = torch.where(choices.ids[:, :, None] < 0, 0, wide * choices.weights[:, :, None])
    total = weighted.sum(dim=1)
    return (total if shared is None else total + shared.opened()).to(outputs.dtype)


def add_outputs(
    outputs: Tensor,
    choices: Choices,
    shared: SharedOutput | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    half: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """residual += ``sum_outputs``, in place. Returns its RMSNorm, [num_tokens, hidden_size]. If
    ``half``, only the norm's weight is applied; then also returns the sums of squares that complete
    it, float32 [tiles, num_tokens] (``cuda.linear``)."""
    if not use_triton(outputs):
        summed = sum_outputs_reference(outputs, choices, shared)
        if not half:
            return fused_add_rms_norm_reference(summed, residual, norm_weight, eps), None
        wide = at_least_float32(residual.add_(summed))
        return (wide * norm_weight).to(residual.dtype), wide.square().sum(dim=1)[None]
    out, squares = torch.empty_like(residual), None
    if half:
        shape = -(-residual.shape[1] // _COLUMNS), len(residual)
        squares = torch.empty(shape, dtype=torch.float32, device=residual.device)
    added = residual, norm_weight, eps
    _launch_sum(out, outputs, choices, shared, added=added, squares_out=squares, pdl=pdl)
    return out, squares


def fused_experts_reference(x: Tensor, experts: ExpertWeights, choices: Choices) -> Tensor:
    """The twin of ``fused_experts``: one expert after another, summed in float32 or float64."""
    top_k = choices.ids.shape[1]
    ids, weights = choices.ids.flatten(), choices.weights.flatten()
    ends = (ids + 1).bincount(minlength=experts.num_experts + 1).cumsum(0)  # others' first
    by_expert = ids.argsort(stable=True).tensor_split(ends[:-1].cpu())[1:]
    out = torch.zeros_like(at_least_float32(x))
    for expert, pairs in enumerate(by_expert):  # [count], token * top_k + choice
        if len(pairs):
            tokens = pairs // top_k
            of_gate_up = _of(experts.gate_up, expert, x.dtype)  # [2 * inner size, hidden_size]
            both = F.linear(x[tokens], of_gate_up, _bias(experts.gate_up_bias, expert))
            inner = _opened(both, experts.gate)  # [count, inner size]
            of_down = _of(experts.down, expert, x.dtype)  # [hidden_size, inner size]
            outer = F.linear(inner, of_down, _bias(experts.down_bias, expert))
            out.index_add_(0, tokens, outer * weights[pairs, None])
    return out.to(x.dtype)


def _opened(both: Tensor, gate: ExpertsGate | None) -> Tensor:
    """The gated values of ``both`` [count, 2 * inner size], gates first; without a gate the squares
    of ReLU of [count, inner size]."""
    if gate is None:
        return activate_reference(both, "relu2")
    if not isinstance(gate, ClampedGate):
        return open_gates_reference(both, gate)
    closed, up = at_least_float32(both).chunk(2, dim=-1)
    closed, up = closed.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return ((up + 1) * closed * (gate.alpha * closed).sigmoid()).to(both.dtype)


def _bias(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def _of(
    weights: Tensor | QuantizedWeight | PackedWeight, expert: int, dtype: torch.dtype
) -> Tensor:
    """One expert's weight in plain numbers."""
    if isinstance(weights, Tensor):
        return weights[expert]
    if isinstance(weights, PackedWeight):
        return dequantize_weight(weights.expert(expert).weight, dtype, packed=True)
    return dequantized(weights.expert(expert), dtype)
