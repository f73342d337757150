"""Attention of tiles of decoding rows over the pages that they share; a program takes several
pieces.

A tile's query heads of one KV head are the rows of one matrix, so each key is read once for all of
them. ``kernels.shared_attention`` says how pieces are laid out in ``tables``.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.page_tiles import (
    LOG2E,
    Pages,
    attend,
    scores_of,
    shape_of,
    slots_of,
)
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit(
    do_not_specialize_on_alignment=[
        "table_ptr",
        "lengths_ptr",
        "rows_ptr",
        "k_scale_ptr",
    ]
)
def _shared_attention(
    values_ptr,
    sums_ptr,
    q_ptr,
    pages,
    table_ptr,
    lengths_ptr,
    groups_ptr,
    rows_ptr,
    k_scale_ptr,
    q_stride,
    table_stride,
    scale_log2,
    MEMBERS_AT: tl.constexpr,
    PIECES_AT: tl.constexpr,
    PIECE_WORDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,  # query heads of a tile, of TILE // GROUP rows
    BLOCK: tl.constexpr,  # positions of an iteration
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_previous()
        allow_next()
    num_items = tl.load(groups_ptr) * NUM_KV_HEADS
    m = tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK)
    member = m // GROUP
    head_of_group = m % GROUP
    if FP8:
        scale_log2 = scale_log2 * tl.load(k_scale_ptr)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        piece_ptr = groups_ptr + PIECES_AT + item // NUM_KV_HEADS * PIECE_WORDS
        first = tl.load(piece_ptr)
        inside = member < tl.load(piece_ptr + 1)
        row = tl.load(rows_ptr + tl.load(piece_ptr + 2)).to(tl.int64)
        begin = tl.load(piece_ptr + 3)
        end = tl.load(piece_ptr + 4)
        partial = tl.load(piece_ptr + 5)
        query = tl.load(groups_ptr + MEMBERS_AT + first + member, mask=inside, other=0)
        head = kv_head * GROUP + head_of_group
        q_at = q_ptr + (query.to(tl.int64) * q_stride + head * HEAD_DIM)[:, None] + d[None, :]
        q = tl.load(q_at, mask=inside[:, None], other=0.0)  # [TILE, HEAD_DIM]
        if FP8:
            # one instruction converts two float8 to float16; to bfloat16 it takes several
            q = q.to(tl.float16)
        start = begin
        first_seen = tl.zeros([TILE], tl.int32)
        if WINDOW:
            length = tl.load(lengths_ptr + query, mask=inside, other=2147483647)
            first_seen = length - WINDOW
            # where the row that sees the earliest positions starts
            start = tl.minimum(tl.maximum(tl.min(first_seen, axis=0), begin), end)
        k_head_ptr = pages.k + kv_head * pages.head_stride + d
        v_head_ptr = pages.v + kv_head * pages.head_stride + d
        page_ptr = table_ptr + row * table_stride

        best = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, HEAD_DIM], tl.float32)
        for position in tl.range(start, end, BLOCK, num_stages=STAGES):
            at = position + n
            held = at < end
            slots = slots_of(pages, page_ptr, at, held, PAGE_SIZE)
            scores = scores_of(q, k_head_ptr, slots, held, scale_log2, HEAD_DIM)
            seen = held[None, :]
            if WINDOW:
                seen = seen & (at[None, :] >= first_seen[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            best, total, acc = attend(
                (best, total, acc),
                scores,
                v_head_ptr,
                slots,
                held,
                q.dtype,
                HEAD_DIM,
                HIDES=WINDOW > 0,
            )

        out = (partial + member).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        out_at = values_ptr + out[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_at, acc, mask=inside[:, None])
        tl.store(sums_ptr + 2 * out, best, mask=inside)
        tl.store(sums_ptr + 2 * out + 1, total, mask=inside)


def launch_shared_attention(
    values: Tensor,
    sums: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    tables: Tensor,
    *,
    rows: Tensor,
    members_at: int,
    pieces_at: int,
    piece_words: int,
    tile: int,
    block: int,
    num_warps: int,
    stages: int,
    num_programs: int,
    scale: float,
    window: int | None,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.shared_attention.SharedAttention``."""
    _shared_attention[(num_programs,)](
        values,
        sums,
        q,
        Pages.of(kv),
        page_table,
        lengths,
        tables,
        rows,
        kv.k_scale,
        q.stride(0),
        page_table.stride(0),
        scale * LOG2E.value,  # exp2 instead of exp
        MEMBERS_AT=members_at,
        PIECES_AT=pieces_at,
        PIECE_WORDS=piece_words,
        **shape_of(q, kv, window),
        TILE=tile,
        BLOCK=block,
        STAGES=stages,
        PDL=pdl,
        num_warps=num_warps,
        **launch_options(pdl),
    )
