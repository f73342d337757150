"""``kernels.rows`` in Triton: a step's lookup of its rows, and the update of their state."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.sampling_table import Samples, SamplingTable
from minisgl_backend.kernels.triton_kernels.row_logits import MARKED, ONCE, load_number
from minisgl_backend.plan import LAST_TOKEN

_KEPT_BLOCK = 128


@triton.jit(
    do_not_specialize=["batch_size"],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "positions_ptr",
        "slots_ptr",
        "lengths_ptr",
        "window_slots_ptr",
    ],
)
def _begin_decode(
    given_ptr,
    known_ptr,
    state_lengths_ptr,
    pages_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    lengths_ptr,
    window_slots_ptr,
    pages_stride,
    num_rows,  # also from a row's line of pages to that of its window pages
    batch_size,
    LAST: tl.constexpr,
    WINDOWS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    num_grants = tl.load(given_ptr)
    for start in tl.range(0, num_grants, BLOCK):
        mask = start + i < num_grants
        grant_ptr = given_ptr + 1 + 3 * MAX_BATCH + 3 * (start + i)
        granted = tl.load(grant_ptr, mask=mask, other=0).to(tl.int64)
        index = tl.load(grant_ptr + 1, mask=mask, other=0)
        page = tl.load(grant_ptr + 2, mask=mask, other=0)
        tl.store(pages_ptr + granted * pages_stride + index, page, mask=mask)
    tl.debug_barrier()  # the pages read below may be those just written; all know num_grants
    tl.store(given_ptr, 0)
    mask = i < batch_size
    row_ptr = given_ptr + 1 + i
    row = tl.load(row_ptr, mask=mask, other=0).to(tl.int64)
    token = tl.load(row_ptr + MAX_BATCH, mask=mask, other=0)
    position = tl.load(row_ptr + 2 * MAX_BATCH, mask=mask, other=0)
    is_known = mask & (token < 0)  # by the table
    is_last = mask & (token == LAST)
    length = tl.load(state_lengths_ptr + row, mask=is_last, other=0)
    position = tl.where(is_last, length, position)
    known = tl.load(known_ptr + (LAST - token) * num_rows + row, mask=is_known, other=0)
    token = tl.where(is_known, known, token)
    at = pages_ptr + row * pages_stride + position // PAGE_SIZE
    page = tl.load(at, mask=mask, other=0)
    tl.store(tokens_ptr + i, token, mask=mask)
    tl.store(positions_ptr + i, position, mask=mask)
    tl.store(lengths_ptr + i, position + 1, mask=mask)
    tl.store(slots_ptr + i, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
    if WINDOWS:
        page = tl.load(at + num_rows * pages_stride, mask=mask, other=0)
        tl.store(window_slots_ptr + i, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)


@triton.jit(
    do_not_specialize=["batch_size"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "previous_ptr", "sampled_ptr"],
)
def _keep_sampled(
    last_ptr,
    lengths_ptr,
    numbers_ptr,
    marks_ptr,
    rows_ptr,
    positions_ptr,
    previous_ptr,
    sampled_ptr,
    dummy_row,
    batch_size,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < batch_size
    row = tl.load(rows_ptr + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(sampled_ptr + i, mask=mask, other=0)
    position = tl.load(positions_ptr + i, mask=mask, other=0)
    is_row = mask & (row != dummy_row)
    counts = mask
    at = i  # goes back from each sample to the first of its row
    is_behind = is_row & (tl.load(rows_ptr + at - 1, mask=mask & (at > 0), other=-1) == row)
    while tl.max(is_behind.to(tl.int32), axis=0) > 0:
        guess = tl.load(previous_ptr + at, mask=is_behind, other=0)
        counts &= tl.load(sampled_ptr + at - 1, mask=is_behind, other=0) == guess
        at -= 1
        is_behind &= tl.load(rows_ptr + at - 1, mask=is_behind & (at > 0), other=-1) == row
    has_next = is_row & (tl.load(rows_ptr + i + 1, mask=i + 1 < batch_size, other=-1) == row)
    guess = tl.load(previous_ptr + i + 1, mask=has_next, other=-1)
    is_last = counts & ((has_next & (guess == token)) == 0)
    tl.store(last_ptr + row, tl.maximum(token, 0), mask=is_last)
    tl.store(lengths_ptr + row, tl.where(is_row, position, 0), mask=is_last)
    counted = counts & (load_number(numbers_ptr, row, MARKED) > 0) & (token >= 0)
    # two samples of a row may be the same token
    tl.atomic_add(marks_ptr + row * VOCAB + token, ONCE, mask=counted, sem="relaxed")


def launch_begin_decode(
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    given: Tensor,
    known: Tensor,
    lengths: Tensor,
    pages: Tensor,
    *,
    max_batch: int,
    page_size: int,
) -> None:
    """Fill ``out``: tokens, positions, slots, lengths and window slots of a
    ``kernels.rows.DecodeInputs``.

    ``given`` is the buffer of a ``StepInputs``; the other arguments are a ``RowTable``'s, ``pages``
    its lines. There is only one program, since it reads what it writes.
    """
    batch_size = len(out[0])
    block = max(triton.next_power_of_2(batch_size), 32)
    _begin_decode[(1,)](
        given,
        known,
        lengths,
        pages,
        *out,
        pages.stride(0),
        len(lengths),
        batch_size,
        LAST=LAST_TOKEN,
        WINDOWS=out[4] is not None,
        MAX_BATCH=max_batch,
        PAGE_SIZE=page_size,
        BLOCK=block,
        num_warps=min(max(block // 64, 1), 16),
    )


def launch_keep_sampled(
    last_tokens: Tensor,
    lengths: Tensor,
    sampling: SamplingTable,
    samples: Samples,
    sampled: Tensor,
) -> None:
    """See ``minisgl_backend.kernels.rows.keep_sampled``; the first two are a ``RowTable``'s."""
    batch_size = len(sampled)
    _keep_sampled[(triton.cdiv(batch_size, _KEPT_BLOCK),)](
        last_tokens,
        lengths,
        sampling.numbers,
        sampling.marks,
        *samples,
        sampled,
        len(last_tokens) - 1,  # the dummy row
        batch_size,
        VOCAB=sampling.vocab_size,
        BLOCK=_KEPT_BLOCK,
        num_warps=4,
    )
