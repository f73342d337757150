"""How the GEMVs of ``cuda/gemv.cu`` are cut, and which weights they are for.

Pure arithmetic, without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_backend.kernels.packed_weight import CodesKind

ROWS: Final = 16
"""Of the weight, in a thread block."""

MOST_SQUARES: Final = 1024
"""Tiles of the input's sum of squares."""

_LEAST_ELEMENTS: Final = 8 * 2**20
"""Of a weight: one row by a smaller one is left to ``cuda/linear.cu``."""

_GROUP: Final = 128
_MOST_WARPS: Final = 8
_MOST_WARPS_OF_PROCESSOR: Final = 16
"""Warps of a multiprocessor: each has 128 registers a thread, or 8 KiB of codes on their way."""


@dataclass(frozen=True, slots=True)
class GemvCut:
    """``warps`` of each of ``splits`` thread blocks share out the in_features, in batches of
    ``columns`` groups. Registers are left for ``per_processor`` thread blocks of a multiprocessor.
    Each asks for the weight of the one that is ``fetched`` blocks of rows further, if not 0."""

    columns: int
    warps: int
    per_processor: int
    splits: int = 1
    fetched: int = 0


def gemv_cut(height: int, in_features: int, codes: CodesKind | None) -> GemvCut | None:
    """How to multiply one row by a weight [height, in_features], plain if it has no ``codes``; None
    if ``cuda/linear.cu`` is faster."""
    if codes is None or height * in_features <= _LEAST_ELEMENTS:
        return None
    return usual_cut(in_features, codes)


def usual_cut(in_features: int, codes: CodesKind | None) -> GemvCut:
    bits, group = (16, 0) if codes is None else (codes.encoding.bits, codes.group)
    columns = 32 // bits
    batches = -(-in_features // (columns * (group or _GROUP)))
    rounds = -(-batches // _MOST_WARPS)
    warps = -(-batches // rounds)
    return GemvCut(columns, warps, _MOST_WARPS_OF_PROCESSOR // warps)
