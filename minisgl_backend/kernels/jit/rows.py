"""State of rows in and out of a decode step: one program each, since all of it is a few numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.jit.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.jit.sampling import BY_ROW

if TYPE_CHECKING:
    from minisgl_backend.kernels.rows import DecodeInputs, RowTable, StepInbox


@triton.jit(
    do_not_specialize=["batch_size"],
    do_not_specialize_on_alignment=["tokens_ptr", "slots_ptr", "lengths_ptr", *BY_ROW],
)
def _begin_decode(
    inbox_ptr,
    last_ptr,
    state_lengths_ptr,
    pages_ptr,
    state_temperature_ptr,
    state_top_k_ptr,
    state_top_p_ptr,
    state_min_p_ptr,
    state_seeds_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    lengths_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    pages_stride,
    batch_size,
    MAX_BATCH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    if PDL:
        allow_next()
        wait_previous()
    num_grants = tl.load(inbox_ptr)
    for start in tl.range(0, num_grants, BLOCK):
        mask = start + i < num_grants
        grant_ptr = inbox_ptr + 1 + MAX_BATCH + 3 * (start + i)
        granted = tl.load(grant_ptr, mask=mask, other=0).to(tl.int64)
        index = tl.load(grant_ptr + 1, mask=mask, other=0)
        page = tl.load(grant_ptr + 2, mask=mask, other=0)
        tl.store(pages_ptr + granted * pages_stride + index, page, mask=mask)
    tl.debug_barrier()  # the pages read below may be those just written
    mask = i < batch_size
    row = tl.load(inbox_ptr + 1 + i, mask=mask, other=0).to(tl.int64)
    position = tl.load(state_lengths_ptr + row, mask=mask, other=0)
    page = tl.load(pages_ptr + row * pages_stride + position // PAGE_SIZE, mask=mask, other=0)
    tl.store(tokens_ptr + i, tl.load(last_ptr + row, mask=mask, other=0), mask=mask)
    tl.store(positions_ptr + i, position, mask=mask)
    tl.store(lengths_ptr + i, position + 1, mask=mask)
    tl.store(slots_ptr + i, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
    temperature = tl.load(state_temperature_ptr + row, mask=mask, other=0.0)
    tl.store(temperature_ptr + i, temperature, mask=mask)
    tl.store(top_k_ptr + i, tl.load(state_top_k_ptr + row, mask=mask, other=0), mask=mask)
    tl.store(top_p_ptr + i, tl.load(state_top_p_ptr + row, mask=mask, other=0.0), mask=mask)
    tl.store(min_p_ptr + i, tl.load(state_min_p_ptr + row, mask=mask, other=0.0), mask=mask)
    tl.store(seeds_ptr + i, tl.load(state_seeds_ptr + row, mask=mask, other=0), mask=mask)


@triton.jit(
    do_not_specialize=["batch_size"], do_not_specialize_on_alignment=["lengths_ptr", "sampled_ptr"]
)
def _finish_decode(
    inbox_ptr,
    last_ptr,
    state_lengths_ptr,
    lengths_ptr,
    sampled_ptr,
    dummy_row,
    batch_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = i < batch_size
    if PDL:
        allow_next()
        wait_previous()
    row = tl.load(inbox_ptr + 1 + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(sampled_ptr + i, mask=mask, other=0)
    length = tl.load(lengths_ptr + i, mask=mask, other=0)
    tl.store(last_ptr + row, tl.maximum(token, 0), mask=mask)
    tl.store(state_lengths_ptr + row, tl.where(row == dummy_row, 0, length), mask=mask)
    tl.store(inbox_ptr, 0)


def _num_warps(block: int) -> int:
    return min(max(block // 64, 1), 16)


def launch_begin_decode(
    inputs: DecodeInputs, table: RowTable, inbox: StepInbox, page_size: int, *, pdl: bool
) -> None:
    """See ``minisgl_backend.kernels.rows.begin_decode``."""
    batch_size = len(inputs.tokens)
    block = max(triton.next_power_of_2(batch_size), 32)
    sampling = inputs.sampling
    _begin_decode[(1,)](
        inbox.buffer,
        table.tokens,
        table.lengths,
        table.pages,
        table.temperature,
        table.top_k,
        table.top_p,
        table.min_p,
        table.seeds,
        inputs.tokens,
        inputs.positions,
        inputs.slots,
        inputs.lengths,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        table.pages.stride(0),
        batch_size,
        MAX_BATCH=inbox.max_batch,
        PAGE_SIZE=page_size,
        BLOCK=block,
        PDL=pdl,
        num_warps=_num_warps(block),
        **launch_options(pdl),
    )


def launch_finish_decode(
    table: RowTable, inbox: StepInbox, inputs: DecodeInputs, sampled: Tensor, *, pdl: bool
) -> None:
    """See ``minisgl_backend.kernels.rows.finish_decode``."""
    batch_size = len(sampled)
    block = max(triton.next_power_of_2(batch_size), 32)
    _finish_decode[(1,)](
        inbox.buffer,
        table.tokens,
        table.lengths,
        inputs.lengths,
        sampled,
        table.dummy_row,
        batch_size,
        BLOCK=block,
        PDL=pdl,
        num_warps=_num_warps(block),
        **launch_options(pdl),
    )
