"""Runs plans on a device: a forward pass for each, and a token for each row that gets one.

What outlives a step is on the device, by row or page (``rows``, ``storage``), so a step is queued
without knowing what the one before it sampled. Everything runs in the order of the device's queue.
If the device has graphs, decode steps are captured whole; other steps, up to a number of tokens,
have their layers captured.

Must not know requests that wait, the cache, or why rows and pages are granted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import GroupedDecode, PagedAttention, ScheduledDecode
from minisgl_backend.config import Limits
from minisgl_backend.device.base import Device, HostArray, Submission
from minisgl_backend.errors import ConfigError, InvariantError
from minisgl_backend.execution.adapters import AdapterStore, CapturedAdapters, RowAdapters
from minisgl_backend.execution.chunk_graphs import ChunkGraphs, ChunkInputs, max_chunks
from minisgl_backend.execution.decode_graphs import DecodeGraphs
from minisgl_backend.execution.embeddings import Embeddings, PromptEmbedder
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.forward import ForwardPass
from minisgl_backend.execution.launched import HostOutput, LaunchedStep, MaskedStep
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.prompt_logprobs import PromptScorer, ScoredChunks
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.sampling import Sampler, StepLogits, StepOutput
from minisgl_backend.execution.states import CapturedRuns, StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.rows import StepInputs, begin_decode
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.plan import (
    NO_SNAPSHOT,
    Copies,
    Decodes,
    Groups,
    Pending,
    PromptChunks,
    Snapshots,
    StepPlan,
)
from minisgl_backend.progress import Progress, unseen
from minisgl_backend.request import IntArray

T = TypeVar("T")

WatchLogits: TypeAlias = Callable[[Tensor, HostArray], Tensor]
"""(logits [num_samples, vocab_size], their rows [num_samples]) -> the logits to sample from. Called
in the device's queue, at the end of forward passes that are not captured; its errors are the
step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """The sizes that an executor is made for.

    To capture, ascending, empty for no graphs: ``graph_sizes``, batch sizes of decode steps;
    ``chunk_graph_sizes``, numbers of tokens of steps with prompt chunks. ``scored_at_once`` bounds
    the positions of prompts whose logits are computed at once. With ``takes_masks`` decode steps
    with masked rows are captured, too.
    """

    max_rows: int
    max_sequence_length: int
    max_prefill_tokens: int
    graph_sizes: tuple[int, ...] = ()
    chunk_graph_sizes: tuple[int, ...] = ()
    scored_at_once: int = 1024
    takes_masks: bool = False


class ModelExecutor:
    """A model, its pages and its rows on one device (``RankExecutor``).

    Rows are numbered 0 .. max_rows - 1, pages 0 .. storage.num_pages - 1. On a GPU, tensors that
    are handed in must be ready on the device's queue (``CudaDevice.catch_up``).
    """

    def __init__(
        self,
        model: Decoder,
        *,
        storage: KVStorage,
        states: StateStorage | None = None,
        attention: PagedAttention,
        device: Device,
        limits: ExecutorLimits,
        adapter_slots: AdapterSlots | None = None,
        adapter_store: AdapterStore | None = None,
        watch_logits: WatchLogits | None = None,
        progress: Progress = unseen,
    ):
        """``states``, if the model has recurrent layers; ``adapter_slots``, if it takes adapters;
        ``adapter_store`` is rank 0's.

        Raises ``ConfigError`` if the remaining memory cannot hold both the graphs and a step of
        ``max_prefill_tokens``."""
        self.device = device
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        self.adapter_graphs: DecodeGraphs | None = None
        self.adapter_chunk_graphs: ChunkGraphs | None = None
        self._adapters: RowAdapters | None = None
        if adapter_slots is not None:
            self._adapters = RowAdapters(
                adapter_slots,
                device,
                model.group,
                num_rows=limits.max_rows + 1,
                store=adapter_store,
            )
        self._model = model
        self._storage = storage
        self._states = states
        self._attention = attention
        self._limits = limits
        self._watch_logits = watch_logits
        self._is_broken = False
        self._unmasked: MaskedStep | None = None
        self._mark: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.rows: DeviceRows  # these are made in the device's queue
        self._forward: ForwardPass
        self._sampler: Sampler
        self._logits: Tensor
        device.submit(self._make_rows).result()
        if not device.is_host:
            device.submit(partial(self._compile_and_capture, progress)).result()

    def launch(self, plan: StepPlan) -> Pending:
        """Queue the step. Errors raise here, or in ``tokens`` of the result."""
        if self._unmasked is not None and self._unmasked.waits:
            raise InvariantError("a step is launched while the one before it waits for masks")
        self._unmasked = None
        loaded = [] if self._adapters is None else self._adapters.held(plan.adapters)
        if len(plan.masked_rows):
            step = MaskedStep(lambda: self._begin(plan, loaded), self._sampler, self._submit)
            self._unmasked = step
            return step
        return LaunchedStep(self._submit(lambda: self._begin(plan, loaded)()))

    def renew(self) -> None:
        """Run steps again after one that broke; ``ranks`` calls it, on all ranks together."""
        self._is_broken = False

    def close(self) -> None:
        """Wait for the steps in the queue, then destroy the graphs. Idempotent."""
        self.device.close()
        for graphs in (
            self.graphs,
            self.chunk_graphs,
            self.adapter_graphs,
            self.adapter_chunk_graphs,
        ):
            if graphs is not None:
                graphs.close()

    def mark(self, mark: Callable[[str], AbstractContextManager[object]]) -> None:
        """Put ``mark`` around each layer, around head and sampling, and around the scoring of
        prompts, as far as they are not replayed; for profilers."""
        self._model.mark = mark
        self._mark = mark

    # --- in the device's queue --------------------------------------------------------------------

    def _make_rows(self) -> None:
        """Make the row table, and what reads it."""
        model, storage, limits, device = self._model, self._storage, self._limits, self.device
        self.rows = DeviceRows(
            device,
            max_rows=limits.max_rows,
            max_sequence_length=limits.max_sequence_length,
            page_size=storage.page_size,
            dummy_page=storage.dummy_page,
            dummy_window_page=storage.dummy_window_page,
            vocab_size=model.spec.vocab_size,
        )
        self._forward = ForwardPass(
            model, self.rows, self._attention, device, self._states, self._adapters
        )
        self._sampler = Sampler(self.rows.table, device, model.group)
        self._scorer = PromptScorer(
            model,
            device,
            num_rows=len(self.rows.table.tokens),
            most_rows=limits.scored_at_once,
        )
        self._embedder = PromptEmbedder(model, device, num_rows=len(self.rows.table.tokens))
        self._logits = torch.empty(  # of captured decode steps
            (max([0, *limits.graph_sizes]), model.spec.vocab_size),
            dtype=model.dtype,
            device=device.torch_device,
        )

    def _submit(self, part: Callable[[], T]) -> Submission[T]:
        """Queue a part of a step. With several ranks, refuse all after one that broke, until
        ``renew``.

        Other ranks may still be in the middle of the broken step: they would mix their sums of it
        with this rank's sums of the next step.
        """

        def run() -> T:
            if self._is_broken:
                raise InvariantError("a step before this one broke")
            try:
                return part()
            except Exception:
                self._is_broken = self._model.group.size > 1
                raise

        return self.device.submit(run)

    def _begin(self, plan: StepPlan, loaded: list[Tensor]) -> Callable[[], HostOutput]:
        """Queue a step up to its logits; what is returned queues the rest, before any other step.

        ``loaded`` are the adapters that it loads, on rank 0. If no row waits for a mask, all of a
        captured step is queued by the second part.
        """
        if len(plan.broken_pages):
            self._storage.clear(self.device.upload(plan.broken_pages.astype(np.int64)))
        if len(plan.broken_window_pages):
            broken = self.device.upload(plan.broken_window_pages.astype(np.int64))
            self._storage.clear(broken, window_pages=True)
        if self._adapters is not None:
            self._adapters.take(plan.adapters, loaded)
        if len(plan.copies.sources):
            slots = _copied_slots(plan.copies, self._storage.page_size)
            self._storage.copy(*self.device.upload(slots))
        if self._states is not None and len(plan.snapshots.kept_rows):
            self._states.keep(plan.snapshots.kept_rows, plan.snapshots.kept)
        if plan.admissions:
            self.rows.admit(plan.admissions)
            self._sampler.admit(plan.admissions)
            self._scorer.admit(plan.admissions)
            self._embedder.admit(plan.admissions)
        grants = self.rows.lines_of(plan.grants, plan.window_grants)
        num_decodes = len(plan.decodes.rows)
        is_decode = num_decodes > 0 and not len(plan.chunks.rows)
        graphs = self.adapter_graphs if self._are_adapted(plan.decodes.rows) else self.graphs
        if is_decode and graphs and graphs.fits(num_decodes):
            if grants.shape[1] > graphs.max_grants:
                self.rows.grant(grants)
                grants = grants[:, :0]
            if len(plan.masked_rows):
                return partial(self._finish, plan, graphs.begin(plan.decodes, grants))
            replay = partial(graphs.replay, plan.decodes, grants, plan.groups_by_index)
            return partial(self._finish, plan, replay)
        self.rows.grant(grants)
        batch = FlatBatch.of(plan)
        hidden = self._layers(batch, plan.chunks.tokens)
        sample = partial(self._sample, self._logits_of(batch, hidden))
        embedded = self._embedder.embedded(hidden, batch)
        if not len(plan.scores.chunks):
            return partial(self._finish, plan, sample, embedded=embedded)
        score = partial(self._scorer.scored, hidden, plan.scores, plan.chunks, batch.chunk_offsets)
        return partial(self._finish, plan, sample, score, embedded)

    def _finish(
        self,
        plan: StepPlan,
        sample: Callable[[], StepOutput],
        score: Callable[[], ScoredChunks | None] | None = None,
        embedded: Embeddings | None = None,
    ) -> HostOutput:
        """Queue sampling, then the scores of prompts, and the copies of all results on the host."""
        output, rows, scored = sample(), plan.sample_rows, None
        if score is not None:
            with self._mark("prompt logprobs"):
                found = score()
            scored = None if found is None else found.download(self.device)
        return HostOutput(
            self.device.download(output.tokens[: len(rows)]),
            self._sampler.logprobs(output, rows),
            scored,
            None if embedded is None else embedded.download(self.device),
        )

    def _are_adapted(self, rows: IntArray | HostArray) -> bool:
        """Whether any of these rows has an adapter."""
        return self._adapters is not None and self._adapters.have_any(rows)

    def _decode_forward(
        self,
        inputs: StepInputs,
        batch_size: int,
        grouped: bool,
        adapted: AdaptedTokens | None = None,
    ) -> StepLogits:
        """A decode step of the first ``batch_size`` rows of ``inputs``, to be captured."""
        step = begin_decode(self.rows.table, inputs, batch_size, self.rows.page_size)
        # [batch_size, hidden_size]
        hidden = self._forward.over_decodes(step, grouped=grouped, adapted=adapted)
        logits = self._model.logits(hidden, out=self._logits[:batch_size])
        return StepLogits(logits, step.rows, step.lengths)

    def _layers(self, batch: FlatBatch, prefill_tokens: IntArray) -> Tensor:
        """The residual stream after the layers, [num_tokens, hidden_size]; rows of padding may
        follow."""
        if self._states is not None:
            self._states.restore(batch)
        graphs = self.adapter_chunk_graphs if self._are_adapted(batch.rows) else self.chunk_graphs
        size = None if graphs is None else graphs.size_for(batch)
        if graphs is not None and size is not None:
            return graphs.replay(size, batch, prefill_tokens)
        return self._forward.over_batch(batch, prefill_tokens)

    def _logits_of(self, batch: FlatBatch, hidden: Tensor) -> StepLogits:
        """The logits of the tokens after which one is sampled, if any."""
        numbers = np.array([batch.samples, batch.sample_rows, batch.sample_positions], np.int32)
        samples, rows, positions = self.device.upload(numbers)
        if not len(batch.samples):
            return StepLogits(self._logits[:0], rows, positions)
        with self._mark("logits"):
            logits = self._model.logits(hidden.index_select(0, samples))
        if self._watch_logits is not None:
            logits = self._watch_logits(logits, batch.sample_rows)
        return StepLogits(logits, rows, positions)

    def _sample(self, due: StepLogits) -> StepOutput:
        if not len(due.rows):
            return StepOutput(due.rows, due.logits)
        with self._mark("sampling"):
            return self._sampler.sample(due)

    # --- at the start, on a GPU -------------------------------------------------------------------

    def _compile_and_capture(self, progress: Progress) -> None:
        """Compile the kernels of steps of all kinds, check that the largest step fits, and capture
        graphs."""
        limits, device, adapters = self._limits, self.device, self._adapters
        self._warm_up_all()
        if adapters is not None:
            adapters.trying_out(self._warm_up_all)
        if limits.graph_sizes:
            self.graphs = self._decode_graphs(progress)
        if limits.chunk_graph_sizes:
            self.chunk_graphs = self._chunk_graphs(progress)
        if adapters is not None:
            if limits.graph_sizes:
                captured = CapturedAdapters(adapters, device, limits.graph_sizes[-1])
                self.adapter_graphs = self._decode_graphs(progress, captured)
            if limits.chunk_graph_sizes:
                captured = CapturedAdapters(adapters, device, limits.chunk_graph_sizes[-1])
                self.adapter_chunk_graphs = self._chunk_graphs(progress, captured)
        is_grouped = self._take_groups is not None
        if self.graphs or self.chunk_graphs or is_grouped:
            # again: it has to fit beside the graphs; and graphs are captured without groups
            self._warm_up_largest(grouped=is_grouped)

    def _decode_graphs(
        self, progress: Progress, captured: CapturedAdapters | None = None
    ) -> DecodeGraphs:
        """Those of steps with ``captured`` adapters, or of steps without any."""
        decode = self._attention.decode

        def forward(inputs: StepInputs, batch_size: int, grouped: bool) -> StepLogits:
            of_tokens = None if captured is None else captured.view(batch_size)
            return self._decode_forward(inputs, batch_size, grouped, of_tokens)

        return DecodeGraphs(
            self.device,
            self.rows.table,
            forward,
            self._sampler.sample,
            self._limits.graph_sizes,
            decode.schedule_rows if isinstance(decode, ScheduledDecode) else None,
            progress,
            takes_masks=self._limits.takes_masks,
            take_groups=self._take_groups if captured is None else None,
            take_rows=None if captured is None else captured.write,
        )

    def _chunk_graphs(
        self, progress: Progress, captured: CapturedAdapters | None = None
    ) -> ChunkGraphs:
        """Those of steps with ``captured`` adapters, or of steps without any."""
        sizes, max_rows, runs = self._limits.chunk_graph_sizes, self._limits.max_rows, None
        if self._states is not None:
            room = partial(max_chunks, max_rows=max_rows)
            runs = CapturedRuns(self._states, self.device, room, sizes[-1])

        def layers(inputs: ChunkInputs, grouped: bool) -> Tensor:
            size = len(inputs.tokens)
            return self._forward.over_chunks(
                inputs,
                grouped=grouped,
                adapted=None if captured is None else captured.view(size),
                runs=None if runs is None else runs.view(size),
            )

        def take(batch: FlatBatch, size: int) -> None:
            if captured is not None:
                captured.write(batch.rows, size)
            if runs is not None:
                runs.write(batch, size)

        return ChunkGraphs(
            self.device,
            layers,
            sizes,
            max_rows=max_rows,
            progress=progress,
            take_groups=self._take_groups if captured is None else None,
            fits=None if runs is None else runs.fits,
            take=take,
        )

    @property
    def _take_groups(self) -> Callable[[Groups], bool] | None:
        """What captured steps without adapters give their groups to; None if they have no use for
        them. Steps with adapters are not captured a third and a fourth time for groups."""
        decode = self._attention.decode
        if self._attention.reads_groups and isinstance(decode, GroupedDecode):
            return decode.take_groups
        return None

    def _warm_up_all(self) -> None:
        """Run steps of all kinds, the largest among them."""
        self._warm_up_largest()
        for length in (min(self._longest_chunk, 64), 1):
            self._warm_up([length], 0)
        self._warm_up([], 1)

    def _warm_up_largest(self, *, grouped: bool = False) -> None:
        limits = self._limits
        num_whole, rest = divmod(limits.max_prefill_tokens, self._longest_chunk)
        chunks = [self._longest_chunk] * num_whole + [rest] * (rest > 0)
        chunks = chunks[: limits.max_rows]
        self._warm_up(chunks, limits.max_rows - len(chunks), grouped=grouped)

    @property
    def _longest_chunk(self) -> int:
        return min(self._limits.max_prefill_tokens, self._limits.max_sequence_length)

    def _warm_up(self, chunks: list[int], num_decodes: int, *, grouped: bool = False) -> None:
        """Run a step of chunks of these lengths and ``num_decodes`` decodes, with logprobs of all
        its samples and of all its chunks. If ``grouped``, the decodes share all pages that a row
        can have, so that reading them together pays if it ever does."""
        last = self._limits.max_sequence_length - 1 if grouped else 0
        plan = self._dummy_plan(chunks, num_decodes, last)
        try:
            batch = FlatBatch.of(plan)
            if num_decodes and (num_shared := last // self.rows.page_size):
                ends = np.array([num_shared], np.int32)
                members = np.arange(num_decodes, dtype=np.int32)
                sizes = np.array([num_decodes], np.int32)
                batch = replace(batch, groups=Groups(sizes, np.zeros_like(ends), ends, members))
            hidden = self._layers(batch, plan.chunks.tokens)
            output = self._sample(self._logits_of(batch, hidden))
            tokens = plan.chunks.tokens
            for num_top in (0, Limits().logprobs) if len(tokens) else ():
                self._scorer.score(hidden, np.arange(len(tokens)), tokens, num_top)
            self._embedder.embed(hidden[: len(output.tokens)])
            wanted = np.ones(len(output.tokens), np.int64)
            RawLogprobs.of(output.logits, output.tokens, wanted, self.device.upload)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {sum(chunks) + num_decodes} tokens does not fit beside the KV pages, "
                f"with {self.device.free_memory() / 2**30:.1f} GiB free: lower memory_ratio, "
                "num_pages, max_prefill_tokens or max_running_requests"
            ) from error

    def _dummy_plan(self, chunks: list[int], num_decodes: int, position: int) -> StepPlan:
        """A plan with the dummy row in all places, so that only the dummy page is written. Decodes
        are at ``position``."""
        row = self.rows.table.dummy_row
        return StepPlan(
            step=-1,
            chunks=PromptChunks(
                rows=np.full(len(chunks), row, np.int32),
                starts=np.zeros(len(chunks), np.int32),
                lengths=np.array(chunks, np.int32),
                samples=np.ones(len(chunks), np.int32),
                tokens=np.zeros(sum(chunks), np.int32),
            ),
            snapshots=Snapshots(begun_from=np.full(len(chunks), NO_SNAPSHOT, np.int32)),
            decodes=Decodes(
                rows=np.full(num_decodes, row, np.int32),
                positions=np.full(num_decodes, position, np.int32),
            ),
        )


def _copied_slots(copies: Copies, page_size: int) -> HostArray:
    """The slots that copies read and write, int64[2, num_positions]."""
    ends, lengths = np.cumsum(copies.lengths), copies.lengths
    offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    pages = np.stack([copies.sources, copies.targets]).astype(np.int64)
    return np.asarray(np.repeat(pages, lengths, axis=1) * page_size + offsets)
