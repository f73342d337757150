"""Matrix products, whole or split over the ranks of a group.

Column-parallel layers hold a slice of the outputs, row-parallel ones a slice of the inputs and sum
over the ranks, as Megatron-LM does (arXiv 1909.08053). With one rank both are a plain product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.layers.share import Share, even_share
from minisgl_backend.layers.weight_place import WeightPlace
from minisgl_backend.parallel.group import Group


def lay_out_by_input(parameter: nn.Parameter) -> None:
    """Store a [.., out, in] weight with its inputs outermost in memory. Its shape stays the same.

    On a CPU this suits products of few tokens with weights that are not in the processor's cache:
    they take a third to two thirds of the time. To be called before the weight is filled.
    """
    parameter.data = parameter.data.mT.contiguous().mT


class MergedColumnLinear(nn.Module):
    """Several projections of the same input as one product, each of them split over the ranks.

    ``parts`` maps the checkpoint's name of each projection to this rank's share of its outputs.
    [num_tokens, in_features] -> [num_tokens, sum of the shares], in the order of the parts.
    """

    def __init__(self, in_features: int, parts: Mapping[str, Share], *, bias: bool):
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(share.size for share in parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        begin = 0
        for name, share in self.parts.items():
            held = slice(begin, begin + share.size)
            weight = self.weight.data[held]
            full = (share.total, weight.shape[1])
            yield f"../{name}.weight", WeightPlace(weight, full, 0, share.start)
            if self.bias is not None:
                bias = self.bias.data[held]
                yield f"../{name}.bias", WeightPlace(bias, (share.total,), 0, share.start)
            begin += share.size


class RowLinear(nn.Module):
    """A product whose inputs are split over the ranks: [num_tokens, share] -> [num_tokens, out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, group: Group):
        super().__init__()
        self.group = group
        self.inputs = even_share(in_features, group, "the inputs of a row-parallel layer")
        self.weight = nn.Parameter(torch.empty(out_features, self.inputs.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # only one rank adds the bias, or the sum over the ranks would contain it several times
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(F.linear(x, self.weight, bias))

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        out_features = len(self.weight)
        full = (out_features, self.inputs.total)
        yield "weight", WeightPlace(self.weight.data, full, 1, self.inputs.start)
        if self.bias is not None:
            yield "bias", WeightPlace(self.bias.data, (out_features,))
