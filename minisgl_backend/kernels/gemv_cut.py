"""How the GEMVs of ``cuda/gemv.cu`` are cut, and which weights they are for.

Pure arithmetic, without a GPU. The constants were tuned on an H200, with the weights of Qwen3-0.6B
and 14B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_backend.kernels.packed_weight import CodesKind

ROWS: Final = 16
"""Of the weight, in a thread block."""

MOST_SQUARES: Final = 1024
"""Tiles of the input's sum of squares."""

_LEAST_OF_CODES: Final = 8 * 2**20
_MOST_OF_PLAIN: Final = 8 * 2**20
"""Elements of a weight in codes of 4 bits, and of a plain one: one row by smaller ones, or larger
ones, is left to ``cuda/linear.cu``."""

_GROUP: Final = 128
_WARPS_OF_CODES: Final = 5
_MOST_WARPS: Final = 8
_MOST_SPLITS: Final = 8
_PROCESSORS: Final = 132
_WARPS_OF_PROCESSOR: Final = 16
_MANY_WARPS: Final = 20
"""Warps of a multiprocessor, with up to 128 and with 96 registers a thread. Each warp has 8 KiB of
the weight on its way."""


@dataclass(frozen=True, slots=True)
class GemvCut:
    """``warps`` of each of ``splits`` thread blocks share out the in_features, in batches of
    ``columns`` groups. Registers are left for ``per_processor`` thread blocks of a multiprocessor.
    """

    columns: int
    warps: int
    per_processor: int
    splits: int = 1


def gemv_cut(
    height: int, in_features: int, codes: CodesKind | None, *, of_heads: bool = False
) -> GemvCut | None:
    """How to multiply one row by a weight [height, in_features], plain if it has no ``codes``; None
    if ``cuda/linear.cu`` is faster. ``of_heads``: of queries, keys and values."""
    elements = height * in_features
    if codes is None:
        takes = elements <= _MOST_OF_PLAIN and not of_heads
    else:
        takes = codes.encoding.bits == 4 and elements > _LEAST_OF_CODES
    return usual_cut(height, in_features, codes, of_heads=of_heads) if takes else None


def usual_cut(
    height: int, in_features: int, codes: CodesKind | None, *, of_heads: bool = False
) -> GemvCut:
    """Codes: a warp may have several batches, one after the other. Plain numbers: each has one, for
    these weights are small, and there is little to multiply."""
    bits, group = (16, 0) if codes is None else (codes.encoding.bits, codes.group)
    columns = 32 // bits
    batches = -(-in_features // (columns * (group or _GROUP)))
    splits = 1
    if codes is None and not of_heads:
        splits = min(-(-batches // _MOST_WARPS), _MOST_SPLITS)
    rounds = -(-batches // (splits * (_MOST_WARPS if codes is None else _WARPS_OF_CODES)))
    warps = -(-batches // (splits * rounds))
    at_once = _WARPS_OF_PROCESSOR // warps
    if rounds == 1 and height // ROWS * splits > at_once * _PROCESSORS:
        at_once = _MANY_WARPS // warps
    return GemvCut(columns, warps, at_once, splits)
