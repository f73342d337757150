"""Root mean square normalization (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.layers.slot import Slot, whole


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, any shape; computed in float32 at least."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.size = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.size, self.weight, self.eps)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        yield "weight", whole(self.weight)
