"""Root mean square normalization (arXiv 1910.07467), of hidden states and of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.layers.weight_place import WeightPlace, whole


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension of any shape, computed in float32 or float64."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.size = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.size, self.weight, self.eps)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        yield "weight", whole(self.weight)


class HeadNorm(nn.Module):
    """The same over each head of queries and keys: [num_tokens, num_heads, head_dim] -> the same.

    ``parts`` maps the checkpoint's names of the weights to numbers of heads. The heads of a part
    share one weight in the checkpoint; here each head has a copy, so that one product does for all.
    """

    def __init__(self, parts: Mapping[str, int], head_dim: int, eps: float):
        super().__init__()
        self.parts = dict(parts)
        shape = sum(parts.values()), head_dim
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.size = (head_dim,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.size, None, self.eps) * self.weight

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        begin = 0
        for name, num_heads in self.parts.items():
            weight = self.weight.data[begin : begin + num_heads]
            yield f"../{name}.weight", WeightPlace(weight, self.size)  # broadcast over the heads
            begin += num_heads
