"""The places of one projection of all experts, if the checkpoint stores it as one tensor.

A ``StackedPlace`` takes quantized weights, an ``InterleavedPlace`` plain weights and biases. Both
read the layouts of gpt-oss, in which the outputs of gates and ups alternate. Must not know routers,
or what is computed with a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.quantized import QuantizedWeight, dequantize
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import Place, ReadTensor, Share, StoredTensor
from minisgl_backend.layers.weight_share import WeightShare, block_of, held
from minisgl_backend.weight_format import GROUP_OF_MX, Layout, WeightFormat


@dataclass(frozen=True, slots=True, eq=False)
class StackedPlace:
    """The place of one projection of all experts, in the layout of gpt-oss (``Place``):

        NAME_blocks [experts, out, in / 32, 16], the even input in the low half of a byte
        NAME_scales [experts, out, in / 32], exponents

    With ``pairs``, rows of gates and ups alternate, and ``put`` gets the share's gates and then its
    ups. Its first argument is the expert, counted among those that the rank holds.
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
                shapes=((*shape, GROUP_OF_MX // 2),),
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
        begin = ins.start % GROUP_OF_MX // 2
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
    ``pairs``, ``outs`` is the share of both gates and ups."""
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


@dataclass(frozen=True, slots=True, eq=False)
class InterleavedPlace:
    """The place of the plain weights, or of the biases, of one projection of all experts, in the
    layout of gpt-oss (``Place``):

        weights [experts, ins, outs * num_parts]        biases [experts, outs * num_parts]

    The outputs of several parts alternate. ``target`` [experts.size, num_parts * outs.size,
    ins.size] has one part after another; without ``ins`` these are biases.
    """

    target: Tensor
    experts: Share
    outs: Share
    num_parts: int
    ins: Share | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        inputs = () if self.ins is None else (self.ins.total,)
        return self.experts.total, *inputs, self.num_parts * self.outs.total

    @property
    def device(self) -> torch.device:
        return self.target.device

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        own = name.rpartition(".")[2]
        return {"weight": StoredTensor(names=(own,), shapes=(self.shape,), region=self._region)}

    def fill(self, found: Mapping[str, ReadTensor]) -> None:
        self._store(found["weight"].values)

    def draw(self, whole: Tensor) -> None:
        self._store(whole[self._region])

    def _store(self, interleaved: Tensor) -> None:
        """``interleaved`` [experts.size, ins.size, outs.size * num_parts]."""
        for target, given in zip(self.target, interleaved, strict=True):  # one expert at a time
            apart = given.unflatten(-1, (self.outs.size, self.num_parts))
            target.copy_(apart.permute(*reversed(range(apart.dim()))).flatten(0, 1))

    @property
    def _region(self) -> tuple[slice, ...]:
        count, outs = self.num_parts, self.outs
        inputs = () if self.ins is None else (held(self.ins),)
        return held(self.experts), *inputs, slice(count * outs.start, count * outs.end)


def check_interleaved(formats: Iterable[WeightFormat | None]) -> None:
    """Raise ``ConfigError`` for formats that interleaved tensors of all experts cannot have."""
    for form in formats:
        if form is not None and form.layout is not Layout.MX_STACKED:
            raise ConfigError(
                f"experts in {form} are not supported in this architecture, only plain ones and "
                "those of quant_method mxfp4"
            )
