"""The next token of each row from its logits, by ``sampling_rule``.

On a GPU by Triton, inside a CUDA graph: the parameters are on the GPU (``SamplingTable``), logits
are adjusted as they are read, and the thresholds of filters are found by counting, not by sorting.
On a CPU by ``sampling_cpu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.sampling_cpu import sample_on_cpu
from minisgl_backend.kernels.sampling_table import SamplingTable
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace


def sample(
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    workspace: SamplingWorkspace,
) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size], which stay as they are.

    ``rows`` of the table and ``positions`` of the tokens are int32 [batch_size].
    """
    if not use_triton(logits):
        return sample_on_cpu(logits, table, rows, positions)
    from minisgl_backend.kernels.triton_kernels.sampling_kernels import launch_sample

    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    launch_sample(out, logits, table, rows, positions, workspace)
    return out
