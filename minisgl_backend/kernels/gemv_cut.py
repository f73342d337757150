"""How the GEMVs of ``cuda/gemv.cu`` and ``cuda/expert_gemv.cu`` are cut, and which weights they are
for.

Pure arithmetic, without a GPU. The constants were tuned on an H200 with the weights of Qwen3-14B in
INT4. Those for plain weights were tuned with the output projections of attention of Qwen3-30B-A3B,
and those for experts with gpt-oss-20b in MXFP4 and Qwen3-30B-A3B in float8 and bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_backend.kernels.packed_weight import CodesKind
from minisgl_backend.weight_format import Encoding, WeightFormat

ROWS: Final = 16
"""Rows of the weight per thread block."""

MOST_SQUARES: Final = 1024
"""The most tiles of the input's sum of squares."""

_LEAST_ELEMENTS: Final = 8 * 2**20
"""The fewest elements of a weight; one row times a smaller one is left to ``cuda/linear.cu``."""

_MOST_OF_PLAIN: Final = 16 * 2**20
"""The most elements of a plain weight, about as many as those measured have."""

_LEAST_BUSY: Final = 0.9
"""The least share of the GPU's thread blocks that a plain weight occupies: the last ones to start
may be few. At 0.68 and 0.61 ``cuda/linear.cu`` is faster, at 0.97 slower."""

_GROUP: Final = 128
_COPIED: Final = 8
"""Plain in_features that a lane copies at once."""

_PLAIN_COLUMNS: Final = 2
_MOST_WARPS: Final = 5
_OF_A: Final = 256
"""in_features of an adapter's A that a warp multiplies."""
_PROCESSORS: Final = 132
_WARPS_OF_PROCESSOR: Final = 16
_MANY_WARPS: Final = 20
"""Warps per multiprocessor, with up to 128 and with 96 registers per thread. Each warp has 8 KiB of
the weight under way."""

_MOST_CHOICES: Final = 16
"""The most choices of several tokens by weights in codes: an expert's weight is read again for each
choice. Measured with the 32 experts of gpt-oss-20b."""

_MOST_TOKENS: Final = 4
"""The most tokens by plain weights."""

_COLUMNS_OF_EXPERTS: Final = 4
_COLUMNS_OF_PLAIN_EXPERTS: Final = 2
_MOST_WARPS_OF_EXPERTS: Final = 16
_WARPS_OF_LONG_ROWS: Final = 8
"""Warps of a thread block if one batch each would take too many."""
_EXPERT_WARPS_OF_PROCESSOR: Final = {
    Encoding.E2M1: 36,
    Encoding.INT4: 36,
    Encoding.E4M3: 24,
    None: 24,
}
"""Warps per multiprocessor: with 4 bits 56 registers per thread, and up to 4 KiB of the weight
under way per warp; otherwise 80 registers, and up to 8 KiB. With 48 warps and 40 registers, some
registers are spilled, which is slower."""
_MOST_BLOCKS_OF_PROCESSOR: Final = 32


@dataclass(frozen=True, slots=True)
class GemvCut:
    """The ``warps`` of a thread block share the in_features, in batches of ``columns`` groups. A
    multiprocessor has registers for ``per_processor`` thread blocks."""

    columns: int
    warps: int
    per_processor: int


def parts_of_a(in_features: int, cut: GemvCut) -> int:
    """The number of thread blocks that share the in_features of an adapter's A."""
    return -(-in_features // (cut.warps * _OF_A))


def gemv_cut(
    height: int, in_features: int, codes: CodesKind | None, *, is_added: bool
) -> GemvCut | None:
    """How to multiply one row by a weight [height, in_features], which is plain if it has no
    ``codes``. None if ``cuda/linear.cu`` is faster, as it is with 8 bits, and with 16 bits unless
    the product ``is_added`` to the residual stream and occupies most of the GPU."""
    elements = height * in_features
    if codes is None:
        fits = height % ROWS == 0 and in_features % _GROUP == 0
        if not (is_added and fits and _LEAST_ELEMENTS <= elements <= _MOST_OF_PLAIN):
            return None
        cut = plain_cut(in_features)
        at_once, blocks = cut.per_processor * _PROCESSORS, height // ROWS
        return cut if blocks / (-(-blocks // at_once) * at_once) >= _LEAST_BUSY else None
    if codes.encoding is not Encoding.INT4 or elements <= _LEAST_ELEMENTS:
        return None
    return usual_cut(height, in_features, codes)


def plain_cut(in_features: int) -> GemvCut:
    """The cut for a weight without codes. If a multiprocessor has warps for all batches of a row,
    the whole row is under way at once."""
    batches = -(-in_features // (_PLAIN_COLUMNS * _GROUP))
    rounds = -(-batches // _WARPS_OF_PROCESSOR)
    warps = -(-batches // rounds)
    return GemvCut(_PLAIN_COLUMNS, warps, _WARPS_OF_PROCESSOR // warps)


def usual_cut(height: int, in_features: int, codes: CodesKind) -> GemvCut:
    """The cut for any weight in codes. A warp may have several batches, one after another. If each
    warp has one batch, and there are more thread blocks than run at once, more of them run, with
    fewer registers each.
    """
    columns = 32 // codes.encoding.bits
    group = _GROUP if codes.encoding is Encoding.E2M1 else codes.group or _GROUP
    batches = -(-in_features // (columns * group))
    rounds = -(-batches // _MOST_WARPS)
    warps = -(-batches // rounds)
    at_once = _WARPS_OF_PROCESSOR // warps
    if rounds == 1 and height // ROWS > at_once * _PROCESSORS:
        at_once = _MANY_WARPS // warps
    return GemvCut(columns, warps, at_once)


def expert_gemv_cut(in_features: int, codes: CodesKind | None) -> GemvCut | None:
    """How to multiply a few tokens by the weights of the experts that they have chosen, which are
    plain if they have no ``codes``; None if ``cuda/experts.cu`` has to."""
    if codes is None:
        columns, fits = _COLUMNS_OF_PLAIN_EXPERTS, in_features % _COPIED == 0
    else:
        whole_rows = codes.group == 0 and codes.encoding is Encoding.E4M3
        fits = whole_rows or codes.group == _GROUP or codes.encoding is Encoding.E2M1
        columns = _COLUMNS_OF_EXPERTS
    warps_at_once = _EXPERT_WARPS_OF_PROCESSOR.get(None if codes is None else codes.encoding)
    if warps_at_once is None or not fits:
        return None
    cut = one_batch_cut(in_features, columns, warps_at_once)
    if cut.warps <= _MOST_WARPS_OF_EXPERTS:
        return cut
    warps = _WARPS_OF_LONG_ROWS
    return None if codes else GemvCut(columns, warps, warps_at_once // warps)


def are_few(num_tokens: int, num_choices: int, encoding: Encoding | None) -> bool:
    """Whether ``cuda/expert_gemv.cu`` is the fastest for ``num_tokens``, which have ``num_choices``
    together, not counting an expert that all of them take. The weights are in ``encoding``; None
    stands for plain ones."""
    if encoding is None:
        return num_tokens <= _MOST_TOKENS
    return num_tokens == 1 or num_choices <= _MOST_CHOICES


def takes_experts(form: WeightFormat) -> bool:
    """Whether weights in this format have an ``expert_gemv_cut``, as far as that is up to the
    format."""
    columns = form.block[1]
    if form.encoding is Encoding.E4M3:
        return columns in (None, _GROUP)
    return form.encoding is Encoding.E2M1 or (form.encoding is Encoding.INT4 and columns == _GROUP)


def one_batch_cut(in_features: int, most_columns: int, warps_at_once: int) -> GemvCut:
    """The cut with which each warp has one batch, of up to ``most_columns`` groups, and a
    multiprocessor has ``warps_at_once``.

    All of a batch is under way at once. Few columns make many warps: some multiply while others
    wait, and little is left to do once the last codes are there.
    """
    groups = -(-in_features // _GROUP)
    warps = -(-groups // most_columns)
    at_once = min(warps_at_once // warps, _MOST_BLOCKS_OF_PROCESSOR)
    return GemvCut(-(-groups // warps), warps, at_once)


def expert_codes_bytes(cut: GemvCut, codes: CodesKind | None) -> int:
    """The shared memory that the codes of a thread block of ``cuda/expert_gemv.cu`` take."""
    bits = 16 if codes is None else codes.encoding.bits
    return ROWS * cut.warps * cut.columns * _GROUP * bits // 8
