"""What a checkpoint says about its rotary position embedding: plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding (RoFormer, arXiv 2104.09864) and how it is stretched to longer contexts.

    ``scaling`` is one of
    - ``default``: it is not stretched;
    - ``linear``: positions are divided by ``factor`` (arXiv 2306.15595);
    - ``dynamic``: the base grows with the sequence beyond ``max_positions`` (NTK-aware scaling);
    - ``llama3``: low frequencies are divided by ``factor``, high ones kept, those between blended;
    - ``yarn``: the same idea by dimension, and cos and sin are multiplied by ``attention_factor``
      (arXiv 2309.00071).

    ``max_positions`` is max_position_embeddings of config.json, ``original_max_positions`` the
    context before stretching. Both are in tokens.
    """

    scaling: str = "default"
    theta: float = 10_000.0
    max_positions: int
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
