"""How the GEMVs of ``cuda/gemv.cu`` are cut, and which weights they are for.

Pure arithmetic, without a GPU. The constants were tuned on an H200, with the weights of Qwen3-14B
in INT4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_backend.kernels.packed_weight import CodesKind
from minisgl_backend.weight_format import Encoding

ROWS: Final = 16
"""Of the weight, in a thread block."""

MOST_SQUARES: Final = 1024
"""Tiles of the input's sum of squares."""

_LEAST_ELEMENTS: Final = 8 * 2**20
"""Of a weight: one row by a smaller one is left to ``cuda/linear.cu``."""

_GROUP: Final = 128
_MOST_WARPS: Final = 5
_OF_A: Final = 256
"""in_features of an adapter's A that a warp multiplies."""
_PROCESSORS: Final = 132
_WARPS_OF_PROCESSOR: Final = 16
_MANY_WARPS: Final = 20
"""Warps of a multiprocessor, with up to 128 and with 96 registers a thread. Each warp has 8 KiB of
the weight on its way."""


@dataclass(frozen=True, slots=True)
class GemvCut:
    """``warps`` of a thread block share out the in_features, in batches of ``columns`` groups.
    Registers are left for ``per_processor`` thread blocks of a multiprocessor."""

    columns: int
    warps: int
    per_processor: int


def parts_of_a(in_features: int, cut: GemvCut) -> int:
    """Thread blocks that share out the in_features of an adapter's A."""
    return -(-in_features // (cut.warps * _OF_A))


def gemv_cut(height: int, in_features: int, codes: CodesKind) -> GemvCut | None:
    """How to multiply one row by a weight [height, in_features]; None if ``cuda/linear.cu`` is
    faster, as it is with 8 bits."""
    if codes.encoding is not Encoding.INT4 or height * in_features <= _LEAST_ELEMENTS:
        return None
    return usual_cut(height, in_features, codes)


def usual_cut(height: int, in_features: int, codes: CodesKind) -> GemvCut:
    """Of any weight. A warp may have several batches, one after the other. If each has one, and
    there are more thread blocks than run at once, more of them run with fewer registers."""
    columns = 32 // codes.encoding.bits
    batches = -(-in_features // (columns * (codes.group or _GROUP)))
    rounds = -(-batches // _MOST_WARPS)
    warps = -(-batches // rounds)
    at_once = _WARPS_OF_PROCESSOR // warps
    if rounds == 1 and height // ROWS > at_once * _PROCESSORS:
        at_once = _MANY_WARPS // warps
    return GemvCut(columns, warps, at_once)
