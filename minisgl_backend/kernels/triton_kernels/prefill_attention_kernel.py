"""Chunked prefill over pages: one program per block of a chunk's queries and KV head.

A program finds its chunk on the GPU, by the offsets, so that a launch may be captured.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.page_tiles import (
    LOG2E,
    Pages,
    attend,
    capped,
    dims_of,
    of_heads,
    scores_of,
    shape_of,
    slots_of,
)

_CHUNKS = tl.constexpr(128)  # of an iteration of the search for a program's chunk


@triton.jit
def find_chunk(offsets_ptr, num_chunks, QUERIES: tl.constexpr, TIMES: tl.constexpr = 1):
    """The chunk of a program and its block of queries: (chunk, first token, length, block). A token
    has ``TIMES`` queries."""
    # a chunk's last blocks see the most keys, so they start first
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    # chunk i has the programs from (offsets[i] - offsets[0]) * TIMES // QUERIES + i on, which are
    # enough wherever it begins
    origin = tl.load(offsets_ptr)
    chunk = -1
    for start in tl.range(0, num_chunks, _CHUNKS):
        i = start + tl.arange(0, _CHUNKS)
        offset = tl.load(offsets_ptr + i, mask=i < num_chunks, other=0) - origin
        begun = (i < num_chunks) & (offset * TIMES // QUERIES + i <= program)
        chunk += tl.sum(begun.to(tl.int32), axis=0)
    first_token = tl.load(offsets_ptr + chunk)
    length = tl.load(offsets_ptr + chunk + 1) - first_token
    block = program - ((first_token - origin) * TIMES // QUERIES + chunk)
    return chunk, first_token, length, block


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "rows_ptr",
        "offsets_ptr",
        "ends_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "sinks_ptr",
    ],
)
def _prefill_attention(
    out_ptr,
    q_ptr,
    pages,
    table_ptr,
    rows_ptr,
    offsets_ptr,
    ends_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    num_chunks,
    q_stride,
    table_stride,
    scale_log2,
    cap_log2,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_GROUP: tl.constexpr,  # GROUP as a power of two
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM as a power of two
    QUERIES: tl.constexpr,  # tokens of a block, which has QUERIES * BLOCK_GROUP rows
    BLOCK: tl.constexpr,  # keys of an iteration
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(1)
    chunk, first_token, length, block = find_chunk(offsets_ptr, num_chunks, QUERIES)
    if block * QUERIES >= length:
        return
    end = tl.load(ends_ptr + chunk)
    row = tl.load(rows_ptr + chunk).to(tl.int64)

    m = tl.arange(0, QUERIES * BLOCK_GROUP)
    d = tl.arange(0, DIMS)
    n = tl.arange(0, BLOCK)
    query = block * QUERIES + m // BLOCK_GROUP  # within the chunk
    in_group = m % BLOCK_GROUP
    inside = (query < length) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    token = (first_token + query).to(tl.int64)
    position = end - length + query
    q_at = q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + d[None, :]
    in_tile = of_heads(inside, DIMS, HEAD_DIM)
    q = tl.load(q_at, mask=in_tile, other=0.0)  # [QUERIES * BLOCK_GROUP, DIMS]
    if FP8:
        # one instruction converts two float8 to float16; to bfloat16 it takes several
        q = q.to(tl.float16)
        scale_log2 = scale_log2 * tl.load(k_scale_ptr)
    k_head_ptr = pages.k + kv_head * pages.head_stride + d
    v_head_ptr = pages.v + kv_head * pages.head_stride + d
    page_ptr = table_ptr + row * table_stride

    first_position = end - length + block * QUERIES
    last = tl.minimum(first_position + QUERIES, end)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK * BLOCK
    best = tl.full([QUERIES * BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * BLOCK_GROUP], tl.float32)
    acc = tl.zeros([QUERIES * BLOCK_GROUP, DIMS], tl.float32)
    for start in tl.range(begin, last, BLOCK, num_stages=STAGES):
        at = start + n
        held = at < last
        slots = slots_of(pages, page_ptr, at, held, PAGE_SIZE)
        scores = scores_of(q, k_head_ptr, slots, held, scale_log2, HEAD_DIM)
        scores = capped(scores, cap_log2, CAPPED)
        seen = at[None, :] <= position[:, None]
        if WINDOW:
            seen &= at[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = attend(
            (best, total, acc), scores, v_head_ptr, slots, held, q.dtype, HEAD_DIM, HIDES=True
        )
    if SINKS:
        sinks = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
        total += tl.exp2(sinks - best)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # 0 in padding after a window
    if FP8:
        acc = acc * tl.load(v_scale_ptr)
    out_at = out_ptr + (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_tile)


def launch_prefill_attention(
    out: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    *,
    rows: Tensor,
    offsets: Tensor,
    ends: Tensor,
    max_length: int,
    scale: float,
    cap: float,
    window: int | None,
) -> None:
    """See ``minisgl_backend.kernels.prefill_attention.prefill_attention``."""
    num_tokens, _, head_dim = q.shape
    shape = shape_of(q, kv, window)
    block_group = triton.next_power_of_2(shape["GROUP"])
    # the tile of queries has 128 rows, or 16 if no chunk has more than 4 tokens; wide heads have
    # what fits, which was not measured
    is_wide = head_dim > 256
    queries = max((16 if max_length <= 4 else 32 if is_wide else 128) // block_group, 1)
    grid = (num_tokens // queries + len(rows), shape["NUM_KV_HEADS"])
    _prefill_attention[grid](
        out,
        q,
        Pages.of(kv),
        page_table,
        rows,
        offsets,
        ends,
        kv.k_scale,
        kv.v_scale,
        kv.sinks,
        len(rows),
        q.stride(0),
        page_table.stride(0),
        scale * LOG2E.value,  # exp2 instead of exp
        cap * LOG2E.value,
        **shape,
        BLOCK_GROUP=block_group,
        DIMS=dims_of(head_dim),
        QUERIES=queries,
        BLOCK=32 if is_wide else 64,
        SINKS=kv.sinks is not None,
        CAPPED=cap != 0,
        STAGES=2,
        num_warps=8 if is_wide or queries * block_group >= 128 else 4,
    )
