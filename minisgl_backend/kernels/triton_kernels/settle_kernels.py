"""Adds what tokens of checks keep for states (``kernels.settle``) to them, for all layers at once,
in two launches:

    _settle_matrices  the matrices, and their updates that were pending
    _settle_inputs    the inputs of convolutions; and where updates of rows that may be pending
                      begin, which all programs of the first launch have read by then
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pending_updates import with_pending
from minisgl_backend.kernels.triton_kernels.recurrent_math import stored
from minisgl_backend.plan import WHOLE_EVERY

_PART: Final = 32
"""Columns of a matrix that a program settles."""

_NUMBERS: Final = ["rows_ptr", "places_ptr", "starts_ptr", "counts_ptr"]
"""Parts of one tensor, so their alignment depends on the number of checks."""


@triton.jit(
    do_not_specialize=["num_checks", "num_rows", "num_places", "most_tokens"],
    do_not_specialize_on_alignment=_NUMBERS,
)
def _settle_matrices(
    states_ptr,
    pending_keys_ptr,
    pending_values_ptr,
    pending_decays_ptr,
    begins_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    rows_ptr,
    places_ptr,
    starts_ptr,
    counts_ptr,
    num_checks,
    slot_stride,
    num_rows,
    num_places,
    most_tokens,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAYS: tl.constexpr,  # of a head: 1, or one for each dimension of a key
    LP: tl.constexpr,
    PART: tl.constexpr,
    EVERY: tl.constexpr,
    KEYS_ARE_LINES: tl.constexpr,
    HAS_PENDING: tl.constexpr,
):
    """For a layer, a head and some columns of its matrix: the checks one after another."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    LINES: tl.constexpr = K if KEYS_ARE_LINES else V
    COLUMNS: tl.constexpr = V if KEYS_ARE_LINES else K
    i, j = tl.arange(0, LP), tl.program_id(1) * PART + tl.arange(0, PART)
    in_lines, in_columns = i < LINES, j < COLUMNS
    inside = in_lines[:, None] & in_columns[None, :]
    of_matrix = (layer * HEADS + head) * (LINES * COLUMNS) + i[:, None] * COLUMNS + j[None, :]
    # decays of lines, or one of all
    of_decays = i if DECAYS > 1 else 0 * i
    for check in tl.range(num_checks):
        count = tl.load(counts_ptr + check)
        if count > 0:
            row = tl.load(rows_ptr + check).to(tl.int64)
            place = tl.load(places_ptr + check).to(tl.int64)
            at = states_ptr + row * slot_stride + of_matrix
            state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            if HAS_PENDING:
                of_row = layer.to(tl.int64) * num_rows + row
                of_head = of_row * HEADS + head
                begin, end = tl.load(begins_ptr + of_head), tl.load(starts_ptr + check) % EVERY
                if begin < end:
                    line_ptr = pending_keys_ptr + (of_row * KEY_HEADS + key_head) * (EVERY * K)
                    column_ptr = pending_values_ptr + of_head * (EVERY * V)
                    if not KEYS_ARE_LINES:
                        line_ptr, column_ptr = column_ptr, line_ptr
                    decay_ptr = pending_decays_ptr + of_head * EVERY
                    state = with_pending(
                        state, line_ptr, column_ptr, decay_ptr, begin, end, i, j, LINES, COLUMNS
                    )
            token = (layer * num_places + place) * most_tokens
            key_ptr = keys_ptr + (token * KEY_HEADS + key_head) * K
            value_ptr = values_ptr + (token * HEADS + head) * V
            decay_ptr = decays_ptr + (token * HEADS + head) * DECAYS + of_decays
            last = tl.load(decay_ptr + (count - 1) * (HEADS * DECAYS), mask=in_lines, other=0.0)
            state *= tl.exp(last)[:, None]
            for index in tl.range(count):
                of_key, of_value = key_ptr + index * KEY_HEADS * K, value_ptr + index * HEADS * V
                line_ptr = of_key if KEYS_ARE_LINES else of_value
                column_ptr = of_value if KEYS_ARE_LINES else of_key
                line = tl.load(line_ptr + i, mask=in_lines, other=0.0)
                column = tl.load(column_ptr + j, mask=in_columns, other=0.0)
                decay = tl.load(decay_ptr + index * (HEADS * DECAYS), mask=in_lines, other=0.0)
                state += (line * tl.exp(last - decay))[:, None] * column[None, :]
            tl.store(at, stored(state, states_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["num_checks", "num_rows", "num_places", "most_tokens"],
    do_not_specialize_on_alignment=_NUMBERS,
)
def _settle_inputs(
    states_ptr,
    begins_ptr,
    inputs_ptr,
    rows_ptr,
    places_ptr,
    starts_ptr,
    counts_ptr,
    num_checks,
    slot_stride,
    num_rows,
    num_places,
    most_tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    HEADS: tl.constexpr,  # with updates that may be pending
    EVERY: tl.constexpr,
):
    """For a layer and some channels: the checks one after another."""
    layer, part = tl.program_id(0), tl.program_id(1)
    c = part * PART + tl.arange(0, PART)
    mask = c < CHANNELS
    for check in tl.range(num_checks):
        count = tl.load(counts_ptr + check)
        if count > 0:
            row = tl.load(rows_ptr + check).to(tl.int64)
            place = tl.load(places_ptr + check).to(tl.int64)
            if HEADS > 0 and part == 0:
                next_place = (tl.load(starts_ptr + check) + count) % EVERY
                head_ptr = begins_ptr + (layer.to(tl.int64) * num_rows + row) * HEADS
                for head in tl.range(HEADS):
                    tl.store(head_ptr + head, next_place)
            at = states_ptr + row * slot_stride + (layer * CHANNELS + c) * (WIDTH - 1)
            from_ptr = inputs_ptr + (layer * num_places + place) * most_tokens * CHANNELS + c
            last = ()
            for tap in tl.static_range(WIDTH - 1):
                index = count - (WIDTH - 1) + tap
                x = tl.load(from_ptr + index * CHANNELS, mask=mask & (index >= 0), other=0.0)
                old = tl.load(at + tap + count, mask=mask & (index < 0), other=0.0)
                last += (tl.where(index >= 0, x, old),)  # type: ignore[assignment]  # see conv_step
            tl.debug_barrier()  # a thread may replace what another one has read
            for tap in tl.static_range(WIDTH - 1):
                tl.store(at + tap, last[tap], mask=mask)


def launch_settle(
    conv: Tensor,
    matrices: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    unsettled: tuple[Tensor, Tensor, Tensor, Tensor],
    checks: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    keys_are_lines: bool,
) -> None:
    """See ``minisgl_backend.kernels.settle.settle``. ``pending``, ``unsettled`` and ``checks``: the
    fields of ``PendingUpdates``, ``UnsettledTokens`` and ``Settling``."""
    inputs, keys, values, decays = unsettled
    assert all(of.is_contiguous() for of in (*pending, *unsettled, *checks))
    assert conv[0].is_contiguous() and matrices[0].is_contiguous()
    num_checks, begins = len(checks[0]), pending[3]  # [num_layers, num_rows, num_heads]
    num_layers, num_places, most_tokens, channels = inputs.shape
    num_heads, num_lines, num_columns = matrices.shape[2:]
    if num_heads:
        _settle_matrices[(num_layers * num_heads, triton.cdiv(num_columns, _PART))](
            matrices,
            *pending,
            keys,
            values,
            decays,
            *checks,
            num_checks,
            matrices.stride(0),
            begins.shape[1],
            num_places,
            most_tokens,
            KEY_HEADS=keys.shape[3],
            HEADS=num_heads,
            K=keys.shape[4],
            V=values.shape[4],
            DECAYS=decays.shape[4],
            LP=triton.next_power_of_2(num_lines),
            PART=_PART,
            EVERY=WHOLE_EVERY,
            KEYS_ARE_LINES=keys_are_lines,
            HAS_PENDING=begins.shape[2] > 0,
            num_warps=4,
        )
    part = 1024
    _settle_inputs[(num_layers, triton.cdiv(channels, part))](
        conv,
        begins,
        inputs,
        *checks,
        num_checks,
        conv.stride(0),
        begins.shape[1],
        num_places,
        most_tokens,
        CHANNELS=channels,
        WIDTH=conv.shape[3] + 1,
        PART=part,
        HEADS=begins.shape[2],
        EVERY=WHOLE_EVERY,
        num_warps=4,
    )
