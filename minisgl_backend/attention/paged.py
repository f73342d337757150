"""Attention on a GPU: keys and values stand in their pages already, lengths and page table too.

Unlike ``base.AttentionBackend`` it is given no host arrays of a step that is to be captured in a
CUDA graph. Prefill and decode are separate, and a pair of them makes a backend: they may come from
different libraries.

Must not know requests, plans or how pages are given out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape, KVScale, Metadata
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetting:
    """What a backend is made for.

    ``dtype`` is that of queries and results, ``kv_dtype`` that of pages: the same, or float8_e4m3.
    Batches of more than ``max_captured_batch_size`` rows are not captured in a graph.
    """

    shape: AttentionShape
    page_size: int
    max_sequence_length: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_batch_size: int
    max_captured_batch_size: int
    device: torch.device

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence: the width of the page table."""
        return -(-self.max_sequence_length // self.page_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers."""
        return tuple(dict.fromkeys(self.shape.windows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKV:
    """Keys and values of one layer, [num_pages + 1, page_size, num_kv_heads, head_dim].

    Where they are float8, ``k_scale`` and ``v_scale`` (float32 [1]) multiply them; ``scale`` holds
    the same two numbers on the host.
    """

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    scale: KVScale = field(default_factory=KVScale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Prompt chunks of a step, one after another in the flat batch; int32 on the device.

    ``rows`` [num_chunks] of ``page_table`` [num_rows, max_pages]; ``offsets`` [num_chunks + 1] into
    the tokens, some of which may stand before the first chunk or behind the last; ``ends``
    [num_chunks]: positions of the row up to the chunk's last, included. The host knows the largest
    length, the largest end, and copies of the offsets and ends, ``host_offsets`` and ``host_ends``.
    In a step to be captured these copies are None, the two maxima are the largest possible ones,
    and chunks may be empty.
    """

    rows: Tensor
    offsets: Tensor
    ends: Tensor
    page_table: Tensor
    max_length: int
    max_end: int
    host_offsets: IntArray | None = None
    host_ends: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRows:
    """Decoding rows of a step; int32 on the device.

    ``rows`` [batch_size] of ``page_table`` [num_rows, max_pages]; ``lengths`` [batch_size], the new
    token's position included; ``host_lengths`` are the same, and None in a step to be captured.
    ``pdl``: kernels may be launched before their predecessors end.
    """

    rows: Tensor
    lengths: Tensor
    page_table: Tensor
    host_lengths: IntArray | None = None
    pdl: bool = False


class PrefillAttention(Protocol):
    """Attention of prompt chunks."""

    def plan_chunks(self, chunks: Chunks) -> Metadata:
        """What all layers of the step share; called once a step."""

    def prefill(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, metadata: Metadata) -> None:
        """Fill the chunks' tokens of ``out``, [num_tokens, num_heads, head_dim] as ``q`` is.

        Heads of ``q`` may be strided by token.
        """


class DecodeAttention(Protocol):
    """Attention of one new token a row. Neither method waits for the device or reads from it."""

    def plan_rows(self, rows: DecodeRows) -> Metadata:
        """What all layers of the step share; called once a step, inside the graph."""

    def decode(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, metadata: Metadata) -> None:
        """Fill ``out``, [batch_size, num_heads, head_dim] as ``q`` is.

        Heads of ``q`` may be strided by row.
        """


@runtime_checkable
class ScheduledDecode(DecodeAttention, Protocol):
    """Decode attention by kernels that follow a schedule, which the host makes of the lengths."""

    def schedule_rows(self, lengths: IntArray) -> None:
        """Write the schedule of the captured step of so many rows that is enqueued next.

        ``lengths`` int32 [batch_size] on the host, 1 for padding. Called on the stream of the step,
        before it is captured and before each replay.
        """


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """A backend: ``name`` is the option that chooses it.

    ``can_capture``: whether a decode step can be captured in a CUDA graph; ``captures_chunks``:
    whether a step with prompt chunks can be, too.
    """

    name: str
    prefill: PrefillAttention
    decode: DecodeAttention
    can_capture: bool = True
    captures_chunks: bool = True
