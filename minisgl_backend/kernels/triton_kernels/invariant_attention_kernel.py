"""Attention over pages whose result for a query depends only on that query's row.

One kernel attends prompt chunks and decoding rows. From position 0 on, the positions of a row are
cut into splits of a fixed size, and each split into blocks. A query goes over the blocks of a split
with an online softmax, and its splits are merged in order, by their log-sum-exp. Neither depends on
the chunk's length, the number of rows, or how many programs share a row's splits. Blocks that a
query does not see do not change a bit: they add zeros and multiply by one.

Sums with a product are written as ``tl.fma``, since a compiler might otherwise round them in two
different ways.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.page_tiles import (
    LOG2E,
    Pages,
    Partials,
    load_slots,
    shape_of,
    slots_of,
)
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.prefill_attention_kernel import find_chunk


@triton.jit
def _attend_split(
    q,
    position,
    pages,
    k_head_ptr,
    v_head_ptr,
    page_ptr,
    begin,
    end,
    scale_log2,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Values [TILE, HEAD_DIM] and log-sum-exps [TILE] over the positions [begin, end) of a split.
    The latter are -inf for a query that sees none of them."""
    n = tl.arange(0, BLOCK)
    best = tl.full([TILE], float("-inf"), tl.float32)
    # the tensor cores add up the weights, in the order of positions: the order of a plain sum would
    # depend on how the tile is spread over the warps
    ones = tl.full([BLOCK, 16], 1.0, q.dtype)
    totals = tl.zeros([TILE, 16], tl.float32)  # of equal columns
    acc = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        at = start + n
        held = at < end
        slots = slots_of(pages, page_ptr, at, held, PAGE_SIZE)
        k = load_slots(k_head_ptr, slots, held, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)))  # [TILE, BLOCK]
        seen = at[None, :] <= position[:, None]
        if WINDOW:
            seen &= at[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - base)
        p = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
        p = p.to(q.dtype)
        totals = tl.dot(p, ones, totals * shrink[:, None])
        v = load_slots(v_head_ptr, slots, held, HEAD_DIM)
        acc = tl.dot(p, v.to(q.dtype), acc * shrink[:, None])
        best = new_best
    total = tl.max(totals, axis=1)
    total = tl.where(total == 0, 1.0, total)
    return acc / total[:, None], best + tl.log2(total)


@triton.jit
def _merged(best, total, acc, lse, value):
    """The result of earlier splits, merged with one more."""
    new_best = tl.maximum(best, lse)
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.exp2(best - base)
    weight = tl.exp2(lse - base)
    acc = tl.fma(acc, shrink[:, None], value * weight[:, None])
    return new_best, tl.fma(total, shrink, weight), acc


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "rows_ptr",
        "offsets_ptr",
        "ends_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def _invariant_attention(
    out_ptr,
    q_ptr,
    pages,
    table_ptr,
    rows_ptr,
    offsets_ptr,
    ends_ptr,
    k_scale_ptr,
    v_scale_ptr,
    partials,
    num_chunks,
    q_stride,
    table_stride,
    scale_log2,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_GROUP: tl.constexpr,  # GROUP as a power of two
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile of queries, BLOCK_GROUP for each token
    BLOCK: tl.constexpr,  # keys of an iteration
    SPLIT: tl.constexpr,  # positions of a split
    PROGRAMS: tl.constexpr,  # that share the splits of a tile; more than one only for DECODE
    DECODE: tl.constexpr,  # chunk i is token i
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(1)
    QUERIES: tl.constexpr = TILE // BLOCK_GROUP
    if PDL:
        allow_next()
        wait_previous()
    if DECODE:
        chunk = tl.program_id(0)
        first_token = chunk
        length = 1
        block = 0
    else:
        chunk, first_token, length, block = find_chunk(offsets_ptr, num_chunks, QUERIES)
        if block * QUERIES >= length:
            return
    end = tl.load(ends_ptr + chunk)
    row = tl.load(rows_ptr + chunk).to(tl.int64)
    first_position = end - length + block * QUERIES
    last = tl.minimum(first_position + QUERIES, end)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK * BLOCK
    first_split = begin // SPLIT
    num_splits = tl.cdiv(last, SPLIT) - first_split
    program = tl.program_id(2)
    if PROGRAMS > 1:  # noqa: SIM102  (known when compiled)
        if program >= num_splits:
            return

    m = tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    query = block * QUERIES + m // BLOCK_GROUP  # within the chunk
    in_group = m % BLOCK_GROUP
    inside = (query < length) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    token = (first_token + query).to(tl.int64)
    position = end - length + query
    q_at = q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(q_at, mask=inside[:, None], other=0.0)  # [TILE, HEAD_DIM]
    if FP8:
        # one instruction converts two float8 to float16; to bfloat16 it takes several
        q = q.to(tl.float16)
        scale_log2 = scale_log2 * tl.load(k_scale_ptr)
    k_head_ptr = pages.k + kv_head * pages.head_stride + d
    v_head_ptr = pages.v + kv_head * pages.head_stride + d
    page_ptr = table_ptr + row * table_stride
    out_heads = token * (NUM_KV_HEADS * GROUP) + head
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for split in tl.range(program, num_splits, PROGRAMS):
        split_begin = (first_split + split) * SPLIT
        value, lse = _attend_split(
            q,
            position,
            pages,
            k_head_ptr,
            v_head_ptr,
            page_ptr,
            tl.maximum(split_begin, begin),
            tl.minimum(split_begin + SPLIT, last),
            scale_log2,
            PAGE_SIZE,
            HEAD_DIM,
            TILE,
            BLOCK,
            WINDOW,
            STAGES,
        )
        if PROGRAMS == 1:  # noqa: SIM114  (known when compiled)
            best, total, acc = _merged(best, total, acc, lse, value)
        elif num_splits == 1:
            best, total, acc = _merged(best, total, acc, lse, value)
        else:
            part = out_heads * partials.max_splits + split
            part_at = partials.outputs + part[:, None] * HEAD_DIM + d[None, :]
            tl.store(part_at, value, mask=inside[:, None])
            tl.store(partials.lses + part, lse, mask=inside)
    if PROGRAMS > 1:  # noqa: SIM102  (known when compiled)
        if num_splits > 1:
            # Every thread's stores come before the barrier, the barrier comes before the release,
            # and the loads below bypass the first-level cache. So the last program sees what all
            # others wrote.
            tl.debug_barrier()
            counter = partials.counters + chunk * NUM_KV_HEADS + kv_head
            finished = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if finished != tl.minimum(num_splits, PROGRAMS) - 1:
                return
            tl.store(counter, 0)
            tl.debug_barrier()
            for split in tl.range(0, num_splits):
                part = out_heads * partials.max_splits + split
                part_at = partials.outputs + part[:, None] * HEAD_DIM + d[None, :]
                value = tl.load(part_at, mask=inside[:, None], other=0.0, cache_modifier=".cg")
                lse = tl.load(partials.lses + part, mask=inside, other=0.0, cache_modifier=".cg")
                best, total, acc = _merged(best, total, acc, lse, value)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # 0 in padding after a window
    if FP8:
        acc = acc * tl.load(v_scale_ptr)
    out_at = out_ptr + out_heads[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def launch_invariant_attention(
    out: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    partial: tuple[Tensor, Tensor, Tensor] | None,
    *,
    rows: Tensor,
    offsets: Tensor | None,
    ends: Tensor,
    scale: float,
    window: int | None,
    tile: int,
    block: int,
    split: int,
    programs: int,
    stages: int,
    num_warps: int,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.invariant_attention``; ``offsets`` None for decoding rows."""
    shape = shape_of(q, kv, window)
    block_group = triton.next_power_of_2(shape["GROUP"])
    tile = max(tile, block_group)
    tiles = len(rows) if offsets is None else len(q) // (tile // block_group) + len(rows)
    _invariant_attention[(tiles, shape["NUM_KV_HEADS"], programs)](
        out,
        q,
        Pages.of(kv),
        page_table,
        rows,
        offsets,
        ends,
        kv.k_scale,
        kv.v_scale,
        Partials.of(partial),
        len(rows),
        q.stride(0),
        page_table.stride(0),
        scale * LOG2E.value,  # exp2 instead of exp
        **shape,
        BLOCK_GROUP=block_group,
        TILE=tile,
        BLOCK=block,
        SPLIT=split,
        PROGRAMS=programs,
        DECODE=offsets is None,
        STAGES=stages,
        PDL=pdl,
        num_warps=num_warps,
        **launch_options(pdl),
    )
