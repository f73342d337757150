"""Stateless random numbers: a function of a request's seed, a position and a token id.

So a sampled token does not depend on the rest of the batch, and there is no generator whose state a
CUDA graph would have to capture. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) makes a key of each
(seed, position); a finalizer like MurmurHash3's makes 32 bits of the key and a token id, and these
become a Gumbel variable. Adding one to each logit and taking the largest samples from the softmax
without computing it (Gumbel-max; Maddison et al., NeurIPS 2014).

``triton_kernels/gumbel_noise.py`` does the same in Triton, bit by bit up to the logarithms.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
FINAL_1: Final = 0x85EBCA6B
FINAL_2: Final = 0xC2B2AE35
STEP: Final = 0x9E3779B1
_LOW: Final = 0xFFFFFFFF


def keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64[n], 64 bits for each pair of int64 seed and position."""
    stream = _mix(seeds.long() + _signed(GOLDEN))
    return _mix(stream + (positions.long() + 1) * _signed(GOLDEN))


def gumbel(key: Tensor, tokens: Tensor) -> Tensor:
    """float32 Gumbel variables of int64 keys and int64 token ids, broadcast together."""
    low, high = key & _LOW, (key >> 32) & _LOW
    bits = _finalize((low + tokens * STEP) & _LOW)
    bits = _finalize(bits ^ high)
    # uniform in (0, 1), finest near 0, where the largest Gumbel variables come from
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64, which wraps as uint64 does when multiplied."""
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * _signed(MIX_1)
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * _signed(MIX_2)
    return x ^ ((x >> 31) & (1 << 33) - 1)


def _finalize(x: Tensor) -> Tensor:
    """32-bit avalanche; argument and result are int64 in [0, 2^32)."""
    x = (x ^ (x >> 16)).mul_(FINAL_1).bitwise_and_(_LOW)
    x = (x ^ (x >> 13)).mul_(FINAL_2).bitwise_and_(_LOW)
    return x ^ (x >> 16)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
