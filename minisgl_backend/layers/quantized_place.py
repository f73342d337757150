"""Where quantized weights of a checkpoint go: kept for kernels, or as plain numbers.

A ``QuantizedPlace`` is one projection's, a ``StackedPlace`` that of one projection of all experts.
Must not know what is computed with a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

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
from minisgl_backend.layers.weight_share import WeightShare, block_of, held
from minisgl_backend.weight_format import WeightFormat

_MX_GROUP: Final = 32


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


@dataclass(frozen=True, slots=True, eq=False)
class StackedPlace:
    """The place of one projection of all experts, in the layout of gpt-oss (``Place``):

        NAME_blocks [experts, out, in / 32, 16], the even input in the low half of a byte
        NAME_scales [experts, out, in / 32], exponents

    With ``pairs``, gates and ups: their rows alternate, and ``put`` gets the share's gates and then
    its ups. Its first argument is the expert, counted among those that the rank holds.
    """

    share: WeightShare
    experts: Share
    pairs: bool
    device: torch.device
    put: Callable[[int, QuantizedWeight], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts.total, self.share.outs.total, self.share.ins.total

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        self.share.check_bytes(name)
        own, outs, width = name.rpartition(".")[2], self.share.outs, self.share.width
        shape = self.experts.total, outs.total, width.total
        region = held(self.experts), held(outs), held(width)
        return {
            "codes": StoredTensor(
                names=(f"{own}_blocks",),
                shapes=((*shape, _MX_GROUP // 2),),
                dtypes=("U8",),
                region=region,
            ),
            "scales": StoredTensor(
                names=(f"{own}_scales",),
                shapes=(shape,),
                dtypes=("U8",),
                region=region,
                is_scale=True,
            ),
        }

    def fill(self, found: Mapping[str, ReadTensor]) -> None:
        ins = self.share.ins
        begin = ins.start % _MX_GROUP // 2
        for expert in range(self.experts.size):
            codes, scales = (
                found[part].values[expert].to(self.device) for part in ("codes", "scales")
            )
            codes = codes.flatten(1)[:, begin : begin + ins.size // 2]
            self._put(expert, self.share.of(codes, scales))

    def draw(self, whole: Tensor) -> None:
        for expert in range(self.experts.size):
            numbers = whole[self.experts.start + expert]
            self._put(expert, self.share.quantized(numbers[self.share.enclosing]))

    def _put(self, expert: int, weight: QuantizedWeight) -> None:
        codes, scales = weight.codes, weight.scales
        if self.pairs:
            codes, scales = (torch.cat([rows[::2], rows[1::2]]) for rows in (codes, scales))
        self.put(expert, QuantizedWeight(weight.encoding, weight.block, codes, scales))


def place_in(
    memory: Tensor | StoredWeight,
    rows: slice,
    form: WeightFormat | None,
    outs: Share,
    ins: Share,
    *,
    expert: int | None = None,
) -> Place:
    """The place of a projection in these rows of ``memory``, of one expert if it holds a stack.

    Plain memory [out, ins.size] takes numbers of any format: they are dequantized while they load.
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


def stacked_place(
    memory: Tensor | StoredWeight,
    form: WeightFormat,
    experts: Share,
    outs: Share,
    ins: Share,
    *,
    pairs: bool,
) -> Place:
    """The place of one projection of all experts, of which ``memory`` takes ``experts``. With
    ``pairs``, ``outs`` are gates as well as ups."""
    if pairs:
        outs = Share(2 * outs.total, 2 * outs.start, 2 * outs.size)

    def put(expert: int, part: QuantizedWeight) -> None:
        if isinstance(memory, StoredWeight):
            memory.put_into(slice(0, outs.size), expert)(part)
        else:
            dequantize(part, memory[expert])

    block = memory.block if isinstance(memory, StoredWeight) else block_of(form, [(0, outs)], ins)
    share = WeightShare(form, outs, ins, block)
    return StackedPlace(share, experts, pairs, memory.device, put)
