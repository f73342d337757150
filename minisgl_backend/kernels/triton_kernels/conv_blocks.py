"""The causal convolution of layers with recurrent states, over blocks of tokens, in two launches:

    _conv_blocks      the convolution, and the inputs that snapshots keep
    _keep_inputs      the inputs that rows keep; only now have all blocks read the old ones

Blocks and runs may be padding (``kernels.chunk_runs``, which has their columns), whose programs end
at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.chunk_runs import BLOCK
from minisgl_backend.kernels.triton_kernels.pending_updates import RUN
from minisgl_backend.kernels.triton_kernels.recurrent_math import silu


@triton.jit
def _input_before(x_ptr, state_ptr, s, first, is_known, x_stride, c, mask, WIDTH: tl.constexpr):
    """The inputs of token ``s`` of a run that begins at token ``first``. Before that token they
    come from the row's state, if there is any."""
    x = tl.load(x_ptr + s.to(tl.int64) * x_stride + c, mask=mask & (s >= first), other=0.0)
    at = state_ptr + c * (WIDTH - 1) + (s - first + WIDTH - 1)
    old = tl.load(at, mask=mask & (s < first) & is_known, other=0.0)
    return tl.where(s >= first, x, old.to(x.dtype))


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"])
def _conv_blocks(
    out_ptr,
    x_ptr,
    states_ptr,
    blocks_ptr,
    runs_ptr,
    weight_ptr,
    bias_ptr,
    x_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
    PART: tl.constexpr,  # channels of a program
):
    block_ptr = blocks_ptr + tl.program_id(0) * 4
    start, end = tl.load(block_ptr) + tl.program_id(2) * TOKENS, tl.load(block_ptr + 1)
    if start >= end:
        return
    kept = tl.load(block_ptr + 2).to(tl.int64)
    run_ptr = runs_ptr + tl.load(block_ptr + 3) * RUN
    first = tl.load(blocks_ptr + tl.load(run_ptr) * 4)
    slot = tl.load(run_ptr + 2).to(tl.int64)
    is_known = tl.load(run_ptr + 3) > 0
    c = tl.program_id(1) * PART + tl.arange(0, PART)
    mask = c < CHANNELS
    state_ptr = states_ptr + slot * slot_stride
    weights, inputs = (), ()
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + c * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        weights += (weight,)  # type: ignore[assignment]  # Triton takes no annotation of a tuple
    for tap in tl.static_range(WIDTH - 1):
        s = start - (WIDTH - 1) + tap
        x = _input_before(x_ptr, state_ptr, s, first, is_known, x_stride, c, mask, WIDTH)
        inputs += (x,)  # type: ignore[assignment]
    # before anything is stored, so that all loads are on their way at once
    for token in tl.static_range(TOKENS):
        t = (start + token).to(tl.int64)
        x = tl.load(x_ptr + t * x_stride + c, mask=mask & (t < end), other=0.0)
        inputs += (x,)  # type: ignore[assignment]
    begun = tl.zeros([PART], tl.float32)
    if BIAS:
        begun += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    for token in tl.static_range(TOKENS):
        total = begun
        for tap in tl.static_range(WIDTH):
            total += inputs[token + tap].to(tl.float32) * weights[tap]
        t = (start + token).to(tl.int64)
        to = out_ptr + t * CHANNELS + c
        y = silu(total) if SILU else total
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask & (t < end))
    if kept >= 0 and tl.program_id(2) == 0:
        kept_ptr = states_ptr + kept * slot_stride + c * (WIDTH - 1)
        for tap in tl.static_range(WIDTH - 1):
            s = end - (WIDTH - 1) + tap
            last = _input_before(x_ptr, state_ptr, s, first, is_known, x_stride, c, mask, WIDTH)
            tl.store(kept_ptr + tap, last.to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"])
def _keep_inputs(
    x_ptr,
    states_ptr,
    blocks_ptr,
    runs_ptr,
    x_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    run_ptr = runs_ptr + tl.program_id(0) * RUN
    slot = tl.load(run_ptr + 2).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(blocks_ptr + tl.load(run_ptr) * 4)
    end = tl.load(blocks_ptr + (tl.load(run_ptr + 1) - 1) * 4 + 1)
    is_known = tl.load(run_ptr + 3) > 0
    c = tl.program_id(1) * PART + tl.arange(0, PART)
    mask = c < CHANNELS
    state_ptr = states_ptr + slot * slot_stride
    for tap in tl.static_range(WIDTH - 1):
        # a short run keeps some old inputs: here a later one, which the same thread has not
        # overwritten yet
        s = end - (WIDTH - 1) + tap
        x = _input_before(x_ptr, state_ptr, s, first, is_known, x_stride, c, mask, WIDTH)
        at = state_ptr + c * (WIDTH - 1) + tap
        tl.store(at, x.to(states_ptr.dtype.element_ty), mask=mask)


def launch_conv_blocks(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    blocks: Tensor,
    runs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
) -> None:
    """See ``minisgl_backend.kernels.causal_conv.causal_conv_runs``."""
    channels, width = weight.shape
    assert states[0].is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    part, tokens = 512, 16
    _conv_blocks[(len(blocks), triton.cdiv(channels, part), BLOCK // tokens)](
        out,
        x,
        states,
        blocks,
        runs,
        weight,
        bias,
        x.stride(0),
        states.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        BIAS=bias is not None,
        SILU=silu,
        TOKENS=tokens,
        PART=part,
        num_warps=4,
    )
    part = 256
    _keep_inputs[(len(runs), triton.cdiv(channels, part))](
        x,
        states,
        blocks,
        runs,
        x.stride(0),
        states.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        PART=part,
        num_warps=4,
    )
