"""The hyper-connection of a part of a layer: weights by which it reads and writes several residual
streams (``kernels.hyper_connections``). Every rank holds all of it. Must not know what the part
computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl_backend.kernels.hyper_connections import StreamWeights, add_to_streams, read_streams
from minisgl_backend.layers.weight_place import WeightPlace, empty_parameter, whole


class HyperConnection(nn.Module):
    """``fn`` [num_mixes, num_streams * hidden_size], ``base`` [num_mixes] and ``scale``, as
    ``StreamWeights`` has them; without a ``magnitude`` it only reads."""

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        *,
        eps: float,
        norm_eps: float,
        magnitude: float | None = None,
    ):
        super().__init__()
        num_kinds = 1 if magnitude is None else 2
        num_mixes = num_kinds * num_streams
        self.fn = empty_parameter(num_mixes, num_streams * hidden_size)
        self.base = empty_parameter(num_mixes)
        self.scale = empty_parameter(num_kinds)
        self._eps, self._norm_eps, self._magnitude = eps, norm_eps, magnitude or 1.0

    def cast(self, dtype: torch.dtype) -> None:
        """Give the parameters ``dtype``, but no less than float32."""
        self.to(torch.promote_types(dtype, torch.float32))

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        for name, parameter in self.named_parameters():
            yield name, whole(parameter)

    def read(self, streams: Tensor, *, pdl: bool) -> tuple[Tensor, Tensor]:
        """What the part reads of ``streams`` [num_tokens, num_streams, hidden_size], and the
        weights for ``write`` (``read_streams``)."""
        weights = StreamWeights(
            matrix=self.fn,
            base=self.base,
            scale=self.scale,
            eps=self._eps,
            norm_eps=self._norm_eps,
            magnitude=self._magnitude,
        )
        return read_streams(streams, weights, pdl=pdl)

    def write(self, streams: Tensor, part: Tensor, for_writing: Tensor, *, pdl: bool) -> None:
        """Add the part's output [num_tokens, hidden_size] to the streams, in place."""
        add_to_streams(streams, part, for_writing, pdl=pdl)
