"""Attention of layers whose windows are sections, by a backend that does not know windows.

A token sees the positions of its own section, up to its own:

    positions    0 .. size - 1 | size .. 2 size - 1 | ...

So for these layers a row is a sequence that begins with the section of its newest token: its length
and its line of the page table are counted from there. Only the rotation tells the real positions of
tokens. Sections begin with a page, and a prompt chunk lies within one section: the planner cuts
chunks there (``SchedulerConfig.section``).

Knows lengths and page tables. Must not know what a backend does with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    Chunks,
    DecodeAttention,
    DecodeRows,
    LayerAttention,
    PrefillAttention,
    ScheduledDecode,
)
from minisgl_backend.plan import NO_GROUPS
from minisgl_backend.request import IntArray


def within_section(setting: AttentionSetting) -> AttentionSetting:
    """The setting of a backend that computes within a section."""
    shape, size = setting.shape, setting.shape.section
    assert size is not None and size % setting.page_size == 0
    inner = replace(shape, sections=False, windows=(None,) * shape.num_layers)
    return replace(setting, shape=inner, max_sequence_length=size, grouped=False)


@dataclass(frozen=True, slots=True)
class SectionPrefill:
    """``PrefillAttention`` in sections of ``size`` positions, by ``attention`` within them."""

    attention: PrefillAttention
    size: int
    page_size: int

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        ends, host_ends, max_end = chunks.ends, None, min(chunks.max_end, self.size)
        if chunks.host_ends is not None:
            host_ends = _own_ends(chunks.host_ends, self.size)
            max_end = int(host_ends.max())
        first, rows, table = _own_pages(
            chunks.rows, ends, chunks.page_table, self.size, self.page_size
        )
        own = replace(
            chunks,
            rows=rows,
            ends=ends - first,
            page_table=table,
            max_end=max_end,
            host_ends=host_ends,
            window_table=None,
        )
        return self.attention.plan_chunks(own)


@dataclass(frozen=True, slots=True)
class SectionDecode:
    """``DecodeAttention`` in sections of ``size`` positions, by ``attention`` within them."""

    attention: DecodeAttention
    size: int
    page_size: int

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        host_lengths = None
        if rows.host_lengths is not None:
            host_lengths = _own_ends(rows.host_lengths, self.size)
        first, index, table = _own_pages(
            rows.rows, rows.lengths, rows.page_table, self.size, self.page_size
        )
        own = replace(
            rows,
            rows=index,
            lengths=rows.lengths - first,
            page_table=table,
            host_lengths=host_lengths,
            groups=NO_GROUPS,
            grouped=False,
            pdl=False,  # attention would not wait for the table
            window_table=None,
        )
        return self.attention.plan_rows(own)


class ScheduledSectionDecode(SectionDecode):
    """The same with an ``attention`` that follows schedules."""

    def schedule_rows(self, lengths: IntArray) -> None:
        assert isinstance(self.attention, ScheduledDecode)
        self.attention.schedule_rows(_own_ends(lengths, self.size))


def _own_ends(ends: IntArray, size: int) -> IntArray:
    """The ends of sequences, counted from the beginning of their last section; 0 if empty."""
    own: IntArray = ends - np.maximum(ends - 1, 0) // size * size
    return own


def _own_pages(
    rows: Tensor, ends: Tensor, page_table: Tensor, size: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For sequences up to ``ends``: where their last sections begin, int32[n]; each sequence's line
    in a table of these sections' pages, int32[n]; and that table, [n, size / page_size]."""
    first = (ends - 1).clamp(min=0) // size * size
    columns = torch.arange(size // page_size, device=rows.device)
    columns = (first[:, None] // page_size + columns).clamp(max=page_table.shape[1] - 1)
    index = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return first, index, page_table[rows.long()[:, None], columns]
