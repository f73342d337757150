"""``kernels.noise`` in Triton."""

import math

import triton
import triton.language as tl

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.dispatch import is_interpreted

_GOLDEN = tl.constexpr(noise.GOLDEN)
_MIX_1 = tl.constexpr(noise.MIX_1)
_MIX_2 = tl.constexpr(noise.MIX_2)
_FINAL_1 = tl.constexpr(noise.FINAL_1)
_FINAL_2 = tl.constexpr(noise.FINAL_2)
_STEP = tl.constexpr(noise.STEP)
_LN_2 = tl.constexpr(math.log(2))
_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def noise_key(seed, position):
    """uint64 of an int64 seed and an integer position."""
    golden = tl.full([], _GOLDEN, tl.uint64)
    stream = _mix(seed.to(tl.uint64) + golden)
    return _mix(stream + (position.to(tl.uint64) + 1) * golden)


@triton.jit
def gumbel(key, token):
    """float32 Gumbel variables of one key and a block of token ids."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    bits = _finalize(low + token.to(tl.uint32) * tl.full([], _STEP, tl.uint32))
    bits = _finalize(bits ^ high)
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = uniform * (1 + uniform * (0.5 + uniform * (1 / 3)))
    large = -_log(1 - tl.minimum(uniform, 0.99999994))
    return -_log(tl.where(uniform < 0.015625, small, large))


@triton.jit
def _log(x):
    """The logarithm of a float32, to 2^-22, in one instruction; tl.log takes some thirty."""
    if _INTERPRETED:
        return tl.log(x)
    else:
        return _LN_2 * tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full([], _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _finalize(x):
    x = (x ^ (x >> 16)) * tl.full([], _FINAL_1, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], _FINAL_2, tl.uint32)
    return x ^ (x >> 16)
