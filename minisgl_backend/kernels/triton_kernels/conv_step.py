"""The causal convolution of layers with recurrent states for one token of a row: parts of kernels
for decode steps, which do more than this (``gated_delta_step``, ``mamba_step``).
"""

import triton
import triton.language as tl

from minisgl_backend.kernels.triton_kernels.recurrent_math import silu


@triton.jit
def conv_begun(state_ptr, weight_ptr, c, mask, WIDTH: tl.constexpr):
    """For channels ``c``: the convolution's sum over the inputs before the token's own, the weight
    of the token's own input, and the inputs to keep, which are all but the oldest."""
    total = tl.zeros_like(c).to(tl.float32)
    stay = ()
    for tap in tl.static_range(WIDTH - 1):
        old = tl.load(state_ptr + c * (WIDTH - 1) + tap, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + c * WIDTH + tap, mask=mask, other=0.0)
        total += old.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            stay += (old,)  # type: ignore[assignment]  # Triton takes no annotation of a tuple
    own = tl.load(weight_ptr + c * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    return total, own, stay


@triton.jit
def conv_ended(begun, own, x):
    """The convolution, completed with the token's own input ``x`` and rounded to its type."""
    return silu(begun + own * x.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def keep_inputs_of_token(state_ptr, stay, x, c, mask, WIDTH: tl.constexpr, FEW: tl.constexpr):
    """Drop the oldest input of channels ``c``, and keep the inputs ``stay`` and ``x``."""
    at = state_ptr + c * (WIDTH - 1)
    for tap in tl.static_range(1, WIDTH - 1):
        if FEW:
            tl.store(at + tap - 1, stay[tap - 1], mask=mask)
        else:
            # a place is read and written by the same thread
            tl.store(at + tap - 1, tl.load(at + tap, mask=mask, other=0.0), mask=mask)
    tl.store(at + WIDTH - 2, x.to(state_ptr.dtype.element_ty), mask=mask)
