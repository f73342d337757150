"""Embedding gather: a program per token."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embedding(
    out_ptr,
    ids_ptr,
    weight_ptr,
    start,
    num_ids,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(ids_ptr + token).to(tl.int64) - start
    held = (index >= 0) & (index < num_ids)
    i = tl.arange(0, BLOCK)
    row = tl.load(weight_ptr + index * SIZE + i, mask=(i < SIZE) & held, other=0.0)
    tl.store(out_ptr + token * SIZE + i, row, mask=i < SIZE)


def launch_embedding(out: Tensor, token_ids: Tensor, weight: Tensor, start: int) -> None:
    """``out`` [num_tokens, size] from ``weight`` [num_ids, size]."""
    num_ids, size = weight.shape
    if len(token_ids) == 0:
        return
    assert weight.is_contiguous()
    block = triton.next_power_of_2(size)
    _embedding[(len(token_ids),)](
        out,
        token_ids,
        weight,
        start,
        num_ids,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )
