"""The sum of a row-parallel GEMM over the ranks, with the residual add and norm that follow it."""

from __future__ import annotations

from torch import Tensor

from minisgl_backend.kernels.rms_norm import fused_add_rms_norm
from minisgl_backend.parallel.group import Group


def add_rms_norm_of_sum(
    part: Tensor, group: Group, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool
) -> Tensor:
    """residual += the sum of every rank's ``part``, in place; returns its RMSNorm. One kernel, if
    the group has it for this size.

    ``part``, ``residual`` [num_tokens, hidden_size]; ``weight`` [hidden_size]. May overwrite
    ``part``. ``pdl``: see ``FusedSum``.
    """
    if group.fused is not None and group.fused.fits(len(part), part.shape[1], part.dtype):
        return group.fused.add_rms_norm(part, residual, weight, eps, pdl=pdl)
    return fused_add_rms_norm(group.all_reduce(part), residual, weight, eps, pdl=pdl)
