"""``kernels.adapters`` in Triton: shrink, x A^T by blocks of tokens and parts of the inputs; and
expand, the sum of these parts times B^T."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

if TYPE_CHECKING:
    from minisgl_backend.kernels.adapters import TokenGroups

_STEP = 16
"""``kernels.adapters.RANK_STEP``: a program of shrink computes as many columns."""
_MOST_SPLITS = 16
_SPLIT_SIZE = 512
"""Inputs of a program of shrink, unless that makes more than ``_MOST_SPLITS`` of them."""


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    inner_ptr,
    x_ptr,
    a_ptr,
    order_ptr,
    blocks_ptr,
    x_stride,
    slot_stride,
    num_tokens,
    SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
        wait_previous()
    block_ptr = blocks_ptr + 4 * tl.program_id(0)
    slot = tl.load(block_ptr).to(tl.int64)
    rank = tl.load(block_ptr + 1)
    begin = tl.load(block_ptr + 2)
    end = tl.load(block_ptr + 3)
    first = tl.program_id(1) * STEP
    if (first % MAX_RANK < rank) & (begin < end):
        row = begin + tl.arange(0, BLOCK)
        is_there = row < end
        token = tl.load(order_ptr + row, mask=is_there, other=0).to(tl.int64)
        column = first + tl.arange(0, STEP)
        split = tl.program_id(2)
        k = split * SPLIT_SIZE + tl.arange(0, BLOCK_K)
        last = tl.minimum((split + 1) * SPLIT_SIZE, SIZE)
        x_ptrs = x_ptr + token[:, None] * x_stride + k[None, :]
        a_ptrs = a_ptr + (slot - 1) * slot_stride + column[:, None] * SIZE + k[None, :]
        total = tl.zeros((BLOCK, STEP), dtype=tl.float32)
        for done in tl.range(0, SPLIT_SIZE, BLOCK_K):
            is_in = done + k < last
            x = tl.load(x_ptrs + done, mask=is_there[:, None] & is_in[None, :], other=0.0)
            a = tl.load(a_ptrs + done, mask=is_in[None, :], other=0.0)
            total = tl.dot(x, a.T, total, input_precision="ieee")
        to = inner_ptr + (split.to(tl.int64) * num_tokens + row[:, None]) * WIDTH + column[None, :]
        tl.store(to, total, mask=is_there[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    out_ptr,
    inner_ptr,
    b_ptr,
    bias_ptr,
    squares_ptr,
    order_ptr,
    blocks_ptr,
    out_stride,
    slot_stride,
    num_tokens,
    eps,
    SIZE: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARE_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
        wait_previous()
    block_ptr = blocks_ptr + 4 * tl.program_id(0)
    slot = tl.load(block_ptr).to(tl.int64)
    rank = tl.load(block_ptr + 1)
    begin = tl.load(block_ptr + 2)
    end = tl.load(block_ptr + 3)
    # which projection the tile is of: none reaches into the next one
    tile = tl.program_id(1)
    TILES_0: tl.constexpr = (WIDTH_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (WIDTH_1 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_0 + TILES_1).to(tl.int32)
    at = tile - tl.where(part > 0, TILES_0, 0) - tl.where(part > 1, TILES_1, 0)
    part_begin = tl.where(part > 0, WIDTH_0, 0) + tl.where(part > 1, WIDTH_1, 0)
    part_width = tl.where(part == 0, WIDTH_0, tl.where(part == 1, WIDTH_1, WIDTH_2))
    part_end = part_begin + part_width
    if (begin < end) & ((rank > 0) | (not ADD)):
        row = begin + tl.arange(0, BLOCK)
        is_there = row < end
        token = tl.load(order_ptr + row, mask=is_there, other=0).to(tl.int64)
        column = part_begin + at * BLOCK_N + tl.arange(0, BLOCK_N)
        is_in = column < part_end
        total = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
        for done in tl.range(0, rank, STEP):
            i = done + tl.arange(0, STEP)
            inner_ptrs = inner_ptr + row[:, None] * WIDTH + part * MAX_RANK + i[None, :]
            inner = tl.zeros((BLOCK, STEP), dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                inner += tl.load(
                    inner_ptrs + split * num_tokens.to(tl.int64) * WIDTH,
                    mask=is_there[:, None],
                    other=0.0,
                )
            b_ptrs = b_ptr + (slot - 1) * slot_stride + column[:, None] * MAX_RANK + i[None, :]
            b = tl.load(b_ptrs, mask=is_in[:, None], other=0.0)
            total = tl.dot(inner.to(b.dtype), b.T, total, input_precision="ieee")
        if SQUARE_TILES > 0:
            square = tl.zeros((BLOCK,), dtype=tl.float32)
            for i in tl.range(0, SQUARE_TILES):
                square += tl.load(squares_ptr + i * num_tokens + token, mask=is_there, other=1.0)
            total = total * tl.rsqrt(square / SIZE + eps)[:, None]
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=is_in, other=0.0).to(tl.float32)[None, :]
        to = out_ptr + token[:, None] * out_stride + column[None, :]
        mask = is_there[:, None] & is_in[None, :]
        if ADD:
            total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=mask)


def launch_adapters(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    groups: "TokenGroups",
    widths: Sequence[int],
    *,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    add: bool,
    pdl: bool,
) -> None:
    """Write what the adapters add, and ``bias``, to ``out``; or ``add`` it to what is there."""
    num_tokens, size = x.shape
    if num_tokens == 0:
        return
    assert a.is_contiguous() and b[0].is_contiguous() and len(widths) <= 3
    order, blocks = groups.order, groups.blocks
    width, max_rank = a.shape[1], b.shape[2]
    block_k = 128 if groups.block <= 16 else 64
    splits = min(max(size // _SPLIT_SIZE, 1), _MOST_SPLITS) if groups.block <= 16 else 1
    split_size = block_k * triton.cdiv(triton.cdiv(size, splits), block_k)
    splits = triton.cdiv(size, split_size)
    inner = torch.empty((splits, num_tokens, width), dtype=torch.float32, device=x.device)
    _shrink[(len(blocks), width // _STEP, splits)](
        inner,
        x,
        a,
        order,
        blocks,
        x.stride(0),
        a.stride(0),
        num_tokens,
        SIZE=size,
        SPLIT_SIZE=split_size,
        MAX_RANK=max_rank,
        WIDTH=width,
        STEP=_STEP,
        BLOCK=groups.block,
        BLOCK_K=block_k,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    block_n = 128
    width_0, width_1, width_2 = (*widths, 0, 0)[:3]
    _expand[(len(blocks), sum(triton.cdiv(part, block_n) for part in widths))](
        out,
        inner,
        b,
        bias,
        squares,
        order,
        blocks,
        out.stride(0),
        b.stride(0),
        num_tokens,
        eps,
        SIZE=size,
        WIDTH_0=width_0,
        WIDTH_1=width_1,
        WIDTH_2=width_2,
        MAX_RANK=max_rank,
        WIDTH=width,
        STEP=_STEP,
        SPLITS=splits,
        SQUARE_TILES=0 if squares is None else len(squares),
        HAS_BIAS=bias is not None,
        ADD=add,
        BLOCK=groups.block,
        BLOCK_N=block_n,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
