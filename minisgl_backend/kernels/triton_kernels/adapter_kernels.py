"""``kernels.adapters`` in Triton: shrink computes x A^T by blocks of tokens and parts of the
inputs, and expand multiplies the sum of these parts by B^T. Expand may also apply a gate.

Adapters, ``order`` and ``blocks`` were there before the step, so they are read before the kernels
wait for their predecessors.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.layer_kernels import opened
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_STEP = 16
"""``kernels.adapters.RANK_STEP``."""
_MOST_COLUMNS = 64
"""Columns of x A^T that a program of shrink computes at most, if blocks are large: it reads x once
for all of them."""
_MOST_SPLITS = 16
_SPLIT_SIZE = 512
"""Inputs per program of shrink, unless that would make more than ``_MOST_SPLITS`` parts."""
_LARGE_SIZE = 2048
"""If blocks are large, so many inputs or more are in two parts."""
_BLOCK_N = 128
"""Outputs per program of expand."""


@triton.jit
def _multiplied(
    a,  # of the first inputs
    x_ptrs,
    a_ptrs,
    a_mask,
    within,
    is_there,
    length,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x A^T over ``length`` inputs, at most ``MOST``, [BLOCK, COLUMNS]."""
    mask = is_there[None, :, None] & (within < length)[:, None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    total = tl.zeros((SLICES, BLOCK, COLUMNS), dtype=tl.float32)
    total = tl.dot(x, a, total, input_precision="ieee")
    for start in tl.range(SLICES * BLOCK_K, MOST, SLICES * BLOCK_K, num_stages=STAGES):
        inside = start + within < length
        mask = is_there[None, :, None] & inside[:, None, :]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0)
        a = tl.load(a_ptrs + start, mask=a_mask & inside[:, :, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    return tl.sum(total, axis=0)


@triton.jit
def _block_of(order_ptr, blocks_ptr, BLOCK: tl.constexpr):
    """The slot and rank of the adapter of a program's block, its tokens [BLOCK], which of them are
    there, and whether any is."""
    block_ptr = blocks_ptr + 4 * tl.program_id(0)
    slot = tl.load(block_ptr).to(tl.int64)
    rank = tl.load(block_ptr + 1)
    begin = tl.load(block_ptr + 2)
    end = tl.load(block_ptr + 3)
    row = begin + tl.arange(0, BLOCK)
    is_there = row < end
    token = tl.load(order_ptr + row, mask=is_there, other=0).to(tl.int64)
    return slot, rank, token, is_there, begin < end


@triton.jit
def _tile_of(
    WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The projection of a program's outputs, where they begin and end, and the number of the
    projection's tiles. No tile reaches into the next projection."""
    tile = tl.program_id(1)
    TILES_0: tl.constexpr = (WIDTH_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (WIDTH_1 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_0 + TILES_1).to(tl.int32)
    at = tile - tl.where(part > 0, TILES_0, 0) - tl.where(part > 1, TILES_1, 0)
    begin = tl.where(part > 0, WIDTH_0, 0) + tl.where(part > 1, WIDTH_1, 0)
    width = tl.where(part == 0, WIDTH_0, tl.where(part == 1, WIDTH_1, WIDTH_2))
    return part, begin, begin + width, at


@triton.jit
def _base_of(
    out_ptrs, bias_ptr, column, is_there, is_in, HAS_BIAS: tl.constexpr, ADD: tl.constexpr
):
    """What is added to: the existing outputs, [BLOCK, BLOCK_N], or a bias, [1, BLOCK_N]."""
    if ADD:
        base = tl.load(out_ptrs, mask=is_there[:, None] & is_in[None, :], other=0.0)
    elif HAS_BIAS:
        base = tl.load(bias_ptr + column, mask=is_in, other=0.0)[None, :]
    else:
        base = tl.zeros_like(column)[None, :]
    return base.to(tl.float32)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["order_ptr", "blocks_ptr"],  # parts of one buffer
)
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
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    slot, rank, token, is_there, has_tokens = _block_of(order_ptr, blocks_ptr, BLOCK)
    split = tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_used = (column % MAX_RANK < rank) & (column < WIDTH) & has_tokens
    is_needed = tl.max(is_used.to(tl.int32)) > 0
    length = tl.minimum(SPLIT_SIZE, SIZE - split * SPLIT_SIZE)
    within = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    a_ptrs = a_ptr + (slot - 1) * slot_stride + split * SPLIT_SIZE
    a_ptrs = a_ptrs + column[None, None, :] * SIZE + within[:, :, None]
    a_mask = is_used[None, None, :]
    a = tl.load(a_ptrs, mask=a_mask & (within < length)[:, :, None], other=0.0)
    if PDL:
        wait_previous()
        allow_next()
    if is_needed:
        x_ptrs = x_ptr + split * SPLIT_SIZE + token[None, :, None] * x_stride + within[:, None, :]
        total = _multiplied(
            a,
            x_ptrs,
            a_ptrs,
            a_mask,
            within,
            is_there,
            length,
            SPLIT_SIZE,
            BLOCK,
            COLUMNS,
            SLICES,
            BLOCK_K,
            STAGES,
        )
        to = inner_ptr + (split.to(tl.int64) * num_tokens + token[:, None]) * WIDTH
        to = to + column[None, :]
        tl.store(to, total, mask=is_there[:, None] & is_used[None, :])


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["order_ptr", "blocks_ptr"],  # parts of one buffer
)
def _expand(
    out_ptr,
    inner_ptr,
    b_ptr,
    bias_ptr,
    order_ptr,
    blocks_ptr,
    out_stride,
    slot_stride,
    num_tokens,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
    slot, rank, token, is_there, has_tokens = _block_of(order_ptr, blocks_ptr, BLOCK)
    part, part_begin, part_end, at = _tile_of(WIDTH_0, WIDTH_1, WIDTH_2, BLOCK_N)
    column = part_begin + at * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = column < part_end
    i = tl.arange(0, STEP)
    b_ptrs = b_ptr + (slot - 1) * slot_stride + column[:, None] * MAX_RANK + i[None, :]
    b = tl.load(b_ptrs, mask=is_in[:, None] & has_tokens & (rank > 0), other=0.0)
    if PDL:
        wait_previous()
    if has_tokens & ((rank > 0) | (not ADD)):
        out_ptrs = out_ptr + token[:, None] * out_stride + column[None, :]
        base = _base_of(out_ptrs, bias_ptr, column, is_there, is_in, HAS_BIAS, ADD)
        inner_ptrs = inner_ptr + token[:, None] * WIDTH + part * MAX_RANK + i[None, :]
        total = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
        if rank > 0:
            total = _with_product(
                total, b, inner_ptrs, b_ptrs, is_there, is_in, rank, num_tokens, WIDTH, STEP, SPLITS
            )
        total += base
        mask = is_there[:, None] & is_in[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["order_ptr", "blocks_ptr"],  # parts of one buffer
)
def _gated_expand(
    out_ptr,
    gate_up_ptr,
    inner_ptr,
    b_ptr,
    order_ptr,
    blocks_ptr,
    slot_stride,
    num_tokens,
    SIZE: tl.constexpr,
    MAX_RANK: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
    slot, rank, token, is_there, has_tokens = _block_of(order_ptr, blocks_ptr, BLOCK)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = column < SIZE
    i = tl.arange(0, STEP)
    b_ptrs = b_ptr + (slot - 1) * slot_stride + column[:, None] * MAX_RANK + i[None, :]
    has_adapter = has_tokens & (rank > 0)
    of_gate = tl.load(b_ptrs, mask=is_in[:, None] & has_adapter, other=0.0)
    of_up = tl.load(b_ptrs + SIZE * MAX_RANK, mask=is_in[:, None] & has_adapter, other=0.0)
    if PDL:
        wait_previous()
    if has_tokens:
        mask = is_there[:, None] & is_in[None, :]
        gate_ptrs = gate_up_ptr + token[:, None] * (2 * SIZE) + column[None, :]
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
        if rank > 0:
            WIDTH: tl.constexpr = 2 * MAX_RANK
            inner_ptrs = inner_ptr + token[:, None] * WIDTH + i[None, :]
            gate = _with_product(
                gate,
                of_gate,
                inner_ptrs,
                b_ptrs,
                is_there,
                is_in,
                rank,
                num_tokens,
                WIDTH,
                STEP,
                SPLITS,
            )
            inner_ptrs += MAX_RANK
            b_ptrs += SIZE * MAX_RANK
            up = _with_product(
                up,
                of_up,
                inner_ptrs,
                b_ptrs,
                is_there,
                is_in,
                rank,
                num_tokens,
                WIDTH,
                STEP,
                SPLITS,
            )
        y = opened(gate, up, GELU)
        out_ptrs = out_ptr + token[:, None] * SIZE + column[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _with_product(
    total,
    b,  # of the first STEP ranks
    inner_ptrs,
    b_ptrs,
    is_there,
    is_in,
    rank,
    num_tokens,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """``total`` [BLOCK, BLOCK_N] + (x A^T) B^T, over ``rank`` > 0 in steps."""
    BLOCK: tl.constexpr = is_there.shape[0]
    inner = _summed(inner_ptrs, is_there, num_tokens, WIDTH, SPLITS, BLOCK, STEP)
    total = tl.dot(inner.to(b.dtype), b.T, total, input_precision="ieee")
    for done in tl.range(STEP, rank, STEP, num_stages=1):
        b = tl.load(b_ptrs + done, mask=is_in[:, None], other=0.0)
        inner = _summed(inner_ptrs + done, is_there, num_tokens, WIDTH, SPLITS, BLOCK, STEP)
        total = tl.dot(inner.to(b.dtype), b.T, total, input_precision="ieee")
    return total


@triton.jit
def _summed(
    inner_ptrs,
    is_there,
    num_tokens,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The sum of the parts of x A^T, [BLOCK, STEP]."""
    inner = tl.zeros((BLOCK, STEP), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        part_ptrs = inner_ptrs + split * num_tokens.to(tl.int64) * WIDTH
        inner += tl.load(part_ptrs, mask=is_there[:, None], other=0.0)
    return inner


def launch_shrink(
    x: Tensor, a: Tensor, order: Tensor, blocks: Tensor, *, block: int, max_rank: int, pdl: bool
) -> Tensor:
    """x A^T of each token's adapter, in parts to be added: float32 [parts, num_tokens, width of A].
    Undefined beyond the rank of a token's adapter."""
    (num_tokens, size), width = x.shape, a.shape[1]
    assert a.is_contiguous()
    if block <= 16:
        columns, slices, block_k, stages = _STEP, 4, 128, 2
        splits = min(max(size // _SPLIT_SIZE, 1), _MOST_SPLITS)
    else:
        columns, slices = min(triton.next_power_of_2(width), _MOST_COLUMNS), 1
        block_k, stages = (128, 3) if columns <= _STEP else (64, 6)
        splits = 2 if size >= _LARGE_SIZE else 1
    split_size = slices * block_k * triton.cdiv(triton.cdiv(size, splits), slices * block_k)
    splits = triton.cdiv(size, split_size)
    inner = torch.empty((splits, num_tokens, width), dtype=torch.float32, device=x.device)
    _shrink[(len(blocks), triton.cdiv(width, columns), splits)](
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
        COLUMNS=columns,
        BLOCK=block,
        BLOCK_K=block_k,
        SLICES=slices,
        STAGES=stages,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return inner


def launch_expand(
    out: Tensor,
    inner: Tensor,
    b: Tensor,
    order: Tensor,
    blocks: Tensor,
    *,
    block: int,
    widths: Sequence[int],
    bias: Tensor | None = None,
    add: bool,
    pdl: bool,
) -> None:
    """Multiply ``inner``, which is x A^T in parts [parts, num_tokens, width of A], by B^T. Write
    the product plus ``bias`` to ``out``, or ``add`` it to what is there."""
    splits, num_tokens, width = inner.shape
    assert b[0].is_contiguous() and len(widths) <= 3
    width_0, width_1, width_2 = (*widths, 0, 0)[:3]
    _expand[(len(blocks), sum(triton.cdiv(part, _BLOCK_N) for part in widths))](
        out,
        inner,
        b,
        bias,
        order,
        blocks,
        out.stride(0),
        b.stride(0),
        num_tokens,
        WIDTH_0=width_0,
        WIDTH_1=width_1,
        WIDTH_2=width_2,
        MAX_RANK=b.shape[2],
        WIDTH=width,
        STEP=_STEP,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        ADD=add,
        BLOCK=block,
        BLOCK_N=_BLOCK_N,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def launch_gated_expand(
    out: Tensor,
    gate_up: Tensor,
    inner: Tensor,
    b: Tensor,
    order: Tensor,
    blocks: Tensor,
    *,
    block: int,
    gelu: bool,
    pdl: bool,
) -> None:
    """``out`` [num_tokens, size] opens the gates of ``gate_up`` [num_tokens, 2 * size] plus the
    product of ``inner`` and B^T; ``inner`` as for ``launch_expand``."""
    splits, num_tokens, width = inner.shape
    size = out.shape[1]
    assert b[0].is_contiguous() and out.is_contiguous() and gate_up.is_contiguous()
    assert width == 2 * b.shape[2] and b.shape[1] == 2 * size
    block_n = _BLOCK_N if block <= 16 else _BLOCK_N // 4  # registers hold two sums
    _gated_expand[(len(blocks), triton.cdiv(size, block_n))](
        out,
        gate_up,
        inner,
        b,
        order,
        blocks,
        b.stride(0),
        num_tokens,
        SIZE=size,
        MAX_RANK=b.shape[2],
        STEP=_STEP,
        SPLITS=splits,
        BLOCK=block,
        BLOCK_N=block_n,
        GELU=gelu,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
