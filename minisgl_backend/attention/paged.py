"""Attention on a GPU: keys and values stand in their pages already, lengths and page table too.

Unlike ``base.AttentionBackend`` it never sees host arrays of a decode step, so that the step can be
captured in a CUDA graph. Prefill and decode are separate, and a pair of them makes a backend: they
may come from different libraries.

Must not know requests, plans or how pages are given out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

Metadata: TypeAlias = Any
"""Whatever an implementation prepares for itself once a step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKV:
    """Keys and values of one layer, [num_pages + 1, page_size, num_kv_heads, head_dim].

    Where they are float8, ``k_scale`` and ``v_scale`` (float32 [1]) multiply them.
    """

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Prompt chunks of a step, one after another in the flat batch; int32 on the device.

    ``rows`` [num_chunks] of ``page_table`` [num_rows, max_pages]; ``offsets`` [num_chunks + 1] into
    the tokens; ``ends`` [num_chunks]: positions of the row up to the chunk's last, included.
    ``max_length`` and ``max_end`` are the largest length and end, known on the host.
    """

    rows: Tensor
    offsets: Tensor
    ends: Tensor
    page_table: Tensor
    max_length: int
    max_end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRows:
    """Decoding rows of a step; int32 on the device.

    ``rows`` [batch_size] of ``page_table`` [num_rows, max_pages]; ``lengths`` [batch_size], the new
    token's position included. ``pdl``: kernels may be launched before their predecessors end.
    """

    rows: Tensor
    lengths: Tensor
    page_table: Tensor
    pdl: bool = False


class PrefillAttention(Protocol):
    """Attention of prompt chunks."""

    def plan_chunks(self, chunks: Chunks) -> Metadata:
        """What all layers of the step share; called once a step."""

    def prefill(self, q: Tensor, kv: PagedKV, layer: int, metadata: Metadata) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> the same; heads of ``q`` may be strided by token."""


class DecodeAttention(Protocol):
    """Attention of one new token a row. Neither method waits for the device or reads from it."""

    def plan_rows(self, rows: DecodeRows) -> Metadata:
        """What all layers of the step share; called once a step, inside the graph."""

    def decode(self, q: Tensor, kv: PagedKV, layer: int, metadata: Metadata) -> Tensor:
        """[batch_size, num_heads, head_dim] -> the same; heads of ``q`` may be strided by row."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """A backend: ``name`` is the option that chooses it."""

    name: str
    prefill: PrefillAttention
    decode: DecodeAttention
