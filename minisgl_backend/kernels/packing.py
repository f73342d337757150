"""16-bit weights, packed for GEMMs on a CPU.

oneDNN, PyTorch's library for these, rearranges a weight that is stored row by row inside each GEMM.
For few tokens that takes as long as multiplying. A packed weight is rearranged once. Its shape,
dtype and values stay the same. Its memory is opaque, and only ``packed_linear`` computes with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_packable(weight: Tensor) -> bool:
    """Whether packing pays. It does not on a GPU, in 32 bits, or if the processor lacks
    instructions for the dtype."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def packed(weight: Tensor) -> Tensor:
    """``weight`` [out_features, in_features], which ``is_packable``, in oneDNN's layout for one
    token, which also works for more tokens."""
    in_blocks: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return in_blocks


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, [num_tokens, out_features], with a ``packed`` weight."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
