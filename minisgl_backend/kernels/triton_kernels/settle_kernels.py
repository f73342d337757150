"""Adds what tokens of checks keep for states (``kernels.settle``) to them, for all layers at once,
in two launches:

    _settle_matrices  the matrices, and their updates that were pending
    _settle_inputs    the inputs of convolutions; and where updates of rows that may be pending
                      begin, which all programs of the first launch have read by then
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import stored
from minisgl_backend.kernels.triton_kernels.pending_updates import with_pending
from minisgl_backend.plan import WHOLE_EVERY

_PART: int = 32
"""Columns of a matrix that a program settles."""


_NUMBERS: list[str] = ["rows_ptr", "places_ptr", "starts_ptr", "counts_ptr"]
"""Parts of one tensor, so their alignment depends on the number of checks."""


@triton.jit(
    do_not_specialize=["num_rows", "num_places", "most_tokens"],
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
    check, layer = tl.program_id(0), tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.load(rows_ptr + check).to(tl.int64)
    place, count = tl.load(places_ptr + check).to(tl.int64), tl.load(counts_ptr + check)
    LINES: tl.constexpr = K if KEYS_ARE_LINES else V
    COLUMNS: tl.constexpr = V if KEYS_ARE_LINES else K
    i, j = tl.arange(0, LP), tl.program_id(2) * PART + tl.arange(0, PART)
    inside = (i < LINES)[:, None] & (j < COLUMNS)[None, :]
    at = states_ptr + row * slot_stride + (layer * HEADS + head) * (LINES * COLUMNS)
    at += i[:, None] * COLUMNS + j[None, :]
    state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_PENDING:
        of_row = layer.to(tl.int64) * num_rows + row
        of_head = of_row * HEADS + head
        begin, end = tl.load(begins_ptr + of_head), tl.load(starts_ptr + check) % EVERY
        if begin < end:
            of_keys = pending_keys_ptr + (of_row * KEY_HEADS + key_head) * (EVERY * K)
            of_values = pending_values_ptr + of_head * (EVERY * V)
            of_decays = pending_decays_ptr + of_head * EVERY
            if KEYS_ARE_LINES:
                state = with_pending(
                    state, of_keys, of_values, of_decays, begin, end, i, j, LINES, COLUMNS
                )
            else:
                state = with_pending(
                    state, of_values, of_keys, of_decays, begin, end, i, j, LINES, COLUMNS
                )
    token = (layer * num_places + place) * most_tokens
    keys_ptr += (token * KEY_HEADS + key_head) * K
    values_ptr += (token * HEADS + head) * V
    decays_ptr += (token * HEADS + head) * DECAYS
    # decays of lines, or one of all
    if DECAYS > 1:
        of_lines, mask = i, i < LINES
    else:
        of_lines, mask = 0 * i, i < LINES
    last = tl.load(decays_ptr + (count - 1) * (HEADS * DECAYS) + of_lines, mask=mask, other=0.0)
    state *= tl.exp(last)[:, None]
    for index in tl.range(count):
        key_ptr, value_ptr = keys_ptr + index * (KEY_HEADS * K), values_ptr + index * (HEADS * V)
        line_ptr = key_ptr if KEYS_ARE_LINES else value_ptr
        column_ptr = value_ptr if KEYS_ARE_LINES else key_ptr
        line = tl.load(line_ptr + i, mask=i < LINES, other=0.0)
        column = tl.load(column_ptr + j, mask=j < COLUMNS, other=0.0)
        decay = tl.load(decays_ptr + index * (HEADS * DECAYS) + of_lines, mask=mask, other=0.0)
        state += (line * tl.exp(last - decay))[:, None] * column[None, :]
    tl.store(at, stored(state, states_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "num_places", "most_tokens"],
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
    check, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + check).to(tl.int64)
    place, count = tl.load(places_ptr + check).to(tl.int64), tl.load(counts_ptr + check)
    if HEADS > 0 and tl.program_id(2) == 0:
        next_place = (tl.load(starts_ptr + check) + count) % EVERY
        head_ptr = begins_ptr + (layer.to(tl.int64) * num_rows + row) * HEADS
        for head in tl.range(HEADS):
            tl.store(head_ptr + head, next_place)
    c = tl.program_id(2) * PART + tl.arange(0, PART)
    mask = c < CHANNELS
    at = states_ptr + row * slot_stride + (layer * CHANNELS + c) * (WIDTH - 1)
    from_ptr = inputs_ptr + (layer * num_places + place) * most_tokens * CHANNELS + c
    last = ()
    for tap in tl.static_range(WIDTH - 1):
        index = count - (WIDTH - 1) + tap
        x = tl.load(from_ptr + index * CHANNELS, mask=mask & (index >= 0), other=0.0)
        old = tl.load(at + tap + count, mask=mask & (index < 0), other=0.0)
        last += (tl.where(index >= 0, x, old),)  # type: ignore[assignment]  # as in ``conv_step``
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
        _settle_matrices[(num_checks, num_layers * num_heads, triton.cdiv(num_columns, _PART))](
            matrices,
            *pending,
            keys,
            values,
            decays,
            *checks,
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
    _settle_inputs[(num_checks, num_layers, triton.cdiv(channels, part))](
        conv,
        begins,
        inputs,
        *checks,
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
