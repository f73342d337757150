"""Token mixing by attention and by a recurrent state side by side, as in Falcon-H1.

Knows the names of both in the checkpoint. Must not know how either mixes tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.weight_place import Place, collect_places
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.token_mixing import SelfAttention, StepContext


class ParallelMixer(nn.Module):
    """The sum of what two mixers make of the same input (``TokenMixer``)."""

    def __init__(self, attention: SelfAttention, recurrent: RecurrentMixer, name: str):
        """``name`` is that of ``recurrent`` in the checkpoint."""
        super().__init__()
        self.attention, self.recurrent, self._name = attention, recurrent, name

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        x = Normed(x.normalized(pdl=step.pdl))  # once for both
        residual = residual.add_(self.attention.output(x, step))
        return self.recurrent.forward(residual, x, norm, step)

    def rounding(self, num_tokens: int) -> int | None:
        return None  # both read it, perhaps with other scales

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, mixer in (("self_attn", self.attention), (self._name, self.recurrent)):
            yield from collect_places(mixer, f"../{name}").items()
