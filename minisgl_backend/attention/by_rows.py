"""Decode attention by two backends, one for few rows and one for more.

A captured step has a fixed number of rows, so it has the kernels of one of them. Must not know what
a backend does with its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.attention.base import DecodeAttention, DecodeRows, LayerAttention


@dataclass(frozen=True, slots=True)
class DecodeByRows:
    """``DecodeAttention`` by ``few`` for up to ``most_few`` rows, and by ``many`` for more."""

    few: DecodeAttention
    many: DecodeAttention
    most_few: int

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        backend = self.few if len(rows.rows) <= self.most_few else self.many
        return backend.plan_rows(rows)
