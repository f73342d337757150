"""The next token of each row from its logits, by ``sampling_rule``.

On a GPU, Triton kernels sample, inside a CUDA graph: the parameters are on the GPU
(``SamplingTable``), logits are adjusted as they are read, and the thresholds of filters are found
by counting, not by sorting. On a CPU, ``sampling_cpu`` samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.kernels.sampling_cpu import sample_on_cpu
from minisgl_backend.kernels.sampling_rule import best_of_part_reference, best_of_parts_reference
from minisgl_backend.kernels.sampling_table import Samples, SamplingTable
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace


def sample(
    logits: Tensor, table: SamplingTable, samples: Samples, workspace: SamplingWorkspace
) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size], which stay as they are."""
    if not use_triton(logits):
        return sample_on_cpu(logits, table, samples)
    from minisgl_backend.kernels.triton_kernels.sampling_kernels import launch_sample

    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    launch_sample(out, logits, table, samples, workspace)
    return out


def best_of_part(
    part: Tensor,
    table: SamplingTable,
    samples: Samples,
    workspace: SamplingWorkspace,
    splits: range,
) -> Tensor:
    """The best token of the ``splits`` that one rank has: [batch_size, 2], each row's score and
    token. From these ``best_of_parts`` finds the tokens that ``sample`` gives.

    ``part`` [batch_size, at least the tokens of the splits] has their logits. No row may have
    filters or adjusted logits. Scores are in float32, or in float64 if the logits are; they are inf
    if a logit is inf or NaN, and -inf if there are no splits.
    """
    if not splits:
        nothing = part.new_full((len(part), 2), -torch.inf, dtype=at_least_float32(part).dtype)
        return nothing
    if not use_triton(part):
        return best_of_part_reference(part, table, samples, splits)
    from minisgl_backend.kernels.triton_kernels.sampling_kernels import launch_best_of_part

    out = torch.empty((len(part), 2), dtype=torch.float32, device=part.device)
    launch_best_of_part(out, part, table, samples, workspace, splits)
    return out


def best_of_parts(found: Tensor) -> Tensor:
    """int32 [batch_size]: the best token over all parts. ``found`` [num_ranks, batch_size, 2] are
    the results of ``best_of_part`` of all ranks, in the order of their splits."""
    if not use_triton(found):
        return best_of_parts_reference(found)
    from minisgl_backend.kernels.triton_kernels.sampling_kernels import launch_best_of_parts

    out = torch.empty(found.shape[1], dtype=torch.int32, device=found.device)
    launch_best_of_parts(out, found)
    return out
