"""Token mixing by a recurrent state: Kimi Delta Attention (Kimi Linear, arXiv 2510.26692), also as
Ling 3.0 has it.

It is Gated DeltaNet in which each dimension of a key has a decay of its own. The state of a row is
a convolution's last inputs and a matrix per head (``DeltaStates``). Knows the names of the
checkpoint and how heads are split over ranks. Must not know which slot is whose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minisgl_backend.kernels.gated_delta import DeltaInputs, DeltaWeights
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
from minisgl_backend.models.gated_delta_net import DeltaMixer
from minisgl_backend.models.recurrent_spec import KimiDeltaSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import Group


class KimiDeltaAttention(DeltaMixer):
    """The layer (``TokenMixer``), with this rank's heads.

    One projection gives queries, keys and values, another one the rates and two narrow vectors,
    which every rank computes in full: of the first are made the decays (``f_b_proj``), of the
    second the gates of the output (``g_b_proj``). Only the first may stay quantized. If decays and
    gates are direct projections of the input, they are computed with queries, keys and values.
    """

    f_b_proj: MergedColumnLinear | None
    g_b_proj: MergedColumnLinear | None

    def __init__(self, spec: ModelSpec, layer: int, group: Group, matrices: Matrices):
        super().__init__()
        shape = spec.recurrent
        assert isinstance(shape, KimiDeltaSpec)
        self._shape = shape
        self.local = shape.of_rank(group.size)
        self._heads = heads = even_share(
            shape.num_heads, group, "the heads of Kimi Delta Attention"
        )
        dim = shape.key_dim
        self._sizes = sizes = Share(heads.total * dim, heads.start * dim, heads.size * dim)
        name = f"model.layers.{layer}.self_attn"
        inputs = {f"{part}_proj": sizes for part in ("qkvfg" if shape.direct else "qkv")}
        narrow = Share(dim, 0, dim)
        narrows = {} if shape.direct else {"f_a_proj": narrow, "g_a_proj": narrow}
        rates = {**narrows, "b_proj": heads}
        self._add_projections(name, spec.hidden_size, inputs, rates, matrices)
        plain = replace(matrices, keep_quantized=False)
        self.f_b_proj, self.g_b_proj = (
            None
            if shape.direct
            else MergedColumnLinear(name, dim, {part: sizes}, bias=False, matrices=plain)
            for part in ("f_b_proj", "g_b_proj")
        )
        self.out_proj = RowLinear(
            f"{name}.o_proj",
            sizes.total,
            spec.hidden_size,
            bias=False,
            group=group,
            matrices=matrices,
        )
        self.conv = empty_parameter(self.local.num_channels, shape.conv_width)
        self.log_decay = empty_parameter(heads.size)
        self.decay_bias = empty_parameter(heads.size, dim)
        self.norm_weight = empty_parameter(dim)
        self.eps = spec.norms.eps if shape.norm_eps is None else shape.norm_eps

    def _inputs(self, x: Normed, pdl: bool) -> DeltaInputs:
        heads, dim, channels = self.local.num_heads, self.local.key_dim, self.local.num_channels
        if self.f_b_proj is None or self.g_b_proj is None:
            size = heads * dim
            projected, b = self._projected(x, channels + 2 * size, pdl=pdl)
            qkv, a, z = projected.tensor_split([channels, channels + size], dim=1)
            b = b[:, :heads]
        else:
            qkv, rates = self._projected(x, channels, pdl=pdl)
            of_decays, of_gates = (Normed(rates[:, at : at + dim].contiguous()) for at in (0, dim))
            b = rates[:, 2 * dim : 2 * dim + heads]
            a, z = self.f_b_proj(of_decays, pdl=pdl), self.g_b_proj(of_gates, pdl=pdl)
        by_head = len(b), heads, dim
        return DeltaInputs(qkv, z.view(by_head), a.view(by_head), b)

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
            sigmoid_gates=True,
            least_decay=self._shape.least_decay,
        )

    def places(self) -> Iterator[tuple[str, Place]]:
        # [0, num_channels) of the convolution: this rank's queries, keys and values
        size = self._sizes
        shape = (size.total, 1, self.conv.shape[1])
        for part, weight in zip("qkv", self.conv.data.unsqueeze(1).chunk(3), strict=True):
            yield f"{part}_conv1d.weight", WeightPlace(weight, shape, 0, size.start)
        heads = self._heads
        yield "A_log", WeightPlace(self.log_decay.data, (heads.total,), 0, heads.start)
        yield "dt_bias", WeightPlace(self.decay_bias.data.view(-1), (size.total,), 0, size.start)
        yield "o_norm.weight", whole(self.norm_weight, neutral=1.0)
        for module in (self.in_proj, self.rates_proj, self.f_b_proj, self.g_b_proj):
            for own, place in () if module is None else module.places():
                yield own.removeprefix("../"), place
        yield from collect_places(self.out_proj, "o_proj").items()
