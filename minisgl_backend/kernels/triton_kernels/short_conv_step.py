"""A gated short convolution for decode steps: one token per row, in one launch.

Slots may be padding (``minisgl_backend.kernels.short_conv``), whose programs end at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.conv_step import conv_begun, keep_inputs_of_token
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _step(
    out_ptr,
    b_ptr,
    c_ptr,
    x_ptr,
    states_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    token_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    PART: tl.constexpr,  # channels of a program
    PDL: tl.constexpr,
):
    # Rows' slots and states were written before the step or at its beginning. So they are read
    # before the wait.
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    i = tl.program_id(0) * PART + tl.arange(0, PART)
    mask = i < CHANNELS
    state_ptr = states_ptr + slot * slot_stride
    total, own, stay = conv_begun(state_ptr, weight_ptr, i, mask, WIDTH)
    if BIAS:
        total += tl.load(bias_ptr + i, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_previous()
    at = row * token_stride + i
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + at, mask=mask, other=0.0)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gated = (b * x).to(c.dtype)
    y = (total + own * gated.to(tl.float32)).to(c.dtype).to(tl.float32) * c.to(tl.float32)
    tl.store(out_ptr + row * CHANNELS + i, y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # every thread may have read the inputs that another replaces
    keep_inputs_of_token(state_ptr, stay, gated, i, mask, WIDTH, True)


def launch_short_conv_step(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    *,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.short_conv.short_conv_step``. ``inputs``: the fields of
    ``ShortConvInputs``."""
    num_rows, (channels, width) = len(slots), weight.shape
    if num_rows == 0:
        return
    assert all(of.is_contiguous() for of in (out, weight, states[0]))
    assert len({of.stride() for of in inputs}) == 1 and inputs[0].stride(1) == 1
    part = 256
    _step[(triton.cdiv(channels, part), num_rows)](
        out,
        *inputs,
        states,
        weight,
        bias,
        slots,
        inputs[0].stride(0),
        states.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        BIAS=bias is not None,
        PART=part,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
