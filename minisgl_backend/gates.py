"""The gates of feed-forward blocks, as config.json describes them: plain facts, without tensors.

A block has gates and ups; its down projection reads gate(gates) * ups. Blocks without gates, as
Nemotron's, read the square of ReLU of their ups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Gate: TypeAlias = Literal["silu", "gelu"]
"""SiLU, as in Llama, or GELU approximated by tanh, as in Gemma."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """That of gpt-oss's experts: (up + 1) * gate * sigmoid(alpha * gate), with the gate at most
    ``limit`` and up within ``limit`` of 0."""

    alpha: float
    limit: float
