"""How a model learns the positions of tokens, in plain numbers: by rotations in attention, or by a
table of vectors.

Must not know config.json, tensors or the rest of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding (RoFormer, arXiv 2104.09864) and how it is stretched to longer contexts.

    ``scaling`` is one of
    - ``default``: it is not stretched;
    - ``linear``: positions are divided by ``factor`` (arXiv 2306.15595);
    - ``dynamic``: the base grows with the sequence beyond ``max_positions`` (NTK-aware scaling);
    - ``llama3``: low frequencies are divided by ``factor``, high ones kept, others blended;
    - ``yarn``: the same idea by dimension, and cos and sin are multiplied by ``attention_factor``
      (arXiv 2309.00071);
    - ``proportional``: only the share ``rotated`` of the pairs of dimensions rotates, with the
      frequencies of a head that rotates as a whole (Gemma 4);
    - ``longrope``: each frequency is divided by one of ``short_factors``, which are for sequences
      up to ``original_max_positions`` (arXiv 2402.13753). Longer sequences would need different
      frequencies at all positions, which is impossible with keys in shared pages, so they are not
      supported.

    ``max_positions`` is max_position_embeddings of config.json, and ``original_max_positions`` the
    context before stretching, both in tokens. ``rotated`` is the share of a head's dimensions that
    rotates, from the first dimension on. The first half of these are paired with the second half
    or, if ``interleaved``, each even dimension with the next. If ``reversed``, pairs rotate the
    other way round.
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
    short_factors: tuple[float, ...] = ()
    rotated: float = 1.0
    interleaved: bool = False
    reversed: bool = False

    def dims(self, head_dim: int) -> int:
        """Number of dimensions of a head in the table of angles; some angles may be 0."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.rotated)

    def check(self, head_dim: int) -> None:
        """Raise ``ConfigError`` if heads of this size cannot be rotated in this way."""
        rotated = self.dims(head_dim)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor {self.rotated:g} of head_dim {head_dim} makes "
                f"{rotated} rotary dimensions, which must be an even number up to head_dim"
            )
        if self.scaling == "dynamic" and rotated < 4:
            raise ConfigError(f"dynamic scaling needs 4 rotary dimensions or more, got {rotated}")
        if self.short_factors and len(self.short_factors) != rotated // 2:
            raise ConfigError(
                f"longrope needs {rotated // 2} short factors, one for each frequency, "
                f"got {len(self.short_factors)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """Each position has a vector, which is added to the embedding of its token (GPT-2). That of the
    first position is row ``offset`` of the table."""

    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries of ``layers`` (None for all) are multiplied by 1 + ``factor`` * log(1 + n), with n
    the number of whole ``period``s up to their position, counting positions from ``first``."""

    factor: float
    period: int
    first: int = 0
    layers: frozenset[int] | None = None

    def has(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers
