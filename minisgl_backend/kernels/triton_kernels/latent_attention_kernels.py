"""Attention over paged latents: split decoding, the merge of its splits, and prompt chunks.

A key is a latent of LATENT numbers and behind it a rotated part of ROPE numbers. Tiles of them have
LATENT_COLUMNS and ROPE_COLUMNS columns, powers of two (``dims_of``); columns after the numbers
are 0.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.dispatch import shared_bytes
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.page_tiles import (
    LOG2E,
    Pages,
    dims_of,
    load_slots,
    of_heads,
    slots_of,
)
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.prefill_attention_kernel import find_chunk

_MERGED_COLUMNS = 128  # of a program that merges splits
_LARGE_SHARED_BYTES = 200 * 1024  # of Hopper and Blackwell for data centers


@triton.jit
def _attend(
    softmax,
    q,
    q_rope,
    key_ptr,
    slots,
    held,
    seen,
    scale_log2,
    LATENT: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
):
    """An online softmax after the keys in these ``slots``, which are ``held``: (the best score, the
    sum of weights, the weighted sum of latents). Each query sees at least one position in the first
    block; those it may see are ``seen``."""
    best, total, acc = softmax
    latents = load_slots(key_ptr + tl.arange(0, LATENT_COLUMNS), slots, held, LATENT).to(q.dtype)
    rope = load_slots(key_ptr + LATENT + tl.arange(0, ROPE_COLUMNS), slots, held, ROPE)
    scores = tl.dot(q_rope, tl.trans(rope.to(q.dtype)), input_precision="ieee")
    scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee") * scale_log2
    scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    p = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(q.dtype), latents, acc, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def _sinks_of(sink_at, held):
    """The sinks there, as scores in powers of 2."""
    return tl.load(sink_at, mask=held, other=0.0).to(tl.float32) * LOG2E


@triton.jit
def _splits_of(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """(positions of a split, whole blocks; splits that have any)"""
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    return per_split, tl.cdiv(length, per_split)


@triton.jit(
    do_not_specialize_on_alignment=[
        "table_ptr",
        "lengths_ptr",
        "rows_ptr",
        "scale_ptr",
        "sinks_ptr",
    ]
)
def _latent_decode(
    out_ptr,
    q_ptr,
    pages,
    table_ptr,
    lengths_ptr,
    rows_ptr,
    scale_ptr,
    sinks_ptr,
    outputs_ptr,
    lses_ptr,
    q_stride,
    table_stride,
    scale_log2,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # positions of an iteration
    SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # tiles of heads come first, so that those of a split run together and share the cache
    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    if PDL:
        allow_next()
        wait_previous()
    length = tl.load(lengths_ptr + batch)
    row = tl.load(rows_ptr + batch).to(tl.int64)
    per_split, active = _splits_of(length, SPLITS, BLOCK)
    if split >= active:
        return
    first = split * per_split
    last = tl.minimum(first + per_split, length)

    d = tl.arange(0, LATENT_COLUMNS)
    r = tl.arange(0, ROPE_COLUMNS)
    n = tl.arange(0, BLOCK)
    has_head = heads < NUM_HEADS
    inside = of_heads(has_head, LATENT_COLUMNS, LATENT)
    head_ptr = q_ptr + batch * q_stride + heads[:, None] * (LATENT + ROPE)
    q = tl.load(head_ptr + d[None, :], mask=inside, other=0.0)  # [BLOCK_HEADS, LATENT_COLUMNS]
    in_rope = of_heads(has_head, ROPE_COLUMNS, ROPE)
    q_rope = tl.load(head_ptr + LATENT + r[None, :], mask=in_rope, other=0.0)
    if FP8:
        # one instruction converts two float8 to float16; to bfloat16 it takes several
        q = q.to(tl.float16)
        q_rope = q_rope.to(tl.float16)
        scale_log2 = scale_log2 * tl.load(scale_ptr)
    page_ptr = table_ptr + row * table_stride

    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, LATENT_COLUMNS], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        at = start + n
        held = at < last
        slots = slots_of(pages, page_ptr, at, held, PAGE_SIZE)
        best, total, acc = _attend(
            (best, total, acc),
            q,
            q_rope,
            pages.k,
            slots,
            held,
            held[None, :],
            scale_log2,
            LATENT,
            LATENT_COLUMNS,
            ROPE,
            ROPE_COLUMNS,
        )
    if sinks_ptr is not None:
        sinks = tl.exp2(_sinks_of(sinks_ptr + heads, has_head) - best)
        total += tl.where(active == 1, sinks, 0.0)  # otherwise they are merged with the splits
    acc = acc / total[:, None]
    if FP8:
        acc = acc * tl.load(scale_ptr)
    if active == 1:
        out_at = out_ptr + (batch * NUM_HEADS + heads)[:, None] * LATENT + d[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)
        return
    place = (batch * SPLITS + split) * NUM_HEADS + heads
    tl.store(outputs_ptr + place[:, None] * LATENT + d[None, :], acc, mask=inside)
    tl.store(lses_ptr + place, best + tl.log2(total), mask=has_head)


@triton.jit(do_not_specialize_on_alignment=["lengths_ptr", "sinks_ptr"])
def _merge_splits(
    out_ptr,
    lengths_ptr,
    sinks_ptr,
    outputs_ptr,
    lses_ptr,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS)
    if PDL:
        allow_next()
        wait_previous()
    _, active = _splits_of(tl.load(lengths_ptr + batch), SPLITS, BLOCK)
    if active == 1:
        return
    place = (batch * SPLITS + split) * NUM_HEADS + head
    there = split < active
    lse = tl.load(lses_ptr + place, mask=there, other=float("-inf"))  # [SPLITS]
    best = tl.max(lse)
    weight = tl.exp2(lse - best)
    total = tl.sum(weight)
    if sinks_ptr is not None:
        total += tl.exp2(_sinks_of(sinks_ptr + head, True) - best)
    values = tl.load(  # [SPLITS, COLUMNS]
        outputs_ptr + place[:, None] * LATENT + d[None, :],
        mask=there[:, None] & (d < LATENT)[None, :],
        other=0.0,
    )
    merged = tl.sum(values * weight[:, None], axis=0) / total
    out_at = out_ptr + (batch * NUM_HEADS + head) * LATENT + d
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=d < LATENT)


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "rows_ptr",
        "offsets_ptr",
        "ends_ptr",
        "scale_ptr",
        "sinks_ptr",
    ],
)
def _latent_prefill(
    out_ptr,
    q_ptr,
    pages,
    table_ptr,
    rows_ptr,
    offsets_ptr,
    ends_ptr,
    scale_ptr,
    sinks_ptr,
    num_chunks,
    q_stride,
    table_stride,
    scale_log2,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,  # (token, head) pairs of a program
    BLOCK: tl.constexpr,  # positions of an iteration
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
):
    chunk, first_token, length, block = find_chunk(offsets_ptr, num_chunks, PAIRS, NUM_HEADS)
    if block * PAIRS >= length * NUM_HEADS:
        return
    end = tl.load(ends_ptr + chunk)
    row = tl.load(rows_ptr + chunk).to(tl.int64)

    m = block * PAIRS + tl.arange(0, PAIRS)
    d = tl.arange(0, LATENT_COLUMNS)
    r = tl.arange(0, ROPE_COLUMNS)
    n = tl.arange(0, BLOCK)
    query = m // NUM_HEADS  # within the chunk
    head = m % NUM_HEADS
    is_there = query < length
    token = (first_token + query).to(tl.int64)
    position = end - length + query
    inside = of_heads(is_there, LATENT_COLUMNS, LATENT)
    head_ptr = q_ptr + (token * q_stride + head * (LATENT + ROPE))[:, None]
    q = tl.load(head_ptr + d[None, :], mask=inside, other=0.0)  # [PAIRS, LATENT_COLUMNS]
    in_rope = of_heads(is_there, ROPE_COLUMNS, ROPE)
    q_rope = tl.load(head_ptr + LATENT + r[None, :], mask=in_rope, other=0.0)
    if FP8:
        q = q.to(tl.float16)
        q_rope = q_rope.to(tl.float16)
        scale_log2 = scale_log2 * tl.load(scale_ptr)
    page_ptr = table_ptr + row * table_stride

    # up to the position of the tile's last query
    last = tl.minimum(end - length + (block * PAIRS + PAIRS - 1) // NUM_HEADS + 1, end)
    best = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    acc = tl.zeros([PAIRS, LATENT_COLUMNS], tl.float32)
    for start in tl.range(0, last, BLOCK, num_stages=STAGES):
        at = start + n
        held = at < last
        slots = slots_of(pages, page_ptr, at, held, PAGE_SIZE)
        best, total, acc = _attend(
            (best, total, acc),
            q,
            q_rope,
            pages.k,
            slots,
            held,
            at[None, :] <= position[:, None],
            scale_log2,
            LATENT,
            LATENT_COLUMNS,
            ROPE,
            ROPE_COLUMNS,
        )
    if sinks_ptr is not None:
        total += tl.exp2(_sinks_of(sinks_ptr + head, is_there) - best)
    acc = acc / total[:, None]
    if FP8:
        acc = acc * tl.load(scale_ptr)
    out_at = out_ptr + (token * NUM_HEADS + head)[:, None] * LATENT + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def launch_latent_decode(
    out: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    partial: tuple[Tensor, Tensor],
    *,
    rows: Tensor,
    scale: float,
    block_heads: int,
    splits: int,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.latent_attention.latent_decode_attention``.

    ``partial``: outputs and log-sum-exps of a ``LatentWorkspace``. Block sizes, warps and stages
    were the fastest of several on an H200 in bfloat16, with 16, 20 and 128 heads.
    """
    batch_size, num_heads, _ = q.shape
    shape = _shape_of(q, kv)
    has_room = _has_room(q)
    block = 64 if has_room else 16
    if not has_room or shape["FP8"]:  # conversion of float8 takes registers
        block_heads = 16
    if splits > 1:
        assert batch_size * splits <= len(partial[0])
    _latent_decode[(triton.cdiv(num_heads, block_heads), splits, batch_size)](
        out,
        q,
        Pages.of(kv),
        page_table,
        lengths,
        rows,
        kv.k_scale,
        kv.sinks,
        *partial,
        q.stride(0),
        page_table.stride(0),
        scale * LOG2E.value,  # exp2 instead of exp
        **shape,
        BLOCK_HEADS=block_heads,
        BLOCK=block,
        SPLITS=splits,
        STAGES=2,
        PDL=pdl,
        num_warps=8 if has_room else 4,
        **launch_options(pdl),
    )
    if splits == 1:
        return
    columns = min(_MERGED_COLUMNS, shape["LATENT_COLUMNS"])
    _merge_splits[(batch_size, num_heads, triton.cdiv(shape["LATENT"], columns))](
        out,
        lengths,
        kv.sinks,
        *partial,
        NUM_HEADS=num_heads,
        LATENT=shape["LATENT"],
        COLUMNS=columns,
        BLOCK=block,
        SPLITS=splits,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def launch_latent_prefill(
    out: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    *,
    rows: Tensor,
    offsets: Tensor,
    ends: Tensor,
    scale: float,
) -> None:
    """See ``minisgl_backend.kernels.latent_attention.latent_prefill_attention``."""
    num_tokens, num_heads, _ = q.shape
    has_room = _has_room(q)
    pairs = 64 if has_room else 16
    _latent_prefill[(num_tokens * num_heads // pairs + len(rows),)](
        out,
        q,
        Pages.of(kv),
        page_table,
        rows,
        offsets,
        ends,
        kv.k_scale,
        kv.sinks,
        len(rows),
        q.stride(0),
        page_table.stride(0),
        scale * LOG2E.value,  # exp2 instead of exp
        **_shape_of(q, kv),
        PAIRS=pairs,
        BLOCK=32 if has_room else 16,
        STAGES=3 if has_room else 2,
        num_warps=8 if has_room else 4,
    )


def _has_room(q: Tensor) -> bool:
    """Whether a tile of 64 queries fits into shared memory beside three of 32 latents."""
    return shared_bytes(q.device) >= _LARGE_SHARED_BYTES and q.itemsize <= 2


def _shape_of(q: Tensor, kv: PagedKV) -> dict[str, int]:
    """What the kernels are compiled for. ``q`` [num_tokens, num_heads, LATENT + ROPE]."""
    _, num_heads, key_dim = q.shape
    _, page_size, num_kv_heads, latent_dim = kv.values.shape
    assert num_kv_heads == 1 and kv.keys.data_ptr() == kv.values.data_ptr()
    assert q.stride(1) == key_dim and q.stride(2) == 1
    return {
        "PAGE_SIZE": page_size,
        "NUM_HEADS": num_heads,
        "LATENT": latent_dim,
        "LATENT_COLUMNS": dims_of(latent_dim),
        "ROPE": key_dim - latent_dim,
        "ROPE_COLUMNS": dims_of(key_dim - latent_dim),
        "FP8": kv.k_scale is not None,
    }
