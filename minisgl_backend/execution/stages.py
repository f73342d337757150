"""The stages of a step: the row table, the layers, the head, sampling, scoring, embedding, and the
MTP layer's guesses.

Each is made once, before the first step. They are used only within work that is submitted to the
device, which runs in order. Must not know plans, pages or graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import PagedAttention
from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.execution.adapters import RowAdapters
from minisgl_backend.execution.embeddings import PromptEmbedder
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.forward import ForwardPass
from minisgl_backend.execution.mtp import MTPGuesses
from minisgl_backend.execution.prompt_logprobs import PromptScorer
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.sampling import Sampler, StepLogits, StepOutput
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.rows import StepInputs, begin_decode
from minisgl_backend.kernels.sampling_table import Samples
from minisgl_backend.models.decoder import Decoder, LayersOutput
from minisgl_backend.plan import Admission

WatchLogits: TypeAlias = Callable[[Tensor, HostArray], Tensor]
"""(the rank's logits [num_samples, tokens of the rank], their rows [num_samples]) -> the logits to
sample from. Called in the device's queue, at the end of forward passes that are not captured; its
errors are the step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """The sizes that an executor is made for.

    The sizes of graphs, ascending, empty for none, are ``graph_sizes``, the batch sizes of decode
    steps, and ``chunk_graph_sizes``, the numbers of tokens of steps with prompt chunks.
    ``scored_at_once`` limits the number of prompt positions whose logits are computed at once. With
    ``takes_masks``, decode steps with masked rows are also captured. With a ``section``, no chunk
    crosses a multiple of it. ``most_guesses`` limits the number of guesses in a step, and
    ``most_checks`` that of the decoding rows of steps that have some. ``mtp_tokens`` are guessed by
    the MTP layer for each row of a plan's ``mtp_rows``.
    """

    max_rows: int
    max_sequence_length: int
    max_prefill_tokens: int
    graph_sizes: tuple[int, ...] = ()
    chunk_graph_sizes: tuple[int, ...] = ()
    scored_at_once: int = 1024
    takes_masks: bool = False
    section: int | None = None
    most_guesses: int = 0
    most_checks: int = 0
    mtp_tokens: int = 0

    @property
    def most_checked(self) -> int:
        """The most tokens of decoding rows in a step with guesses."""
        return self.most_checks + self.most_guesses


class Stages:
    """Steps go through ``rows``, ``forward``, the head of ``model``, and then ``sampler``,
    ``scorer`` or ``embedder``."""

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        attention: PagedAttention,
        device: Device,
        limits: ExecutorLimits,
        *,
        states: StateStorage | None,
        adapters: RowAdapters | None,
        watch_logits: WatchLogits | None,
    ):
        """``states`` is given if the model has recurrent layers, ``adapters`` if it takes any."""
        self.model = model
        self.attention = attention
        self.device = device
        self.limits = limits
        self.states = states
        self.adapters = adapters
        self.rows = DeviceRows(
            device,
            max_rows=limits.max_rows,
            max_sequence_length=limits.max_sequence_length,
            page_size=storage.page_size,
            dummy_page=storage.dummy_page,
            dummy_window_page=storage.dummy_window_page,
            vocab_size=model.spec.vocab_size,
            most_guesses=limits.most_guesses,
            mtp_tokens=limits.mtp_tokens,
        )
        table = self.rows.table
        num_rows = len(table.tokens)
        self.forward = ForwardPass(model, self.rows, attention, device, states, adapters)
        self.sampler = Sampler(table, device, model.group, model.head.splits, self._gathered)
        self.scorer = PromptScorer(
            model, device, num_rows=num_rows, most_rows=limits.scored_at_once
        )
        self.embedder = PromptEmbedder(model, device, num_rows=num_rows)
        self.mtp: MTPGuesses | None = None
        if limits.mtp_tokens:
            self.mtp = MTPGuesses(model, self.forward, table, device)
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._watch_logits = watch_logits
        self._own_logits = self._empty_logits(model.head.share)
        """This rank's logits in captured decode steps."""
        self._logits: Tensor | None = None
        """With several ranks, the logits of all, in captured decode steps, and in other steps if
        they fit."""
        if model.group.size > 1:
            self._logits = self._empty_logits(model.spec.vocab_size)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give rows to requests."""
        self.rows.admit(admissions)
        self.sampler.admit(admissions)
        self.scorer.admit(admissions)
        self.embedder.admit(admissions)

    def decoded(
        self,
        inputs: StepInputs,
        batch_size: int,
        *,
        grouped: bool,
        adapted: AdaptedTokens | None = None,
        checks: CheckedTokens | None = None,
    ) -> StepLogits:
        """The logits of a decode step, to be captured, for the first ``batch_size`` rows of
        ``inputs``."""
        step = begin_decode(self.rows.table, inputs, batch_size, self.rows.page_size)
        output = self.forward.over_decodes(step, grouped=grouped, adapted=adapted, checks=checks)
        part = self.model.logits_part(output.residual, out=self._own_logits[:batch_size])
        follow = None
        if self.mtp is not None:
            follow = partial(self.mtp.follow_decodes, step, output.for_mtp)
        return StepLogits(part, Samples(step.rows, step.lengths, step.tokens), follow)

    def logits_of(self, batch: FlatBatch, output: LayersOutput) -> StepLogits:
        """The logits of the tokens after which a token is sampled, if any, from the ``output`` of
        the layers."""
        rows, at = batch.sample_rows, batch.sample_indices
        numbers = np.array([at, rows, batch.sample_positions, batch.tokens[at]], np.int32)
        indices, sample_rows, positions, previous = self.device.upload(numbers)
        previous = self.rows.table.resolved(sample_rows, previous)
        samples, follow = Samples(sample_rows, positions, previous), None
        if self.mtp is not None:
            follow = partial(self.mtp.follow_batch, batch, output.for_mtp, samples, indices)
        if not len(rows):
            return StepLogits(self._own_logits[:0], samples, follow)
        with self.mark("logits"):
            logits = self.model.logits_part(output.residual.index_select(0, indices))
        if self._watch_logits is not None:
            logits = self._watch_logits(logits, rows)
        return StepLogits(logits, samples, follow)

    def sample(self, due: StepLogits, *, all_logits: bool) -> StepOutput:
        """Sample the tokens of a step; there may be none. ``all_logits``: see ``Sampler``."""
        if not len(due.logits):
            if due.follow is not None:
                due.follow(due.samples.rows)
            return StepOutput(due.samples.rows, due.logits)
        with self.mark("sampling"):
            return self.sampler.sample(due, all_logits=all_logits)

    def _gathered(self, part: Tensor) -> Tensor:
        """The logits of all ranks, [num_samples, vocab_size], from this rank's."""
        out = self._logits
        if out is not None:
            out = out[: len(part)] if len(part) <= len(out) else None
        return self.model.head.gathered(part, out)

    def _empty_logits(self, width: int) -> Tensor:
        """Memory for the logits of captured decode steps."""
        most, model = max([0, *self.limits.graph_sizes]), self.model
        return torch.empty((most, width), dtype=model.dtype, device=self.device.torch_device)
