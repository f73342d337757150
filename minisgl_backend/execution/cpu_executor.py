"""Runs plans on a CPU, as ``cuda_executor`` does on a GPU: a forward pass and its samples for each.

Holds what outlives a step, all of it indexed by row or page: the page table, keys and values, the
last sampled token of each row, and sampling parameters. After ``launch`` everything happens on the
device's queue, in order, so a plan may be launched while the step before it still runs. Must not
know waiting requests, the cache, or why rows and pages are granted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionBackend, ForwardContext, HostArray
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.batch import PageTable, StepIndices
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.sampler import Sample, Sampler
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.plan import SampledTokens, StepPlan

_NOT_SAMPLED: Final = -2
"""What rank 0 tells the other ranks in place of tokens if it cannot sample."""


class CpuExecutor:
    """A model, its pages and its rows on a CPU.

    Rows are numbered 0 .. max_rows - 1, pages 0 .. storage.num_pages - 1.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        storage: KVStorage,
        backend: AttentionBackend,
        device: CpuDevice,
        max_rows: int,
        max_sequence_length: int,
        watch_logits: Callable[[Tensor, HostArray], Tensor] | None = None,
    ):
        """``watch_logits`` gets the logits of each step, and may change them (``parts``)."""
        self._model = model
        self._storage = storage
        self._backend = backend
        self._device = device
        self._page_table = PageTable(
            max_rows=max_rows,
            max_sequence_length=max_sequence_length,
            page_size=storage.page_size,
            dummy_page=storage.dummy_page,
        )
        self._sampler = Sampler(max_rows=max_rows, vocab_size=model.spec.vocab_size)
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device.torch_device)
        self._watch_logits = watch_logits
        self._is_broken = False

    def launch(self, plan: StepPlan) -> CpuPending:
        """Queue the step. If it raises, ``tokens`` of the result raises the same."""
        return CpuPending(self._device.submit(partial(self._run_unless_broken, plan)))

    def renew(self) -> None:
        """Run steps again after one that broke. All ranks must do this together."""
        self._is_broken = False

    def close(self) -> None:
        """Wait for the steps in the queue and end it. Idempotent."""
        self._device.close()

    def _run_unless_broken(self, plan: StepPlan) -> _HostSample:
        """Run a step, but with several ranks none after a step that broke.

        Other ranks may still be in the middle of the broken step: they would mix their sums of it
        with this rank's sums of the next step.
        """
        if self._is_broken:
            raise InvariantError("a step before this one broke")
        try:
            return self._run(plan)
        except Exception:
            self._is_broken = self._model.group.size > 1
            raise

    def _run(self, plan: StepPlan) -> _HostSample:
        """Apply the plan to the rows, then compute and sample.

        Broken pages are cleared as all others, when they are first written.
        """
        for row in plan.released_rows.tolist():
            self._sampler.release(row)
        self._page_table.grant(plan)
        for admission in plan.admissions:
            self._sampler.admit(admission)

        indices = StepIndices.of(plan, self._page_table)
        hidden = self._forward(plan, indices)  # [num_tokens, hidden_size]
        flat = indices.flat
        if len(flat.samples) == 0:
            return _NOTHING
        # [num_samples, vocab_size]
        logits = self._model.logits(hidden.index_select(0, self._device.upload(flat.samples)))
        if self._watch_logits is not None:
            logits = self._watch_logits(logits, flat.sample_rows)
        sample = self._sample(logits, flat)
        tokens = sample.tokens  # [num_samples]
        rows = self._device.upload(flat.sample_rows)
        self._last_tokens.index_copy_(0, rows, tokens.clamp_min(0))
        return _HostSample(
            self._device.download(tokens),
            sample.logprobs and sample.logprobs.download(self._device),
        )

    def _sample(self, logits: Tensor, flat: FlatBatch) -> Sample:
        """The tokens that rank 0 samples, on every rank. If rank 0 fails, every rank raises."""
        group = self._model.group
        tokens = torch.full((len(logits),), _NOT_SAMPLED, device=logits.device)
        if group.rank > 0:
            if (group.broadcast(tokens) == _NOT_SAMPLED).any():
                raise RuntimeError("rank 0 could not sample")
            return Sample(tokens, logprobs=None)
        try:
            sample = self._sampler.sample(logits, flat.sample_rows, flat.sample_positions)
        except Exception:
            group.broadcast(tokens)
            raise
        group.broadcast(sample.tokens)
        return sample

    def _forward(self, plan: StepPlan, indices: StepIndices) -> Tensor:
        """The hidden states of all tokens of the step, [num_tokens, hidden_size]."""
        if len(indices.fresh_pages):
            self._storage.clear(self._device.upload(indices.fresh_pages))
        batch = indices.batch(self._page_table, self._device)
        ctx = ForwardContext(
            batch=batch,
            kv=self._storage,
            attention=self._backend,
            metadata=self._backend.prepare(batch),
        )
        # token ids of the decoding rows, then those of the chunks: together int64[num_tokens]
        known = self._device.upload(plan.prefill_tokens.astype(np.int64))
        sampled = self._last_tokens.index_select(
            0, self._device.upload(plan.decode_rows.astype(np.int64))
        )
        hidden: Tensor = self._model(torch.cat([sampled, known]), ctx)
        return hidden


@dataclass(frozen=True, slots=True, eq=False)
class _HostSample:
    """What was sampled, on the host. ``tokens`` is int64[num_samples]."""

    tokens: Tensor
    logprobs: RawLogprobs | None


_NOTHING = _HostSample(torch.empty(0, dtype=torch.int64), None)


class CpuPending:
    """A launched step (``Pending``)."""

    def __init__(self, submission: Future[_HostSample]):
        self._submission = submission

    def tokens(self) -> SampledTokens:
        sample = self._submission.result()
        token_ids = sample.tokens.numpy().astype(np.int32)
        logprobs = sample.logprobs.by_sample(token_ids) if sample.logprobs else {}
        return SampledTokens(token_ids, logprobs)
