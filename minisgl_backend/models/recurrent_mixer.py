"""Token mixing that keeps a state of each row: what its kinds have in common.

Each is a recurrence between two projections. Its states lie in the slots that ``RecurrentRows``
names. Must not know how a kind mixes tokens, or which slot is whose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from minisgl_backend.kernels.layer_states import LayerStates
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.models.token_mixing import StepContext

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import TensorCores


class RecurrentMixer(nn.Module, ABC):
    """Token mixing by a recurrent state (``TokenMixer``), with this rank's part of it."""

    states: LayerStates
    in_proj: MergedColumnLinear
    out_proj: RowLinear

    def bind(self, states: LayerStates) -> None:
        """Keep the states of rows in ``states`` from now on."""
        self.states = states

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit by ``kernels``, which the weights fit."""
        self.in_proj.use_tensor_cores(kernels)
        self.out_proj.use_tensor_cores(kernels)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        return self.out_proj.add_to(residual, Normed(self._mixed(x, step)), norm, pdl=step.pdl)

    def rounding(self, num_tokens: int) -> int | None:
        return self.in_proj.matrix.rounding(num_tokens)

    @abstractmethod
    def _mixed(self, x: Normed, step: StepContext) -> Tensor:
        """What ``out_proj`` reads, [num_tokens, its in_features]."""
