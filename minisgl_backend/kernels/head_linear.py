"""One matrix for each head: batched GEMMs of a step's tokens, whose weights are few and small.

Multi-head latent attention has two (``models.latent_attention``). With few tokens a kernel of our
own takes them, which reads its weights before the kernel before it has ended; with more tokens they
are PyTorch's batched GEMMs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import shared_bytes, use_triton

_MOST_TOKENS: Final = 64
"""The most tokens that the kernel takes: a tile has all of them."""
_MOST_INPUTS: Final = 512
"""The most in_features: a tile has all of them."""
_LEAST_SHARED_BYTES: Final = 100 * 1024
"""Shared memory of a multiprocessor that has room for the largest tiles of x and of a weight in 16
bits."""


def head_linear(out: Tensor, x: Tensor, weight: Tensor, *, pdl: bool = False) -> None:
    """``out[:, h] = x[:, h] weight[h]^T`` for each head h.

    ``out`` [num_tokens, num_heads, out_features], ``x`` [num_tokens, num_heads, in_features], the
    last dimension of both contiguous, and ``weight`` [num_heads, out_features, in_features], which
    may be a transposed view.
    """
    num_tokens, _, in_features = x.shape
    fits = num_tokens <= _MOST_TOKENS and in_features <= _MOST_INPUTS and x.itemsize == 2
    if use_triton(x) and fits and shared_bytes(x.device) >= _LEAST_SHARED_BYTES:
        from minisgl_backend.kernels.triton_kernels.head_linear_kernel import launch_head_linear

        launch_head_linear(out, x, weight, pdl=pdl)
        return
    torch.bmm(x.transpose(0, 1), weight.mT, out=out.transpose(0, 1))
