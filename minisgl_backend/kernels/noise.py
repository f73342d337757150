"""Stateless random numbers: a function of a request's seed, a position and a token id.

So a sampled token does not depend on the rest of the batch, and there is no generator whose state a
CUDA graph would have to capture. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) turns each
(seed, position) into a key. A finalizer like MurmurHash3's turns the key and a token id into 32
bits, and these become a Gumbel variable. Adding one to each logit and taking the largest samples
from the softmax without computing it (Gumbel-max; Maddison et al., NeurIPS 2014).

Here the noise is computed on the host, its integers with NumPy, whose unsigned integers wrap as
they should. ``triton_kernels/gumbel_noise.py`` does the same in Triton, bit by bit up to the
logarithms.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
FINAL_1: Final = 0x85EBCA6B
FINAL_2: Final = 0xC2B2AE35
STEP: Final = 0x9E3779B1

_Word = TypeVar("_Word", np.uint32, np.uint64)


def keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: 64 bits for each pair of an int64 seed and an int64 position."""
    golden = np.uint64(GOLDEN)
    stream = _mix(_unsigned(seeds) + golden)
    mixed = _mix(stream + (_unsigned(positions) + np.uint64(1)) * golden)
    return torch.from_numpy(mixed.view(np.int64)).to(seeds.device)


def gumbel(key: Tensor, tokens: Tensor) -> Tensor:
    """float32 Gumbel variables of int64 keys and int64 token ids, broadcast together."""
    of_key, of_token = _unsigned(key), _unsigned(tokens).astype(np.uint32)
    low, high = of_key.astype(np.uint32), (of_key >> np.uint64(32)).astype(np.uint32)
    bits = _finalize(_finalize(low + of_token * np.uint32(STEP)) ^ high)
    # uniform in (0, 1), finest near 0, where the largest Gumbel variables come from
    uniform = torch.from_numpy(bits.astype(np.float32)).to(key.device)
    uniform.add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _unsigned(x: Tensor) -> npt.NDArray[np.uint64]:
    return x.cpu().numpy().astype(np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64."""
    x = _xor_shifted(x, 30) * np.uint64(MIX_1)
    x = _xor_shifted(x, 27) * np.uint64(MIX_2)
    return _xor_shifted(x, 31)


def _finalize(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """32-bit avalanche."""
    x = _xor_shifted(x, 16) * np.uint32(FINAL_1)
    x = _xor_shifted(x, 13) * np.uint32(FINAL_2)
    return _xor_shifted(x, 16)


def _xor_shifted(x: npt.NDArray[_Word], num_bits: int) -> npt.NDArray[_Word]:
    return x ^ (x >> x.dtype.type(num_bits))
