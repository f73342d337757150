"""Keys and values in pages, as every attention kernel and every attention backend takes them.

Must not know which page is whose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # ``models.spec`` imports this module and needs no torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVScale:
    """The factors for a layer's keys and values if its pages hold float8."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKV:
    """Keys and values of one layer, [num_pages + 1, page_size, num_kv_heads, head_dim].

    If they are float8, they are multiplied by ``k_scale`` and ``v_scale`` (float32 [1]); ``scale``
    holds the same two numbers on the host. Positions beyond a row's end are finite.

    With multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) there is one head, which all
    query heads share. A position's key is its latent and behind it a rotated part. The latent is
    the value, too: ``values`` are a view of the first columns of ``keys``, with the same scale.

    ``sinks`` [num_heads], in the type of the queries, add one more score, without a value, to each
    softmax of a head (arXiv 2309.17453). The sink takes its part of the sum and contributes
    nothing, so attention without sinks is multiplied by sigmoid(log-sum-exp - sink).

    ``index_keys`` [num_pages + 1, page_size, size], in the type of pages but never scaled: of
    layers that choose which positions tokens attend to (``kernels.indexer``).
    """

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    scale: KVScale = field(default_factory=KVScale)
    sinks: Tensor | None = None
    index_keys: Tensor | None = None

    @property
    def has_latents(self) -> bool:
        """Whether values are a part of the keys."""
        return self.values.shape[-1] < self.keys.shape[-1]
