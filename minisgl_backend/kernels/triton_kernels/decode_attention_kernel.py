"""Split-KV decode attention: one program per row, KV head and split; a row's last one merges."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.page_tiles import (
    LOG2E,
    Pages,
    Partials,
    attend,
    capped,
    dims_of,
    of_heads,
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
        "v_scale_ptr",
        "sinks_ptr",
    ]
)
def _decode_attention(
    out_ptr,
    q_ptr,
    pages,
    table_ptr,
    lengths_ptr,
    rows_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    partials,
    q_stride,
    table_stride,
    scale_log2,
    cap_log2,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_GROUP: tl.constexpr,  # GROUP, padded to what a tensor core takes
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM as a power of two
    BLOCK: tl.constexpr,  # positions of an iteration
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        allow_next()
        wait_previous()
    length = tl.load(lengths_ptr + batch)
    row = tl.load(rows_ptr + batch).to(tl.int64)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0)
    # splits of whole blocks; short rows leave the last splits idle
    per_split = tl.cdiv(tl.cdiv(length - begin, SPLITS), BLOCK) * BLOCK
    active = tl.cdiv(length - begin, per_split)
    if split >= active:
        return
    first = begin + split * per_split
    last = tl.minimum(first + per_split, length)

    g = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, DIMS)
    n = tl.arange(0, BLOCK)
    heads = kv_head * GROUP + g
    in_group = g < GROUP
    q_at = q_ptr + batch * q_stride + heads[:, None] * HEAD_DIM + d[None, :]
    inside = of_heads(in_group, DIMS, HEAD_DIM)
    q = tl.load(q_at, mask=inside, other=0.0)  # [BLOCK_GROUP, DIMS]
    if FP8:
        # one instruction converts two float8 to float16; to bfloat16 it takes several
        q = q.to(tl.float16)
        scale_log2 = scale_log2 * tl.load(k_scale_ptr)
    k_head_ptr = pages.k + kv_head * pages.head_stride + d
    v_head_ptr = pages.v + kv_head * pages.head_stride + d
    page_ptr = table_ptr + row * table_stride

    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, DIMS], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        at = start + n
        seen = at < last
        slots = slots_of(pages, page_ptr, at, seen, PAGE_SIZE)
        scores = scores_of(q, k_head_ptr, slots, seen, scale_log2, HEAD_DIM)
        scores = capped(scores, cap_log2, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        best, total, acc = attend(
            (best, total, acc), scores, v_head_ptr, slots, seen, q.dtype, HEAD_DIM, HIDES=False
        )
    lse = best + tl.log2(total)
    if SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=in_group, other=0.0).to(tl.float32) * LOG2E
        if active == 1:
            total += tl.exp2(sinks - best)
    acc = acc / total[:, None]
    if FP8:
        acc = acc * tl.load(v_scale_ptr)

    out_heads = batch * (NUM_KV_HEADS * GROUP) + heads
    out_at = out_ptr + out_heads[:, None] * HEAD_DIM + d[None, :]
    if SPLITS == 1:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)
        return
    if active == 1:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)
        return
    part = out_heads * partials.max_splits + split
    tl.store(partials.outputs + part[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
    tl.store(partials.lses + part, lse, mask=in_group)
    # Every thread's stores come before the barrier, the barrier comes before the release, and the
    # loads below bypass the first-level cache. So the last program sees what all others wrote.
    tl.debug_barrier()
    counter = partials.counters + batch * NUM_KV_HEADS + kv_head
    finished = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if finished != active - 1:
        return
    tl.store(counter, 0)
    tl.debug_barrier()
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, DIMS], tl.float32)
    for other in tl.range(0, active, num_stages=STAGES):
        part = out_heads * partials.max_splits + other
        lse = tl.load(partials.lses + part, mask=in_group, other=0.0, cache_modifier=".cg")
        value = tl.load(
            partials.outputs + part[:, None] * HEAD_DIM + d[None, :],
            mask=inside,
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, lse)
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(lse - new_best)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        best = new_best
    if SINKS:
        total += tl.exp2(sinks - best)
    acc = acc / total[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def launch_decode_attention(
    out: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    partial: tuple[Tensor, Tensor, Tensor],
    *,
    rows: Tensor,
    scale: float,
    cap: float,
    window: int | None,
    splits: int,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.decode_attention.decode_attention``.

    ``partial``: outputs, log-sum-exps and counters of a ``DecodeWorkspace``. Block sizes, warps and
    stages were the fastest, or within 3 % of it, on an H200.
    """
    batch_size, _, head_dim = q.shape
    shape = shape_of(q, kv, window)
    num_kv_heads, fp8 = shape["NUM_KV_HEADS"], shape["FP8"]
    if head_dim > 256:
        block, num_warps, stages = 32, 8, 2  # what fits, not measured
    elif head_dim > 128 and not fp8:
        # many rows hide latency with more programs, few rows with more warps
        block, num_warps, stages = (32, 4, 3) if batch_size * num_kv_heads >= 128 else (64, 8, 3)
    elif splits > 1:
        block, num_warps, stages = 128, 4, 3
    elif fp8:
        # converting keeps warps busy: one warp per program, if there are enough programs
        block, num_warps, stages = 64, 1 if batch_size * num_kv_heads >= 1024 else 2, 2
    elif batch_size * num_kv_heads >= 768:
        block, num_warps, stages = 128, 4, 3
    else:
        block, num_warps, stages = 64, 2, 3
    _decode_attention[(batch_size, num_kv_heads, splits)](
        out,
        q,
        Pages.of(kv),
        page_table,
        lengths,
        rows,
        kv.k_scale,
        kv.v_scale,
        kv.sinks,
        Partials.of(partial),
        q.stride(0),
        page_table.stride(0),
        scale * LOG2E.value,  # exp2 instead of exp
        cap * LOG2E.value,
        **shape,
        BLOCK_GROUP=max(16, triton.next_power_of_2(shape["GROUP"])),
        DIMS=dims_of(head_dim),
        BLOCK=block,
        SPLITS=splits,
        SINKS=kv.sinks is not None,
        CAPPED=cap != 0,
        STAGES=stages,
        PDL=pdl,
        num_warps=num_warps,
        **launch_options(pdl),
    )
