"""The causal convolution of layers with recurrent states, for steps that check guesses, in one
launch.

Tokens may be padding (``kernels.checks``, which has the columns of their lines), whose programs end
at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.checks import CHECK_COLUMNS
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.recurrent_math import silu

CHECK = tl.constexpr(CHECK_COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "checks_ptr"])
def _conv_checks(
    out_ptr,
    x_ptr,
    states_ptr,
    inputs_ptr,
    slots_ptr,
    checks_ptr,
    weight_ptr,
    bias_ptr,
    x_stride,
    slot_stride,
    most_tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PART: tl.constexpr,  # channels of a program
    PDL: tl.constexpr,
):
    # Lines, slots and states were written before the step or at its beginning. So they are read
    # before the wait; and states past the first-level cache, since other kernels have written them.
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        allow_next()
    place = tl.load(checks_ptr + token * CHECK).to(tl.int64)
    if place < 0:
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    index = tl.load(checks_ptr + token * CHECK + 1)
    c = tl.program_id(1) * PART + tl.arange(0, PART)
    mask = c < CHANNELS
    # inputs before the check:  state[WIDTH - 1 + i]  for the index i < 0
    state_ptr = states_ptr + tl.load(slots_ptr + token) * slot_stride + c * (WIDTH - 1)
    own_ptr = x_ptr + token * x_stride + c
    total = tl.zeros([PART], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    weights = ()
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + c * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        weights += (weight,)  # type: ignore[assignment]  # Triton takes no annotation of a tuple
        if tap < WIDTH - 1:
            is_before = index < WIDTH - 1 - tap
            at = state_ptr + (index + tap)
            old = tl.load(at, mask=mask & is_before, other=0.0, cache_modifier=".cg")
            total += old.to(tl.float32) * weight
    if PDL:
        wait_previous()
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap  # tokens before this one
        x = tl.load(own_ptr - back * x_stride, mask=mask & (index >= back), other=0.0)
        total += x.to(tl.float32) * weights[tap]
    y = silu(total) if SILU else total
    tl.store(out_ptr + token * CHANNELS + c, y.to(out_ptr.dtype.element_ty), mask=mask)
    x = tl.load(own_ptr, mask=mask, other=0.0)
    to = inputs_ptr + (place * most_tokens + index) * CHANNELS + c
    tl.store(to, x.to(inputs_ptr.dtype.element_ty), mask=mask)


def launch_conv_checks(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    inputs: Tensor,
    slots: Tensor,
    checks: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.causal_conv.causal_conv_checks``. ``checks`` are the lines of
    ``CheckedTokens``."""
    channels, width = weight.shape
    assert states[0].is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    assert inputs.is_contiguous() and slots.is_contiguous() and x.stride(1) == 1
    part = 512
    _conv_checks[(len(slots), triton.cdiv(channels, part))](
        out,
        x,
        states,
        inputs,
        slots,
        checks,
        weight,
        bias,
        x.stride(0),
        states.stride(0),
        inputs.shape[1],
        CHANNELS=channels,
        WIDTH=width,
        BIAS=bias is not None,
        SILU=silu,
        PART=part,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
