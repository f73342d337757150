"""The indexer's store of index keys, and the scores that it computes with them.

A key has DIM numbers, and tiles of keys have DIMS columns, a power of two (``dims_of``); columns
after the numbers are 0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.dispatch import num_processors, shared_bytes
from minisgl_backend.kernels.triton_kernels.page_tiles import (
    dims_of,
    load_slots,
    of_heads,
    slots_of,
)
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_GROUP = 8  # heads of a program that rotates
_RESIDENT = 3  # programs of few tokens that fit on a multiprocessor
_WAVES = 8  # programs of many tokens for each multiprocessor: lengths differ
_LARGE_SHARED_BYTES = 200 * 1024  # of Hopper and Blackwell for data centers


class _KeyPages(NamedTuple):
    """Index keys of a layer, and the strides from one page or slot to the next."""

    keys: Tensor
    page_stride: int
    slot_stride: int

    @classmethod
    def of(cls, index_keys: Tensor) -> "_KeyPages":
        assert index_keys.stride(2) == 1
        return cls(index_keys, *index_keys.stride()[:2])


@triton.jit
def _rotated(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _normed(x, at, mask, weight_ptr, bias_ptr):
    """Numbers ``at`` of a LayerNorm, of which ``x`` are those before weight and bias."""
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x * weight + bias


@triton.jit
def _store_part(to, x, mask, FP8: tl.constexpr):
    if FP8:
        x = tl.clamp(x, -448.0, 448.0)
    tl.store(to, x.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _store_index(
    q_ptr,
    k_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    weight_ptr,
    bias_ptr,
    pages,
    k_stride,
    eps,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,  # dimension that rotates
    TURNED: tl.constexpr,  # half of the dimensions that rotate
    PAIRS: tl.constexpr,  # TURNED as a power of two
    COLUMNS: tl.constexpr,  # the number of dimensions that do not rotate as a power of two
    GROUP: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, PAIRS)
    turns = i < TURNED
    # the dimensions ``low`` and ``high`` rotate together: neighbours, or those of the two halves
    step: tl.constexpr = 2 if INTERLEAVED else 1
    gap: tl.constexpr = 1 if INTERLEAVED else TURNED
    low_at = FIRST + step * i  # [PAIRS]
    if PDL:
        # scores may be computed of older positions while this kernel runs, so all kernels before
        # this one must have ended
        wait_previous()
        allow_next()
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * TURNED)
    cos = tl.load(row_ptr + i, mask=turns, other=1.0)
    sin = tl.load(row_ptr + TURNED + i, mask=turns, other=0.0)
    if part > 0:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)
        inside = (head < NUM_HEADS)[:, None] & turns[None, :]  # [GROUP, PAIRS]
        q_at = q_ptr + token * NUM_HEADS * DIM + head[:, None] * DIM + low_at[None, :]
        low = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(q_at + gap, mask=inside, other=0.0).to(tl.float32)
        low, high = _rotated(low, high, cos[None, :], sin[None, :])
        tl.store(q_at, low.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(q_at + gap, high.to(q_ptr.dtype.element_ty), mask=inside)
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    rest_first: tl.constexpr = 2 * TURNED if FIRST == 0 else 0
    rest_at = rest_first + tl.arange(0, COLUMNS)
    stays = rest_at < rest_first + DIM - 2 * TURNED
    key_ptr = k_ptr + token * k_stride
    low = tl.load(key_ptr + low_at, mask=turns, other=0.0).to(tl.float32)
    high = tl.load(key_ptr + low_at + gap, mask=turns, other=0.0).to(tl.float32)
    rest = tl.load(key_ptr + rest_at, mask=stays, other=0.0).to(tl.float32)
    mean = (tl.sum(low + high) + tl.sum(rest)) / DIM
    low = tl.where(turns, low - mean, 0.0)
    high = tl.where(turns, high - mean, 0.0)
    rest = tl.where(stays, rest - mean, 0.0)
    inverse = tl.rsqrt((tl.sum(low * low + high * high) + tl.sum(rest * rest)) / DIM + eps)
    low = _normed(low * inverse, low_at, turns, weight_ptr, bias_ptr)
    high = _normed(high * inverse, low_at + gap, turns, weight_ptr, bias_ptr)
    rest = _normed(rest * inverse, rest_at, stays, weight_ptr, bias_ptr)
    low, high = _rotated(low, high, cos, sin)
    to = pages.keys + slot // PAGE_SIZE * pages.page_stride + slot % PAGE_SIZE * pages.slot_stride
    _store_part(to + low_at, low, turns, FP8)
    _store_part(to + low_at + gap, high, turns, FP8)
    _store_part(to + rest_at, rest, stays, FP8)


@triton.jit(
    do_not_specialize=["num_tokens", "out_stride"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "lengths_ptr"],
)
def _index_scores(
    out_ptr,
    q_ptr,
    weights_ptr,
    pages,
    table_ptr,
    rows_ptr,
    lengths_ptr,
    num_tokens,
    out_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # NUM_HEADS as a power of two
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # positions of an iteration
    LEAST: tl.constexpr,  # tokens that see no more are left out
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Positions are the rows of a tile and heads its columns, so that a thread has most of the
    # summands of a score. Tokens of one row of the page table, as those of a chunk, share its keys.
    begin = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(1) * TOKENS
    t = tl.arange(0, TOKENS)
    if PDL:
        allow_next()
        wait_previous()
    row = tl.load(rows_ptr + first + t, mask=first + t < num_tokens, other=-1)
    length = tl.load(lengths_ptr + first + t, mask=first + t < num_tokens, other=0)
    length = tl.where(length > LEAST, length, 0)
    if begin >= tl.max(length, axis=0):
        return

    c = tl.arange(0, TOKENS * HEADS)
    token = (first + c // HEADS).to(tl.int64)
    head = c % HEADS
    is_there = (head < NUM_HEADS) & (token < num_tokens)
    of_head = token * NUM_HEADS + head
    # [TOKENS * HEADS]
    weight = tl.load(weights_ptr + of_head, mask=is_there, other=0.0).to(tl.float32)
    q = tl.load(  # [TOKENS * HEADS, DIMS]
        q_ptr + of_head[:, None] * DIM + tl.arange(0, DIMS)[None, :],
        mask=of_heads(is_there, DIMS, DIM),
        other=0.0,
    )
    if FP8 and q.dtype == tl.bfloat16:
        # one instruction converts two float8 to float16; to bfloat16 it takes several
        q = q.to(tl.float16)
    q = tl.trans(q)

    n = tl.arange(0, BLOCK)
    out_at = out_ptr + (first + t).to(tl.int64)[None, :] * out_stride + n[:, None]
    for leader in range(TOKENS):
        own = tl.sum(tl.where(t == leader, row, 0), axis=0)
        is_done = tl.max(((t < leader) & (row == own)).to(tl.int32), axis=0) > 0
        seen = tl.where((row == own) & (is_done == 0), length, 0)  # [TOKENS]
        last = tl.max(seen, axis=0)
        page_ptr = table_ptr + own.to(tl.int64) * table_stride
        for start in tl.range(begin, last, step, num_stages=STAGES):
            at = start + n
            held = at < last
            slots = slots_of(pages, page_ptr, at, held, PAGE_SIZE)
            k = load_slots(pages.keys + tl.arange(0, DIMS), slots, held, DIM)  # [BLOCK, DIMS]
            products = tl.dot(k.to(q.dtype), q, input_precision="ieee")
            products = tl.maximum(products, 0.0) * weight[None, :]
            scores = tl.sum(tl.reshape(products, [BLOCK, TOKENS, HEADS]), axis=2)
            tl.store(out_at + start, scores, mask=at[:, None] < seen[None, :])


def launch_rope_store_index(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    index_keys: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    interleaved: bool,
    rotates_last: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.indexer.rope_store_index``."""
    num_tokens, num_heads, key_dim = q.shape
    if num_tokens == 0:
        return
    rotary_dim = cos_sin.shape[1]
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert q.is_contiguous() and k.stride(1) == 1
    assert rotary_dim <= key_dim == k.shape[1] == index_keys.shape[2]
    _store_index[(num_tokens, 1 + triton.cdiv(num_heads, _GROUP))](
        q,
        k,
        positions,
        slots,
        cos_sin,
        norm_weight,
        norm_bias,
        _KeyPages.of(index_keys),
        k.stride(0),
        eps,
        PAGE_SIZE=index_keys.shape[1],
        NUM_HEADS=num_heads,
        DIM=key_dim,
        FIRST=key_dim - rotary_dim if rotates_last else 0,
        TURNED=rotary_dim // 2,
        PAIRS=triton.next_power_of_2(rotary_dim // 2),
        COLUMNS=triton.next_power_of_2(max(key_dim - rotary_dim, 1)),
        GROUP=_GROUP,
        INTERLEAVED=interleaved,
        FP8=index_keys.dtype == torch.float8_e4m3fn,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )


def launch_index_scores(
    out: Tensor,
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    top_k: int,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.indexer.index_scores``; ``out`` [num_tokens, width]."""
    num_tokens, num_heads, key_dim = q.shape
    if num_tokens == 0:
        return
    assert q.is_contiguous() and weights.is_contiguous() and out.stride(1) == 1
    assert key_dim == index_keys.shape[2]
    is_fp8 = index_keys.dtype == torch.float8_e4m3fn
    processors = num_processors(q.device)
    heads = max(16, triton.next_power_of_2(num_heads))
    has_room = shared_bytes(q.device) >= _LARGE_SHARED_BYTES and q.itemsize <= 2
    # Few tokens are bound by memory. Many would be bound by the L2 cache if each read its keys; as
    # many share them as registers allow, of which conversion of float8 takes some.
    shares = has_room and num_tokens > processors
    tokens = max((128 if is_fp8 else 256) // heads, 1) if shares else 1
    groups = triton.cdiv(num_tokens, tokens)
    wanted = (
        triton.cdiv(_WAVES * processors, groups) if shares else _RESIDENT * processors // groups
    )
    block = 64 if q.itemsize <= 2 else 32
    splits = min(triton.cdiv(out.shape[1], block), max(wanted, 1))
    _index_scores[(splits, groups)](
        out,
        q,
        weights,
        _KeyPages.of(index_keys),
        page_table,
        rows,
        lengths,
        num_tokens,
        out.stride(0),
        page_table.stride(0),
        PAGE_SIZE=index_keys.shape[1],
        NUM_HEADS=num_heads,
        HEADS=heads,
        DIM=key_dim,
        DIMS=dims_of(key_dim),
        TOKENS=tokens,
        BLOCK=block,
        LEAST=top_k,
        FP8=is_fp8,
        STAGES=5 if has_room and not shares else 3,  # two more are two more blocks in flight
        PDL=pdl,
        num_warps=4 if q.itemsize <= 2 else 8,
        **launch_options(pdl),
    )
