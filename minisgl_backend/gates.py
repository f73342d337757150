"""The gates of feed-forward blocks and of attention, as config.json describes them: plain facts,
without tensors.

A block has gates and ups; its down projection reads gate(gates) * ups. Blocks without gates have an
activation instead, and read activation(ups).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Gate: TypeAlias = Literal["silu", "gelu"]
"""SiLU, as in Llama, or GELU approximated by tanh, as in Gemma."""

OutputGate: TypeAlias = Literal["sigmoid", "softplus"]
"""What opens the gates of attention's output, as in Qwen3-Next or as in Laguna."""

PlainActivation: TypeAlias = Literal["relu", "relu2", "gelu", "exact gelu"]
"""ReLU, as in OPT, or its square, as in Nemotron; GELU approximated by tanh, as in StarCoder 2, or
by the error function, as in Pythia."""

Activation: TypeAlias = PlainActivation | Literal["xielu"]
"""One of these, or xIELU, whose numbers are learned, as in Apertus."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """That of gpt-oss's experts: (up + 1) * gate * sigmoid(alpha * gate), with the gate at most
    ``limit`` and up within ``limit`` of 0."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class LimitedGate:
    """SiLU with a limit: up * silu(gate), with silu(gate) at most ``limit``, as in some layers of
    Ling 3.0 and Step 3.5, or if ``on_input`` the gate itself, as in Hy4; and up within ``limit`` of
    0."""

    limit: float
    on_input: bool = False


ExpertsGate: TypeAlias = Gate | ClampedGate | LimitedGate
"""What gates of experts may be."""
