"""Token mixing by a recurrent state: Mamba 2 (arXiv 2405.21060), as in Nemotron-H.

The state of a row is a convolution's last inputs and a matrix per head (``LayerStates``). It lies
in the slot that ``RecurrentRows`` names, and is as large after a million tokens as after one. Knows
the names of the checkpoint and how heads are split over ranks. Must not know which slot is whose.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.mamba import (
    MambaInputs,
    MambaWeights,
    mamba_checks,
    mamba_runs,
    mamba_step,
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
    kv_head_share,
)
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.recurrent_spec import MambaSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import StepContext
from minisgl_backend.parallel.group import Group


class _NormAcrossRanks:
    """The norm over the heads of a group of which each rank has some."""

    def __init__(self, shape: MambaSpec, eps: float, group: Group):
        self._num_groups, self._size, self._eps = shape.num_groups, shape.inner_size, eps
        self._group = group

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` [num_tokens, this rank's values], normalized."""
        wide, groups = at_least_float32(x), self._num_groups
        own = self._group.rank * groups // self._group.size
        squares = torch.zeros(len(x), groups, dtype=wide.dtype, device=x.device)
        squares[:, own] = wide.square().sum(dim=1)
        mean = self._group.all_reduce(squares)[:, own] * (groups / self._size)
        return (wide * torch.rsqrt(mean + self._eps)[:, None] * weight).to(x.dtype)


class MambaMixer(RecurrentMixer):
    """The layer (``TokenMixer``), with this rank's heads.

    One projection gives z, the gate of the output; x, the values; B and C, by which states are
    written and read, for each group of heads; and the steps dt. If there are more ranks than
    groups, neighbouring ranks hold the same group's B and C.
    """

    def __init__(self, spec: ModelSpec, layer: int, group: Group, matrices: Matrices):
        super().__init__()
        shape = spec.recurrent
        assert isinstance(shape, MambaSpec)
        self.local = shape.of_rank(group.size)
        inner = even_share(shape.inner_size, group, "the values of Mamba's heads")
        groups = kv_head_share(shape.num_groups, shape.state_size, group)
        heads = even_share(shape.num_heads, group, "the heads of Mamba")
        self._shares = {"x": inner, "b": groups, "c": groups}
        name = f"model.layers.{layer}.mamba"
        inputs = {f"in_proj_{part}": share for part, share in self._shares.items()}
        self.in_proj = MergedColumnLinear(
            name,
            spec.hidden_size,
            {"in_proj_z": inner, **inputs, "in_proj_dt": heads},
            bias=shape.bias,
            matrices=matrices,
            padded=True,
        )
        self.out_proj = RowLinear(
            f"{name}.out_proj",
            inner.total,
            spec.hidden_size,
            bias=shape.bias,
            group=group,
            matrices=matrices,
        )
        channels = self.local.num_channels
        self.conv = empty_parameter(channels, shape.conv_width)
        self.conv_bias = empty_parameter(channels) if shape.conv_bias else None
        self.log_rates, self.step_bias = empty_parameter(heads.size), empty_parameter(heads.size)
        self.skips = empty_parameter(heads.size)
        self.norm_weight = empty_parameter(inner.size) if shape.normed else None
        self.eps = spec.norms.eps
        self._inner, self._heads = inner, heads
        self._across: _NormAcrossRanks | None = None
        if shape.normed and group.size > shape.num_groups:
            self._across = _NormAcrossRanks(shape, spec.norms.eps, group)

    def _mixed(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, num_heads * head_dim]"""
        shape, rows, weights = self.local, step.recurrent, self._weights
        assert rows is not None
        first = shape.inner_size
        last = first + shape.num_channels
        projected = self.in_proj(x, pdl=step.pdl)[:, : last + shape.num_heads]
        inputs = MambaInputs(*projected.tensor_split([first, last], dim=1))
        out = torch.empty(inputs.z.shape, dtype=inputs.z.dtype, device=inputs.z.device)
        if len(slots := rows.decode_slots):
            positions = step.places.positions
            given = out, inputs, weights, self.states, slots
            if rows.checks is not None:
                mamba_checks(*given, rows.checks, positions, pdl=step.pdl)
            else:
                mamba_step(*given, positions, pdl=step.pdl)
        if rows.runs is not None:
            mamba_runs(out, inputs, weights, self.states, rows.runs)
        if self._across is None or self.norm_weight is None:
            return out
        return self._across(out, self.norm_weight)

    @property
    def _weights(self) -> MambaWeights:
        return MambaWeights(
            self.local.num_groups,
            self.conv,
            self.conv_bias,
            self.log_rates,
            self.step_bias,
            self.skips,
            self.norm_weight if self._across is None else None,
            self.eps,
            self.local.time_steps,
        )

    def places(self) -> Iterator[tuple[str, Place]]:
        # [0, num_channels) of the convolution: this rank's x, B and C
        begin = 0
        for part, share in self._shares.items():
            own = slice(begin, begin + share.size)
            shape = (share.total, 1, self.conv.shape[1])
            weight = self.conv.data[own].unsqueeze(1)
            yield f"conv_{part}.weight", WeightPlace(weight, shape, 0, share.start)
            if self.conv_bias is not None:
                bias = self.conv_bias.data[own]
                yield f"conv_{part}.bias", WeightPlace(bias, (share.total,), 0, share.start)
            begin += share.size
        of_heads = {"A_log": self.log_rates, "dt_bias": self.step_bias, "D": self.skips}
        for name, parameter in of_heads.items():
            yield name, WeightPlace(parameter.data, (self._heads.total,), 0, self._heads.start)
        if self.norm_weight is not None:
            norm, share = self.norm_weight.data, self._inner
            yield "norm.weight", WeightPlace(norm, (share.total,), 0, share.start, neutral=1.0)
        for own_name, place in self.in_proj.places():
            yield own_name.removeprefix("../"), place
        yield from collect_places(self.out_proj, "out_proj").items()
