"""Elementary functions of the kernels of recurrent layers, whatever their kind."""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def between(decays, causal):
    """How much decays from the column's token to the row's, given all ``decays`` since a block
    began; 0 unless ``causal``."""
    return tl.exp(tl.where(causal, decays[:, None] - decays[None, :], float("-inf")))


@triton.jit
def stored(state, kind: tl.constexpr):
    """See ``minisgl_backend.kernels.layer_states.stored``."""
    if kind == tl.float16:
        state = tl.clamp(state, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return state.to(kind)
