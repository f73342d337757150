"""Where a checkpoint's quantized weights go: kept for kernels, or as plain numbers.

A ``QuantizedPlace`` is for one projection; ``expert_places`` has the places of all experts
together. Must not know what is computed with a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.quantized import QuantizedWeight, dequantize
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_layouts import READERS
from minisgl_backend.layers.weight_place import (
    Place,
    ReadTensor,
    Share,
    StoredTensor,
    WeightPlace,
)
from minisgl_backend.layers.weight_share import WeightShare, block_of
from minisgl_backend.weight_format import WeightFormat


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedPlace:
    """The place of one projection's quantized weight, or of a rank's share of it (``Place``).

    ``put`` takes the share, which lies on ``device``.
    """

    share: WeightShare
    device: torch.device
    put: Callable[[QuantizedWeight], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.share.outs.total, self.share.ins.total

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        self.share.check_bytes(name)
        return READERS[self.share.form.layout].tensors(self.share)

    def fill(self, found: Mapping[str, ReadTensor]) -> None:
        here = {
            part: ReadTensor(one.name, one.values.to(self.device)) for part, one in found.items()
        }
        self.put(READERS[self.share.form.layout].read(self.share, here))

    def draw(self, whole: Tensor) -> None:
        self.put(self.share.quantized(whole[self.share.enclosing]))


def place_in(
    memory: Tensor | StoredWeight,
    rows: slice,
    form: WeightFormat | None,
    outs: Share,
    ins: Share,
    *,
    expert: int | None = None,
) -> Place:
    """The place of a projection in these rows of ``memory``, for one expert if it holds a stack.

    Plain memory [out, ins.size] takes weights of any format, which are dequantized while they load.
    """
    if isinstance(memory, StoredWeight):
        assert form is not None
        share = WeightShare(form, outs, ins, memory.block)
        return QuantizedPlace(share, memory.device, memory.put_into(rows, expert))
    target = (memory if expert is None else memory[expert])[rows]
    if form is not None:
        share = WeightShare(form, outs, ins, block_of(form, [(0, outs)], ins))

        def put(weight: QuantizedWeight) -> None:
            dequantize(weight, target)

        return QuantizedPlace(share, target.device, put)
    shape = outs.total, ins.total
    for dim, part in enumerate((outs, ins)):
        if part.size < part.total:
            return WeightPlace(target, shape, dim, part.start)
    return WeightPlace(target, shape)
