"""A model's memory for LoRA adapters: slots, and what is written to them.

A rank holds the same part of each adapter as of the adapted weights: A is split like their inputs,
B like their outputs. An adapter travels to the ranks as one flat tensor, whole and in the model's
dtype (``AdapterShape``). For each *target*, a kind of projection such as ``q_proj``, it has first A
[num_layers, rank, in_features], then B [num_layers, out_features, rank], which includes the
scaling. Projections that the adapter leaves out are 0.

Must not know files, requests or which slot an adapter gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.adapters import RANK_STEP, AdapterMemory
from minisgl_backend.layers.feed_forward import GatedMLP, LimitedMLP, UngatedMLP
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.weight_place import Share
from minisgl_backend.models.adapter_files import AdapterFile, Projection
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.token_mixing import SelfAttention


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The size of an adapter: the largest rank of its projections, and its targets, bit i for the
    i-th of the model."""

    rank: int
    targets: int


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """The projections of one kind, one layer after another, and this rank's part of each.

    ``a`` [num_layers, num_slots, max_rank, inputs] and ``b`` [num_layers, num_slots, outputs,
    max_rank] are views of the kind's part of the memory of its matrices.
    """

    names: tuple[str, ...]
    ins: Share
    outs: Share
    a: Tensor
    b: Tensor

    def shapes(self, rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of A and B, over all layers."""
        num_layers = len(self.names)
        return (num_layers, rank, self.ins.total), (num_layers, self.outs.total, rank)


class AdapterSlots:
    """Slots 1 .. ``num_slots``, each for an adapter of up to ``max_rank``; 0 stands for none."""

    def __init__(self, model: Decoder, num_slots: int, max_rank: int, device: torch.device):
        """Allocates the memory, and gives it to the model's layers."""
        self.num_slots = num_slots
        self.max_rank = max_rank
        padded = self.padded_rank(max_rank)
        self.names = model.spec.names
        self.dtype, self._device = model.dtype, device
        self._stacks: list[Tensor] = []
        self._targets: list[_Target] = []
        for linears in _alike(model):
            first, num_layers = linears[0].matrix, len(linears)
            widths = tuple(share.size for share in first.parts.values())
            shape_a = num_layers, num_slots, len(widths) * padded, first.ins.size
            a = torch.zeros(shape_a, dtype=model.dtype, device=device)
            shape_b = num_layers, num_slots, sum(widths), padded
            b = torch.zeros(shape_b, dtype=model.dtype, device=device)
            self._stacks += [a, b]
            for layer, linear in enumerate(linears):
                linear.adapters = AdapterMemory(a[layer], b[layer], widths)
            for part, (name, outs) in enumerate(first.parts.items()):
                names = tuple(list(linear.matrix.parts)[part] for linear in linears)
                rows = first.rows[name]
                of_part = slice(part * padded, (part + 1) * padded)
                target = _Target(names, first.ins, outs, a[:, :, of_part], b[:, :, rows])
                self._targets.append(target)

    @property
    def num_bytes(self) -> int:
        """The memory that this rank's slots take."""
        return sum(stack.nbytes for stack in self._stacks)

    @property
    def projections(self) -> Mapping[str, Projection]:
        """What adapters may add to, by its name in the checkpoint."""
        return {
            name: Projection(target.ins.total, target.outs.total)
            for target in self._targets
            for name in target.names
        }

    def padded_rank(self, rank: int) -> int:
        """The rank that kernels compute for an adapter of this ``rank``."""
        return -(-rank // RANK_STEP) * RANK_STEP

    def shape_of(self, file: AdapterFile) -> AdapterShape:
        """The size of an adapter."""
        targets = sum(
            1 << index
            for index, target in enumerate(self._targets)
            if not file.factors.keys().isdisjoint(target.names)
        )
        return AdapterShape(file.rank, targets)

    def pack(self, file: AdapterFile) -> Tensor:
        """An adapter as it travels, on the host.

        Raises ``ConfigError`` if it cannot be read, or for numbers that are not finite or too large
        for the dtype. An adapter has hundreds of small tensors, and a PyTorch operation waits for
        all its threads, which a busy machine runs late. So these tensors are only copied, and what
        is computed takes few operations.
        """
        tensors, shape = list(file.tensors()), self.shape_of(file)
        is_alike = all(a.dtype == b.dtype == self.dtype for _, a, b in tensors)
        dtype = self.dtype if is_alike else torch.float32
        flat = torch.zeros(self.num_elements(shape), dtype=dtype)
        parts = list(self._parts(shape, flat))
        places = {
            name: (a[layer], b[layer])
            for target, a, b in parts
            for layer, name in enumerate(target.names)
        }
        for name, a, b in tensors:
            to_a, to_b = places[name]
            _copy(to_a[: len(a)], a)
            _copy(to_b[:, : len(a)], b)
        scalings = {name: factors.scaling for name, factors in file.factors.items()}
        for target, _, b in parts:
            of_layers = {
                layer: scalings[name] for layer, name in enumerate(target.names) if name in scalings
            }
            if len(set(of_layers.values())) == 1:
                b *= of_layers.popitem()[1]
            else:
                for layer, scaling in of_layers.items():
                    b[layer] *= scaling
        flat = flat.to(self.dtype)
        if len(flat) and not all(map(math.isfinite, flat.aminmax())):
            raise ConfigError(file.complaint(self.dtype))
        return flat

    def num_elements(self, shape: AdapterShape) -> int:
        """The length of the flat tensor of an adapter."""
        return sum(
            a[0] * a[1] * a[2] + b[0] * b[1] * b[2]
            for a, b in (target.shapes(shape.rank) for target in self._of(shape))
        )

    def empty(self, shape: AdapterShape) -> Tensor:
        """Room for an adapter on the device, in its flat form."""
        return torch.empty(self.num_elements(shape), dtype=self.dtype, device=self._device)

    def write(self, slot: int, shape: AdapterShape, flat: Tensor) -> None:
        """Put an adapter, on the device, into a slot."""
        for stack in self._stacks:
            stack[:, slot - 1].zero_()
        for target, a, b in self._parts(shape, flat):
            ins, outs = target.ins, target.outs
            target.a[:, slot - 1, : shape.rank] = a[:, :, ins.start : ins.end]
            target.b[:, slot - 1, :, : shape.rank] = b[:, outs.start : outs.end]

    def _of(self, shape: AdapterShape) -> Iterator[_Target]:
        for index, target in enumerate(self._targets):
            if shape.targets >> index & 1:
                yield target

    def _parts(self, shape: AdapterShape, flat: Tensor) -> Iterator[tuple[_Target, Tensor, Tensor]]:
        """Each target, with views of its A and B."""
        begin = 0
        for target in self._of(shape):
            views = []
            for of_factor in target.shapes(shape.rank):
                end = begin + of_factor[0] * of_factor[1] * of_factor[2]
                views.append(flat[begin:end].view(of_factor))
                begin = end
            yield target, views[0], views[1]


def _copy(to: Tensor, values: Tensor) -> None:
    """Copy by this thread alone, if NumPy knows the types."""
    if to.dtype == values.dtype and to.itemsize == 2:
        to, values = to.view(torch.int16), values.view(torch.int16)
    if torch.bfloat16 in (to.dtype, values.dtype):
        to.copy_(values)
    else:
        np.copyto(to.numpy(), values.numpy())


def _alike(model: Decoder) -> list[Sequence[MergedColumnLinear | RowLinear]]:
    """The linear layers of attention, plain feed-forward blocks and shared experts, over all
    decoder layers but an MTP layer, with those of the same kind together. Other layers take no
    adapters."""
    found: dict[tuple[object, ...], list[MergedColumnLinear | RowLinear]] = {}
    for layer in model.main_layers:
        for part in layer.modules():
            if not isinstance(part, (SelfAttention, GatedMLP, LimitedMLP, UngatedMLP)):
                continue
            for name, module in part.named_children():
                if isinstance(module, (MergedColumnLinear, RowLinear)):
                    matrix = module.matrix
                    key = name, *matrix.parts.values(), matrix.ins
                    found.setdefault(key, []).append(module)
    return list(found.values())
