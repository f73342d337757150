"""Token mixing by a recurrent state: Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next.

``DeltaMixer`` is what it has in common with Kimi Delta Attention. The state of a row is a
convolution's last inputs and a matrix per head (``DeltaStates``). It lies in the slot that
``RecurrentRows`` names, and is as large after a million tokens as after one. Knows the names of the
checkpoint and how heads are split over ranks. Must not know which slot is whose.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl_backend.kernels.gated_delta import (
    DeltaInputs,
    DeltaStates,
    DeltaWeights,
    delta_checks,
    delta_runs,
    delta_step,
)
from minisgl_backend.kernels.layer_states import LayerStates
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import (
    Place,
    Share,
    WeightPlace,
    collect_places,
    empty_parameter,
    even_share,
    whole,
)
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.recurrent_spec import DeltaSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import StepContext
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.delta_step import DeltaStepKernel
    from minisgl_backend.kernels.cuda.linear import TensorCores


class DeltaMixer(RecurrentMixer):
    """A layer with a delta rule, and this rank's heads (``local``).

    ``in_proj`` gives what has many numbers for each head. The rates are too small to stay
    quantized: they have a projection of their own if that does, and else are part of its GEMM.
    """

    local: DeltaSpec
    states: DeltaStates
    in_proj: MergedColumnLinear
    rates_proj: MergedColumnLinear | None
    _step_kernel: DeltaStepKernel | None = None

    def bind(self, states: LayerStates) -> None:
        """Keep the states of rows in ``states`` from now on."""
        assert isinstance(states, DeltaStates)
        self.states = states

    def rounding(self, num_tokens: int) -> int | None:
        return None  # the projection of the rates reads them as they are

    def _mixed(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, num_heads * value_dim]"""
        inputs = self._inputs(x, step.pdl)
        rows, weights = step.recurrent, self._weights
        assert rows is not None
        mixed = torch.empty(inputs.z.shape, dtype=inputs.z.dtype, device=inputs.z.device)
        if len(slots := rows.decode_slots):
            kernel, positions = self._step_kernel, step.places.positions
            given = mixed, inputs, weights, self.states, slots
            if rows.checks is not None:
                delta_checks(*given, rows.checks, positions, pdl=step.pdl)
            elif kernel is not None and kernel.suits(len(slots)):
                kernel(*given, positions, pdl=step.pdl)
            else:
                delta_step(*given, positions, pdl=step.pdl)
        if rows.runs is not None:
            delta_runs(mixed, inputs, weights, self.states, rows.runs)
        return mixed.flatten(1)

    @abstractmethod
    def _inputs(self, x: Normed, pdl: bool) -> DeltaInputs:
        """What the layer projects its input to."""

    @property
    @abstractmethod
    def _weights(self) -> DeltaWeights: ...

    def _add_projections(
        self,
        name: str,
        hidden_size: int,
        inputs: Mapping[str, Share],
        rates: Mapping[str, Share],
        matrices: Matrices,
    ) -> None:
        """Make the projections of the module ``name`` of the checkpoint."""
        is_plain = not any(matrices.stays_quantized(f"{name}.{part}") for part in inputs)
        plain = replace(matrices, keep_quantized=False)
        make = partial(MergedColumnLinear, name, hidden_size, bias=False, padded=True)
        self.rates_proj = None
        if is_plain:
            self.in_proj = make({**inputs, **rates}, matrices=plain)
        else:
            self.in_proj = make(inputs, matrices=matrices)
            self.rates_proj = make(rates, matrices=plain)

    def _projected(self, x: Normed, width: int, *, pdl: bool) -> tuple[Tensor, Tensor]:
        """The first ``width`` numbers of a token, and its rates, perhaps with padding behind."""
        if self.rates_proj is None:
            projected = self.in_proj(x, pdl=pdl)
            return projected[:, :width], projected[:, width:]
        if x.squares is None:  # its norm is not half done
            x = Normed(x.normalized(pdl=pdl))  # once for both
        return self.in_proj(x, pdl=pdl)[:, :width], self.rates_proj(x, pdl=pdl)


class GatedDeltaNet(DeltaMixer):
    """The layer (``TokenMixer``), with this rank's heads.

    Queries and keys have fewer heads than values; consecutive value heads share one. A projection
    gives queries, keys, values and z, the gate of the output.
    """

    def __init__(self, spec: ModelSpec, layer: int, group: Group, matrices: Matrices):
        super().__init__()
        shape = spec.recurrent
        assert isinstance(shape, DeltaSpec)
        self.local = shape.of_rank(group.size)
        keys = even_share(shape.num_key_heads * shape.key_dim, group, "the key heads' outputs")
        values = even_share(shape.num_heads * shape.value_dim, group, "the value heads' outputs")
        heads = even_share(shape.num_heads, group, "the value heads")
        self._shares = {"q": keys, "k": keys, "v": values}
        name = f"model.layers.{layer}.linear_attn"
        inputs = {f"in_proj_{part}": share for part, share in self._shares.items()}
        inputs["in_proj_z"] = values
        rates = {"in_proj_b": heads, "in_proj_a": heads}
        self._add_projections(name, spec.hidden_size, inputs, rates, matrices)
        self.out_proj = RowLinear(
            f"{name}.out_proj",
            values.total,
            spec.hidden_size,
            bias=False,
            group=group,
            matrices=matrices,
        )
        self.conv = empty_parameter(self.local.num_channels, shape.conv_width)
        self.log_decay, self.decay_bias = empty_parameter(heads.size), empty_parameter(heads.size)
        self.norm_weight = empty_parameter(shape.value_dim)
        self.eps = spec.norms.eps if shape.norm_eps is None else shape.norm_eps
        self._heads = heads

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit by ``kernels``, which the weights fit."""
        for linear in (self.in_proj, self.rates_proj, self.out_proj):
            if linear is not None:
                linear.use_tensor_cores(kernels)

    def use_step_kernel(self, kernel: DeltaStepKernel) -> None:
        """Compute decode steps that suit ``kernel``, which is for these heads and states, by it."""
        self._step_kernel = kernel

    def _inputs(self, x: Normed, pdl: bool) -> DeltaInputs:
        shape = self.local
        channels, num_z = shape.num_channels, shape.value_size
        projected, rates = self._projected(x, channels + num_z, pdl=pdl)
        qkv, z = projected[:, :channels], projected[:, channels:]
        b, a = rates[:, : 2 * shape.num_heads].chunk(2, dim=1)
        return DeltaInputs(qkv, z.view(-1, shape.num_heads, shape.value_dim), a, b)

    @property
    def _weights(self) -> DeltaWeights:
        return DeltaWeights(
            self.local.num_key_heads,
            self.conv,
            self.log_decay,
            self.decay_bias,
            self.norm_weight,
            self.eps,
            self.local.rate_scale,
        )

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
        yield "norm.weight", whole(self.norm_weight, neutral=1.0)
        for module in (self.in_proj, self.rates_proj):
            for own, place in () if module is None else module.places():
                yield own.removeprefix("../"), place
        yield from collect_places(self.out_proj, "out_proj").items()
