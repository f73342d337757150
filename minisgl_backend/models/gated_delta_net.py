"""Token mixing by a recurrent state: Gated DeltaNet (arXiv 2412.06464), as Qwen3-Next has it.

The state of a row, a convolution's last inputs and a matrix a head (``LayerStates``), lies in the
slot that ``RecurrentRows`` names; it is as large after a million tokens as after one. Knows the
names of the checkpoint and how heads are split over ranks. Must not know which slot is whose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import accumulate

import torch
from torch import Tensor, nn

from minisgl_backend.kernels.gated_delta import (
    DeltaInputs,
    DeltaWeights,
    causal_conv_runs,
    causal_conv_step,
    delta_runs,
    delta_step,
)
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import Place, Share, WeightPlace, even_share, whole
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import LayerStates, StepContext
from minisgl_backend.parallel.group import Group


class GatedDeltaNet(nn.Module):
    """The layer (``TokenMixer``), with this rank's heads.

    Queries and keys have fewer heads than values; consecutive value heads share one. The projection
    of queries, keys, values and of z, the gate of the output, gives them one below the other, or
    head by head of the keys (``DeltaSpec.by_key_head``); so does that of the rates.
    """

    states: LayerStates

    def __init__(self, spec: ModelSpec, layer: int, group: Group, matrices: Matrices):
        super().__init__()
        shape = spec.delta_net
        assert shape is not None
        self.local = shape.of_rank(group.size)
        keys = even_share(shape.num_key_heads * shape.key_dim, group, "the key heads' outputs")
        values = even_share(shape.num_heads * shape.value_dim, group, "the value heads' outputs")
        heads = even_share(shape.num_heads, group, "the value heads")
        self._shares = {"q": keys, "k": keys, "v": values}
        name = f"model.layers.{layer}.linear_attn"
        if shape.by_key_head:
            pairs = zip(astuple(keys), astuple(values), strict=True)
            both = Share(*(2 * (of_keys + of_values) for of_keys, of_values in pairs))
            twice = Share(*(2 * number for number in astuple(heads)))
            inputs, rates = {"in_proj_qkvz": both}, {"in_proj_ba": twice}
        else:
            inputs = {f"in_proj_{part}": share for part, share in self._shares.items()}
            inputs["in_proj_z"] = values
            rates = {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = MergedColumnLinear(
            name, spec.hidden_size, inputs, bias=False, matrices=matrices
        )
        self.rates_proj = MergedColumnLinear(
            name, spec.hidden_size, rates, bias=False, matrices=matrices
        )
        self.out_proj = RowLinear(
            f"{name}.out_proj",
            values.total,
            spec.hidden_size,
            bias=False,
            group=group,
            matrices=matrices,
        )
        self.conv = _parameter(self.local.num_channels, shape.conv_width)
        self.log_decay, self.decay_bias = _parameter(heads.size), _parameter(heads.size)
        self.norm_weight = _parameter(shape.value_dim)
        self.eps = spec.norm_eps
        self._heads = heads

    def bind(self, states: LayerStates) -> None:
        """Keep the states of rows there from now on."""
        self.states = states

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        return self.out_proj.add_to(residual, self._mixed(x, step), norm, pdl=step.pdl)

    def output(self, x: Normed, step: StepContext) -> Tensor:
        """What ``forward`` adds, [num_tokens, hidden_size]."""
        output: Tensor = self.out_proj(self._mixed(x, step), pdl=step.pdl)
        return output

    def _mixed(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, num_heads * value_dim]"""
        x = Normed(x.normalized(pdl=step.pdl))
        channels, z = self._inputs(self.in_proj(x, pdl=step.pdl))
        b, a = self._rates(self.rates_proj(x, pdl=step.pdl))
        rows, states = step.recurrent, self.states
        assert rows is not None
        weights = DeltaWeights(
            self.local.num_key_heads, self.log_decay, self.decay_bias, self.norm_weight, self.eps
        )
        convolved = torch.empty(channels.shape, dtype=channels.dtype, device=channels.device)
        mixed = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        inputs = DeltaInputs(convolved, z, a, b)
        if len(slots := rows.decode_slots):
            causal_conv_step(convolved, channels, states.conv, slots, self.conv)
            delta_step(mixed, inputs, weights, states.matrices, slots)
        if rows.runs is not None:
            causal_conv_runs(convolved, channels, states.conv, rows.runs, self.conv)
            delta_runs(mixed, inputs, weights, states.matrices, rows.runs)
        return mixed.flatten(1)

    def _inputs(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The channels of queries, keys and values, one after another [num_tokens, num_channels],
        and z [num_tokens, num_heads, value_dim]."""
        shape = self.local
        if not shape.by_key_head:
            channels, z = projected.tensor_split([shape.num_channels], dim=1)
        else:
            by_head = projected.view(len(projected), shape.num_key_heads, -1)
            ends = accumulate(
                (shape.key_dim, shape.key_dim, shape.value_size // shape.num_key_heads)
            )
            *qkv, z = (part.flatten(1) for part in by_head.tensor_split(list(ends), dim=2))
            channels = torch.cat(qkv, dim=1)
        return channels, z.reshape(len(z), shape.num_heads, shape.value_dim)

    def _rates(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """b, which each head's rate follows from, and a of its decay, [num_tokens, num_heads]."""
        shape = self.local
        if shape.by_key_head:
            by_head = projected.view(len(projected), shape.num_key_heads, 2, -1)
            b, a = (part.flatten(1).contiguous() for part in by_head.unbind(2))
        else:
            b, a = projected.chunk(2, dim=1)
        return b, a

    def places(self) -> Iterator[tuple[str, Place]]:
        # [0, num_channels) of the convolution: this rank's queries, keys and values
        begin = 0
        for part, share in self._shares.items():
            target = self.conv.data[begin : begin + share.size].unsqueeze(1)
            shape = (share.total, 1, self.conv.shape[1])
            yield f"conv_{part}.weight", WeightPlace(target, shape, 0, share.start)
            begin += share.size
        for name, parameter in (("A_log", self.log_decay), ("dt_bias", self.decay_bias)):
            yield name, WeightPlace(parameter.data, (self._heads.total,), 0, self._heads.start)
        yield "norm.weight", whole(self.norm_weight)
        for module, name in (
            (self.in_proj, ""),
            (self.rates_proj, ""),
            (self.out_proj, "out_proj."),
        ):
            for own, place in module.places():
                yield own[3:] if own.startswith("../") else f"{name}{own}", place


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
