"""From the logits of a step's rows to their tokens, on every device.

First the logits are adjusted and a token is chosen (``kernels.sampling``), with the parameters in
the row table. Then the tokens are kept in the row table for the next step. All of this may be
captured in a CUDA graph. Afterwards log-probabilities are computed for the rows that ask for them,
from the logits that the step leaves; only the reader of the tokens waits for them.

With several ranks, each rank finds the best tokens in its part of the vocabulary, and all take the
best of these. If a row of the step needs the logits of all ranks, or what only rank 0 knows
(``plan.Draws``), rank 0 samples all rows from all logits, and broadcasts their tokens.

Must not know pages, attention or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.rows import RowTable, keep_sampled
from minisgl_backend.kernels.sampling import best_of_part, best_of_parts, sample
from minisgl_backend.kernels.sampling_table import Samples
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import Admission, Draws
from minisgl_backend.request import IntArray

_NOT_SAMPLED: Final = -2
"""Rank 0 broadcasts this in place of tokens if it cannot sample; a part is replaced by NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step leaves on the device until the next step: ``tokens`` int32 [num_samples], and
    ``logits`` [num_samples, vocab_size] or only those of this rank. In a captured decode step,
    those of padding follow."""

    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """What is sampled from: this rank's ``logits`` [num_samples, tokens of the rank] of
    ``samples``. ``follow`` is called with the sampled tokens, int32 [num_samples], once they are
    kept."""

    logits: Tensor
    samples: Samples
    follow: Callable[[Tensor], None] | None = None


class Sampler:
    """Samples for rows of a ``RowTable``, together with the samplers of the other ranks."""

    def __init__(
        self,
        table: RowTable,
        device: Device,
        group: Group,
        splits: range,
        gathered: Callable[[Tensor], Tensor],
    ):
        """``splits`` are those of this rank's logits (``OutputHead``); ``gathered`` turns these
        into the logits of all ranks."""
        self._table = table
        self._device = device
        self._group = group
        self._splits = splits
        self._gathered = gathered
        num_rows = len(table.tokens)
        self._workspace = SamplingWorkspace(
            table.sampling.most_samples, table.sampling.vocab_size, device.torch_device
        )
        self._staged_masks: IntArray = device.staging(tuple(table.sampling.masks.shape))
        self._num_logprobs = np.full(num_rows, -1, np.int64)  # -1 for none
        self._need_all_logits = np.zeros(num_rows, bool)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note which requests ask for log-probabilities; everything else is in the row table."""
        for admission in admissions:
            asked = admission.sampling.num_logprobs
            self._num_logprobs[admission.row] = -1 if asked is None else asked

    def learn(self, draws: Draws) -> None:
        """Note which admitted rows need the logits of all ranks. Ranks other than 0 also write to
        their row tables what rank 0 has there from the admissions."""
        rows = draws.rows
        if not len(rows):
            return
        self._need_all_logits[rows] = draws.need_all_logits != 0
        if self._group.rank > 0:
            seeds = draws.seeds.view(np.int64)
            numbers = np.stack([rows, seeds, draws.temperatures], dtype=np.int64)
            to_rows, of_seeds, of_temperatures = self._device.upload(numbers)
            self._table.sampling.seeds[to_rows] = of_seeds
            temperatures = of_temperatures.int().view(torch.float32)
            self._table.sampling.column("temperature")[to_rows] = temperatures

    def need_all_logits(self, rows: IntArray) -> bool:
        """Whether sampling these rows takes the logits of all ranks; the same on all ranks."""
        return bool(self._need_all_logits[rows].any())

    def staged_masks(self, num_masks: int) -> IntArray:
        """Memory for the masks of a step, int32 [num_masks, num_words].

        It may be written once the previous step with masks, which reads this memory, is done.
        """
        return self._staged_masks[:num_masks]

    def mask(self, samples: IntArray) -> None:
        """Allow the next step's samples with these indices, int32 [n], only the tokens of their
        staged masks."""
        if len(samples):
            lines = self._device.upload(samples.astype(np.int64))
            masks = self._device.upload(self.staged_masks(len(samples)))
            self._table.sampling.masks.index_copy_(0, lines, masks)

    def sample(self, due: StepLogits, *, all_logits: bool = True) -> StepOutput:
        """Sample a token for each line of the logits, and keep it. With ``all_logits``, sample from
        those of all ranks; it may be False only if ``need_all_logits`` is."""
        logits = self._gathered(due.logits) if all_logits else due.logits
        tokens = self._of_rank_0(logits, due) if all_logits else self._of_all_ranks(due)
        keep_sampled(self._table, due.samples, tokens)
        if due.follow is not None:
            due.follow(tokens)
        return StepOutput(tokens, logits)

    def _of_rank_0(self, logits: Tensor, due: StepLogits) -> Tensor:
        """Rank 0's tokens, sampled from all logits."""
        group, shape = self._group, (len(due.samples.rows),)
        if group.rank > 0:
            tokens = torch.empty(shape, dtype=torch.int32, device=logits.device)
            tokens = group.broadcast(tokens)
            # on a GPU nothing may be read here: the step may be captured
            if self._device.is_host and bool((tokens == _NOT_SAMPLED).any()):
                raise RuntimeError("rank 0 could not sample")
            return tokens
        try:
            tokens = sample(logits, self._table.sampling, due.samples, self._workspace)
        except Exception:
            if group.size > 1:
                group.broadcast(
                    torch.full(shape, _NOT_SAMPLED, dtype=torch.int32, device=logits.device)
                )
            raise
        return group.broadcast(tokens)

    def _of_all_ranks(self, due: StepLogits) -> Tensor:
        """The best of all ranks' best tokens, the same on all of them."""
        table, splits = self._table.sampling, self._splits
        try:
            best = best_of_part(due.logits, table, due.samples, self._workspace, splits)
        except Exception:
            dtype = at_least_float32(due.logits).dtype
            shape = (len(due.logits), 2)
            self._group.all_gather(
                torch.full(shape, torch.nan, dtype=dtype, device=due.logits.device)
            )
            raise
        found = self._group.all_gather(best)
        if self._device.is_host and bool(found.isnan().any()):
            raise RuntimeError("another rank could not sample")
        return best_of_parts(found)

    def logprobs(self, output: StepOutput, rows: IntArray) -> RawLogprobs | None:
        """The log-probabilities of a step's first samples, whose ``rows`` are int32 [num_samples].

        Their copies on the host are valid once the queue has run them. None if no row asks for
        them, and on ranks other than 0.
        """
        if self._group.rank > 0:
            return None
        found = RawLogprobs.of(
            output.logits, output.tokens, self._num_logprobs[rows], self._device.upload
        )
        return None if found is None else found.download(self._device)
