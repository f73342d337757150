"""Mamba 2 for decode steps: one token per row, in two launches:

    _step           the convolution and the state, which a program reads and writes once for some
                    of a head's values
    _gated_norm     the gate and the norm of the output; and the convolution's inputs of B and C,
                    which all programs of a group have read by then

Slots may be padding (``minisgl_backend.kernels.mamba``), whose programs end at once.

Names of dimensions: P of a head, N of a state, padded to a power of two (NP).
"""

import math
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.conv_step import (
    conv_begun,
    conv_ended,
    keep_inputs_of_token,
)
from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import stored
from minisgl_backend.kernels.triton_kernels.mamba_blocks import gated, step_of
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_FEW_ROWS: Final = 8
"""Up to this many rows, a program takes fewer values of a head."""


@triton.jit
def _biased(begun, bias_ptr, c, mask, BIAS: tl.constexpr):
    """The sum that a convolution has begun, with the bias of channels ``c``."""
    if BIAS:
        begun += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    return begun


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "steps_ptr"])
def _step(
    out_ptr,
    channels_ptr,
    steps_ptr,
    conv_ptr,
    conv_bias_ptr,
    log_rates_ptr,
    bias_ptr,
    skips_ptr,
    inputs_ptr,
    states_ptr,
    slots_ptr,
    channels_stride,
    steps_stride,
    inputs_stride,
    states_stride,
    LOWEST: tl.constexpr,  # step
    HIGHEST: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    PART: tl.constexpr,  # values of a program
    WIDTH: tl.constexpr,  # of the convolution
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows' slots and states were written before the step or at its beginning. So they are read
    # before the wait, bypassing the first-level cache.
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    p, n = tl.program_id(0) * PART + tl.arange(0, PART), tl.arange(0, NP)
    in_p, in_n = p < P, n < N
    at = states_ptr + slot * states_stride + head * (P * N) + p[:, None] * N + n[None, :]
    in_state = in_p[:, None] & in_n[None, :]
    state = tl.load(at, mask=in_state, other=0.0, cache_modifier=".cg").to(tl.float32)  # [PART, NP]
    group = head // (HEADS // GROUPS)
    of_x = head * P + p
    of_b = HEADS * P + group * N + n
    of_c = of_b + GROUPS * N
    row_inputs = inputs_ptr + slot * inputs_stride
    x_begun, x_own, x_stay = conv_begun(row_inputs, conv_ptr, of_x, in_p, WIDTH)
    b_begun, b_own, _ = conv_begun(row_inputs, conv_ptr, of_b, in_n, WIDTH)
    c_begun, c_own, _ = conv_begun(row_inputs, conv_ptr, of_c, in_n, WIDTH)
    x_begun = _biased(x_begun, conv_bias_ptr, of_x, in_p, BIAS)
    b_begun = _biased(b_begun, conv_bias_ptr, of_b, in_n, BIAS)
    c_begun = _biased(c_begun, conv_bias_ptr, of_c, in_n, BIAS)
    log_rate, bias = tl.load(log_rates_ptr + head), tl.load(bias_ptr + head)
    skip = tl.load(skips_ptr + head).to(tl.float32)
    if PDL:
        wait_previous()
    token = channels_ptr + row * channels_stride
    x_input = tl.load(token + of_x, mask=in_p, other=0.0)
    b_input = tl.load(token + of_b, mask=in_n, other=0.0)
    c_input = tl.load(token + of_c, mask=in_n, other=0.0)
    step = step_of(tl.load(steps_ptr + row * steps_stride + head), bias, LOWEST, HIGHEST)
    x = conv_ended(x_begun, x_own, x_input)
    b = conv_ended(b_begun, b_own, b_input)
    c = conv_ended(c_begun, c_own, c_input)
    decay = tl.exp(-tl.exp(log_rate.to(tl.float32)) * step)
    state = state * decay + (x * step)[:, None] * b[None, :]
    found = tl.sum(state * c[None, :], axis=1) + skip * x
    tl.store(at, stored(state, states_ptr.dtype.element_ty), mask=in_state)
    to = out_ptr + (row * HEADS + head) * P + p
    tl.store(to, found.to(out_ptr.dtype.element_ty), mask=in_p)
    tl.debug_barrier()  # every warp may have read the inputs that one of them replaces
    keep_inputs_of_token(row_inputs, x_stay, x_input, of_x, in_p, WIDTH, True)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "steps_ptr"])
def _gated_norm(
    out_ptr,
    z_ptr,
    channels_ptr,
    norm_ptr,
    inputs_ptr,
    slots_ptr,
    z_stride,
    channels_stride,
    inputs_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # values of a group
    NORMS: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, padded to a power of two
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    i = group * SIZE + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < SIZE
    if PDL:
        wait_previous()
    if slot < 0:
        return
    at = out_ptr + row * (GROUPS * SIZE) + i
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + i, mask=inside, other=0.0).to(tl.float32)
    x = gated(x, z, norm_ptr, i, inside, eps, SIZE, NORMS)
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)
    n = tl.arange(0, NP)
    row_inputs, token = inputs_ptr + slot * inputs_stride, channels_ptr + row * channels_stride
    for part in tl.static_range(2):  # B, C
        c = (GROUPS * SIZE + (part * GROUPS + group) * N) + n
        own = tl.load(token + c, mask=n < N, other=0.0)
        keep_inputs_of_token(row_inputs, (), own, c, n < N, WIDTH, False)


def launch_mamba_step(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    conv: tuple[Tensor, Tensor | None],
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    states: tuple[Tensor, Tensor],
    slots: Tensor,
    *,
    num_groups: int,
    eps: float,
    time_steps: tuple[float, float],
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.mamba.mamba_step``. ``inputs``: the fields of ``MambaInputs``;
    ``conv``: the convolution's weight and bias; ``weights``: the decay's log rates, the biases of
    steps, d, and the norm's weight; ``states``: the fields of a ``LayerStates``."""
    (z, channels, steps), (kept, matrices) = inputs, states
    (weight, bias), (log_rates, step_bias, skips, norm) = conv, weights
    num_rows, (num_heads, head_dim, state_size) = len(slots), matrices.shape[1:]
    if num_rows == 0:
        return
    assert all(of.is_contiguous() for of in (out, weight, kept[0], matrices[0]))
    assert z.stride(1) == channels.stride(1) == steps.stride(1) == 1
    assert kept.shape[2] == weight.shape[1] - 1
    padded, width = triton.next_power_of_2(state_size), weight.shape[1]
    # with few rows programs are short of work; with many they read B and C again less often
    part = 16 if num_rows <= _FEW_ROWS else 32
    _step[(triton.cdiv(head_dim, part), num_heads, num_rows)](
        out,
        channels,
        steps,
        weight,
        bias,
        log_rates,
        step_bias,
        skips,
        kept,
        matrices,
        slots,
        channels.stride(0),
        steps.stride(0),
        kept.stride(0),
        matrices.stride(0),
        LOWEST=time_steps[0],
        HIGHEST=None if math.isinf(time_steps[1]) else time_steps[1],
        GROUPS=num_groups,
        HEADS=num_heads,
        P=head_dim,
        N=state_size,
        NP=padded,
        PART=part,
        WIDTH=width,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4 if part * padded <= 4096 else 8,
        **launch_options(pdl),
    )
    size = num_heads * head_dim // num_groups
    block = triton.next_power_of_2(size)
    _gated_norm[(num_groups, num_rows)](
        out,
        z,
        channels,
        norm,
        kept,
        slots,
        z.stride(0),
        channels.stride(0),
        kept.stride(0),
        eps,
        GROUPS=num_groups,
        SIZE=size,
        NORMS=norm is not None,
        N=state_size,
        NP=padded,
        BLOCK=block,
        WIDTH=width,
        PDL=pdl,
        num_warps=4 if block < 4096 else 8,
        **launch_options(pdl),
    )
