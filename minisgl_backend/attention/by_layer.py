"""Attention of a model whose layers differ in their heads or pages, by one backend for each kind.

Knows which backend computes a layer. Must not know what a backend does with its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.attention.base import (
    Chunks,
    DecodeRows,
    GroupedDecode,
    LayerAttention,
    PagedAttention,
    ScheduledDecode,
)
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.plan import Groups
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True)
class AttentionByLayer:
    """``PrefillAttention`` and ``DecodeAttention`` of layers whose heads or pages differ.

    For each layer, ``layers`` has the index of the backend that computes it, and the layer's index
    within that backend. ``window_pages``: whether a backend's layers have window pages.
    """

    backends: Sequence[PagedAttention]
    layers: Sequence[tuple[int, int]]
    window_pages: Sequence[bool]

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        return self._by_layer(
            [
                backend.prefill.plan_chunks(chunks.over_window_pages() if in_window else chunks)
                for backend, in_window in zip(self.backends, self.window_pages, strict=True)
            ]
        )

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        return self._by_layer(
            [
                backend.decode.plan_rows(rows.over_window_pages() if in_window else rows)
                for backend, in_window in zip(self.backends, self.window_pages, strict=True)
            ]
        )

    def _by_layer(self, planned: Sequence[LayerAttention]) -> LayerAttention:
        def attend(out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
            backend, own_index = self.layers[layer]
            planned[backend](out, q, kv, own_index)

        return attend


class ScheduledByLayer(AttentionByLayer):
    """The same if any of the backends follows a schedule (``ScheduledDecode``)."""

    def schedule_rows(self, lengths: IntArray) -> None:
        for backend in self.backends:
            if isinstance(backend.decode, ScheduledDecode):
                backend.decode.schedule_rows(lengths)


class GroupedByLayer(AttentionByLayer):
    """The same if one of the backends, for layers without window pages, is a ``GroupedDecode``."""

    def take_groups(self, groups: Groups) -> bool:
        return any(
            isinstance(backend.decode, GroupedDecode) and backend.decode.take_groups(groups)
            for backend, in_window in zip(self.backends, self.window_pages, strict=True)
            if not in_window
        )
