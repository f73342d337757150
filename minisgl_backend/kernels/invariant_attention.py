"""Attention over pages that gives a token the same bits in any batch.

A token may be part of a prompt's chunk, however the prompt was cut, or a decoding row beside any
others. Here both take the same kernel, whose order of additions depends only on the token's
position: from the first position on, there are splits of ``split_size`` positions, each with an
online softmax over blocks of keys, and the splits are merged one after another. How the splits are
shared among programs changes when they are computed, but not what is added to what.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from minisgl_backend.kernels.decode_attention import (
    MAX_SPLITS,
    DecodeWorkspace,
    decode_attention_reference,
)
from minisgl_backend.kernels.dispatch import num_processors, use_triton
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.prefill_attention import prefill_attention_reference

_LEAST_SPLIT: Final = 512
_BLOCK: Final = 128


def split_size(max_length: int) -> int:
    """Positions per split if no row is longer than ``max_length``; the workspace holds
    ``MAX_SPLITS`` splits of a row."""
    size = _LEAST_SPLIT
    while size * MAX_SPLITS < max_length:
        size *= 2
    return size


def invariant_prefill_attention(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    *,
    rows: Tensor,
    offsets: Tensor,
    ends: Tensor,
    split: int,
    scale: float,
    window: int | None = None,
    out: Tensor,
) -> None:
    """``kernels.prefill_attention.prefill_attention``, with the same bits that
    ``invariant_decode_attention`` gives each position. A split has ``split`` positions."""
    if not use_triton(q):
        prefill_attention_reference(
            out,
            q,
            kv,
            page_table,
            rows=rows,
            offsets=offsets,
            ends=ends,
            scale=scale,
            window=window,
        )
        return
    from minisgl_backend.kernels.triton_kernels.invariant_attention_kernel import (
        launch_invariant_attention,
    )

    # Small and large tiles take different tensor core instructions, and for small tiles Triton puts
    # float8 products in another order. So with fp8 pages chunks have small tiles, like decoding
    # rows.
    is_fp8 = kv.k_scale is not None
    launch_invariant_attention(
        out,
        q,
        kv,
        page_table,
        None,
        rows=rows,
        offsets=offsets,
        ends=ends,
        scale=scale,
        window=window,
        tile=32 if is_fp8 else 128,
        block=_BLOCK,
        split=split,
        programs=1,
        stages=2,
        num_warps=4 if is_fp8 else 8,
        pdl=False,
    )


def invariant_decode_attention(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    workspace: DecodeWorkspace,
    *,
    rows: Tensor,
    split: int,
    scale: float,
    window: int | None = None,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """``kernels.decode_attention.decode_attention`` for rows of at most ``MAX_SPLITS`` splits, with
    bits that depend only on the row. A split has ``split`` positions."""
    if not use_triton(q):
        attended = decode_attention_reference(
            q, kv, page_table, lengths, rows=rows, scale=scale, window=window
        )
        out.copy_(attended)
        return
    from minisgl_backend.kernels.triton_kernels.invariant_attention_kernel import (
        launch_invariant_attention,
    )

    launch_invariant_attention(
        out,
        q,
        kv,
        page_table,
        (workspace.outputs, workspace.lses, workspace.counters),
        rows=rows,
        offsets=None,
        ends=lengths,
        scale=scale,
        window=window,
        tile=16,
        block=_BLOCK,
        split=split,
        programs=_num_programs(len(q) * kv.keys.shape[2], num_processors(q.device)),
        stages=3,
        num_warps=4,
        pdl=pdl,
    )


def _num_programs(tiles: int, processors: int) -> int:
    """How many programs share the splits of a row and KV head, a power of two."""
    programs = 1
    while programs < MAX_SPLITS and 2 * programs * tiles <= 8 * processors:
        programs *= 2
    return programs
