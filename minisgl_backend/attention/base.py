"""What one forward pass tells attention, and what an attention backend offers, on a CPU.

For GPUs this is in ``paged``; shapes and scales are common to both. Knows positions, pages and
shapes. Must not know requests, plans or how pages are given out.

A *run* is what a step computes of one row: positions ``starts`` .. ``starts + lengths``, which
attend to all positions before its end. A decoding row is a run of length 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # what a model is can be known without torch
    from torch import Tensor

HostArray: TypeAlias = npt.NDArray[np.int64]
Metadata: TypeAlias = Any
"""Whatever a backend prepares for itself once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one rank. ``windows`` has an entry a layer: how many positions, its own included, a
    token sees; None for all before it. ``scale`` multiplies the products of queries and keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)


@dataclass(frozen=True, slots=True)
class KVScale:
    """What multiplies the keys and the values of a layer where its pages hold float8."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The tokens of one step, run after run.

    On the device: ``positions`` and ``slots`` int64[num_tokens]; a slot is page * page_size +
    offset, where the token's key and value go. On the host, int64[num_runs]: ``starts`` (first
    query position), ``lengths`` (queries), ``offsets`` (first token in flat order); and
    ``page_table`` int64[num_runs, max_pages], whose entries behind a run's last page are the dummy
    page.
    """

    positions: Tensor
    slots: Tensor
    starts: HostArray
    lengths: HostArray
    offsets: HostArray
    page_table: HostArray


class KVPages(Protocol):
    """Keys and values of all layers. What lies behind a run's end in its pages is finite."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [num_pages + 1, page_size, num_kv_heads, head_dim]."""


class AttentionBackend(Protocol):
    """One way to compute attention. Holds no state of a step, so steps cannot mix."""

    def prepare(self, batch: Batch) -> Metadata:
        """What all layers of the step share; called once a step."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, ctx: ForwardContext) -> Tensor:
        """Store k and v in their slots, then attend.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; returns
        the shape of q.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardContext:
    """All that a forward pass depends on beside weights and token ids."""

    batch: Batch
    kv: KVPages
    attention: AttentionBackend
    metadata: Metadata
