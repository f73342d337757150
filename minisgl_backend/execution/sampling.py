"""From the logits of a step's rows to their tokens, on every device.

In this order: adjust the logits and choose a token (``kernels.sampling``), with the parameters in
the row table; broadcast rank 0's tokens; keep them in the row table for the next step. All of this
may be captured in a CUDA graph. Afterwards log-probabilities are computed for the rows that ask for
them, from the logits that the step leaves; only the reader of the tokens waits for them.

Must not know pages, attention or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.kernels.rows import RowTable, keep_sampled
from minisgl_backend.kernels.sampling import sample
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import Admission
from minisgl_backend.request import IntArray

_NOT_SAMPLED: Final = -2
"""Rank 0 broadcasts this in place of tokens if it cannot sample."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step leaves on the device until the next one: ``tokens`` int32 [num_samples] and
    ``logits`` [num_samples, vocab_size]; in a captured decode step the padding's follow."""

    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """What is sampled from: ``logits`` [num_samples, vocab_size], and the ``rows`` and the
    ``positions`` of the new tokens, int32 [num_samples]."""

    logits: Tensor
    rows: Tensor
    positions: Tensor


class Sampler:
    """Samples for rows of a ``RowTable``. Rank 0 samples; the other ranks take its tokens."""

    def __init__(self, table: RowTable, device: Device, group: Group):
        self._table = table
        self._device = device
        self._group = group
        num_rows = len(table.tokens)
        self._workspace = SamplingWorkspace(
            num_rows, table.sampling.vocab_size, device.torch_device
        )
        self._staged_masks: IntArray = device.staging(tuple(table.sampling.masks.shape))
        self._num_logprobs = np.full(num_rows, -1, np.int64)  # -1 for none

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note which requests ask for log-probabilities; everything else is in the row table."""
        for admission in admissions:
            asked = admission.sampling.num_logprobs
            self._num_logprobs[admission.row] = -1 if asked is None else asked

    def staged_masks(self, num_rows: int) -> IntArray:
        """Memory for the masks of a step, int32 [num_rows, num_words].

        It may be written once the previous step with masks, which reads them there, is done.
        """
        return self._staged_masks[:num_rows]

    def mask(self, rows: IntArray) -> None:
        """Allow ``rows``, int32 [n], only the tokens of their staged masks next."""
        if len(rows):
            lines = self._device.upload(rows.astype(np.int64))
            masks = self._device.upload(self.staged_masks(len(rows)))
            self._table.sampling.masks.index_copy_(0, lines, masks)

    def sample(self, due: StepLogits) -> StepOutput:
        """Sample a token for each line of the logits, and keep it."""
        logits, rows, positions = due.logits, due.rows, due.positions
        group = self._group
        if group.rank > 0:
            tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
            tokens = group.broadcast(tokens)
            # on a GPU nothing may be read here: the step may be captured
            if self._device.is_host and bool((tokens == _NOT_SAMPLED).any()):
                raise RuntimeError("rank 0 could not sample")
        else:
            try:
                tokens = sample(logits, self._table.sampling, rows, positions, self._workspace)
            except Exception:
                if group.size > 1:
                    shape = (len(rows),)
                    group.broadcast(
                        torch.full(shape, _NOT_SAMPLED, dtype=torch.int32, device=logits.device)
                    )
                raise
            tokens = group.broadcast(tokens)
        keep_sampled(self._table, rows, positions, tokens)
        return StepOutput(tokens, logits)

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
