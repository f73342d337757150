"""Token mixing by a gated short convolution, as in LFM2.

The state of a row is the convolution's last inputs (``LayerStates``, without matrices). It lies in
the slot that ``RecurrentRows`` names. Knows the names of the checkpoint and how channels are split
over ranks. Must not know which slot is whose.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minisgl_backend.kernels.short_conv import (
    ShortConvInputs,
    short_conv_checks,
    short_conv_runs,
    short_conv_step,
)
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import (
    Place,
    WeightPlace,
    collect_places,
    empty_parameter,
    even_share,
)
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.recurrent_spec import ConvSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import StepContext
from minisgl_backend.parallel.group import Group


class ShortConv(RecurrentMixer):
    """The layer (``TokenMixer``), with this rank's channels."""

    def __init__(self, spec: ModelSpec, layer: int, group: Group, matrices: Matrices):
        super().__init__()
        shape = spec.recurrent
        assert isinstance(shape, ConvSpec)
        self._channels = even_share(shape.num_channels, group, "the channels of short convolutions")
        name = f"model.layers.{layer}.conv"
        self.in_proj = MergedColumnLinear(
            name,
            spec.hidden_size,
            {f"in_proj_{part}": self._channels for part in ("b", "c", "x")},
            bias=shape.bias,
            matrices=matrices,
            padded=True,
        )
        self.out_proj = RowLinear(
            f"{name}.out_proj",
            shape.num_channels,
            spec.hidden_size,
            bias=shape.bias,
            group=group,
            matrices=matrices,
        )
        self.conv = empty_parameter(self._channels.size, shape.conv_width)
        self.conv_bias = empty_parameter(self._channels.size) if shape.bias else None

    def output(self, x: Normed, step: StepContext) -> Tensor:
        """What ``forward`` adds to the residual stream, [num_tokens, hidden_size], for layers that
        change it first."""
        output: Tensor = self.out_proj(Normed(self._mixed(x, step)), pdl=step.pdl)
        return output

    def _mixed(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, this rank's channels]"""
        rows, size = step.recurrent, self._channels.size
        assert rows is not None
        projected = self.in_proj(x, pdl=step.pdl)[:, : 3 * size]
        inputs = ShortConvInputs(*projected.split(size, dim=1))
        out = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
        weights, states = (self.conv, self.conv_bias), self.states
        if rows.runs is not None:  # first, since this also writes zeros for the other tokens
            short_conv_runs(out, inputs, *weights, states.conv, rows.runs)
        if len(slots := rows.decode_slots):
            if rows.checks is not None:
                short_conv_checks(out, inputs, *weights, states, slots, rows.checks)
            else:
                short_conv_step(out, inputs, *weights, states.conv, slots, pdl=step.pdl)
        return out

    def places(self) -> Iterator[tuple[str, Place]]:
        share, width = self._channels, self.conv.shape[1]
        weight, shape = self.conv.data.unsqueeze(1), (share.total, 1, width)
        yield "conv.weight", WeightPlace(weight, shape, 0, share.start)
        if self.conv_bias is not None:
            yield "conv.bias", WeightPlace(self.conv_bias.data, (share.total,), 0, share.start)
        for name, place in self.in_proj.places():
            yield name.removeprefix("../"), place
        yield from collect_places(self.out_proj, "out_proj").items()
