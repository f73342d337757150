"""Root mean square normalization (arXiv 1910.07467), of hidden states and of heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from minisgl_backend.layers.weight_place import WeightPlace, whole


class RMSNorm(nn.Module):
    """The weight of x / rms(x) * weight over hidden states; ``kernels.rms_norm`` computes it."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        yield "weight", whole(self.weight)


class HeadNorm(nn.Module):
    """The weights of such a norm over each head of queries, and of keys: ``q`` and ``k``
    [head_dim]."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.q = nn.Parameter(torch.empty(head_dim), requires_grad=False)
        self.k = nn.Parameter(torch.empty(head_dim), requires_grad=False)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        yield "../q_norm.weight", whole(self.q)
        yield "../k_norm.weight", whole(self.k)
