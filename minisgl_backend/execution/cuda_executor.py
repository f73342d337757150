"""Runs plans on a GPU: decode steps as CUDA graphs, and the layers of others, too, up to a size.

What outlives a step is on the GPU, by row or page (``rows``), so a step is enqueued without knowing
what the one before it sampled. Everything runs in the order of one stream.

Every way to sample is part of the captured step. Logprobs alone are computed behind it, of the rows
that ask for them, from the logits that it leaves; nothing waits for them but who reads the tokens.

Must not know queues, caches or why rows and pages are granted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import HostArray
from minisgl_backend.attention.paged import DecodeRows, PagedAttention, PagedKV, ScheduledDecode
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.chunk_graphs import ChunkGraphs
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.flat_layers import FlatLayers
from minisgl_backend.execution.graphs import DecodeGraphs, StepOutput
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.storage import KVStorage, paged_layers
from minisgl_backend.kernels.rows import StepInbox, begin_decode, keep_sampled
from minisgl_backend.kernels.sampling import SamplingWorkspace, sample
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.fused import FusedDecoder
from minisgl_backend.plan import NO_TOKEN, SampledTokens, StepPlan
from minisgl_backend.request import IntArray

logger = logging.getLogger(__name__)


class CudaExecutor:
    """A model, its pages and its rows on one GPU.

    Rows are numbered 0 .. max_rows - 1, pages 0 .. storage.num_pages - 1. ``graph_sizes`` are the
    batch sizes of decode steps to capture, ``chunk_graph_sizes`` the numbers of tokens of steps
    with prompt chunks; none turns these graphs off. What is given must be ready on the device's
    stream (``CudaDevice.catch_up``). Raises ``ConfigError`` where the memory left
    over does not hold a step of ``max_prefill_tokens`` beside the graphs.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        storage: KVStorage,
        attention: PagedAttention,
        device: CudaDevice,
        max_rows: int,
        max_sequence_length: int,
        max_prefill_tokens: int,
        graph_sizes: list[int],
        chunk_graph_sizes: list[int],
        fused_experts: bool = True,
    ):
        self._device = device
        self._storage = storage
        self._attention = attention
        self._group = model.group
        with device.queue():
            self._model = FusedDecoder(model, paged_layers(storage), fused_experts=fused_experts)
            self._rows = DeviceRows(
                device,
                max_rows=max_rows,
                max_sequence_length=max_sequence_length,
                page_size=storage.page_size,
                dummy_page=storage.dummy_page,
                vocab_size=model.spec.vocab_size,
            )
            self._layers = FlatLayers(self._model, self._rows, attention, device)
            self._workspace = SamplingWorkspace(
                max_rows, model.spec.vocab_size, device.torch_device
            )
            self._logits = torch.empty(
                (max([0, *graph_sizes]), model.spec.vocab_size),
                dtype=model.dtype,
                device=device.torch_device,
            )
        self._request_ids = np.zeros(max_rows + 1, np.int64)
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        longest = min(max_prefill_tokens, max_sequence_length)
        num_whole, rest = divmod(max_prefill_tokens, longest)
        chunks = ([longest] * num_whole + [rest] * (rest > 0))[:max_rows]
        self._warm_up(chunks, max_rows - len(chunks))
        for length in (min(longest, 64), 1):
            self._warm_up([length], 0)
        self._warm_up([], 1)
        if graph_sizes:
            decode = attention.decode
            self.graphs = DecodeGraphs(
                device,
                self._rows.table,
                self._decode_step,
                graph_sizes,
                decode.schedule_rows if isinstance(decode, ScheduledDecode) else None,
            )
        if chunk_graph_sizes:
            self.chunk_graphs = ChunkGraphs(
                device, self._layers.over, chunk_graph_sizes, max_rows=max_rows
            )
        if graph_sizes or chunk_graph_sizes:
            # again, since it has to fit beside the graphs
            self._warm_up(chunks, max_rows - len(chunks))

    def launch(self, plan: StepPlan) -> CudaPending:
        """Enqueue the step."""
        with self._device.queue():
            if len(plan.broken_pages):
                self._storage.clear(self._device.upload(plan.broken_pages.astype(np.int64)))
            if plan.admissions:
                self._rows.admit(plan.admissions)
                for admission in plan.admissions:
                    self._request_ids[admission.row] = admission.request_id
            grants = np.stack([plan.grant_rows, plan.grant_indices, plan.grant_pages])
            num_decodes, num_grants = len(plan.decode_rows), grants.shape[1]
            is_decode = num_decodes > 0 and not len(plan.prefill_rows)
            if is_decode and self.graphs and self.graphs.fits(num_decodes, num_grants):
                output = self.graphs.replay(plan.decode_rows, plan.decode_positions, grants)
            else:
                self._rows.grant(*grants)
                output = self._step(FlatBatch.of(plan), plan.prefill_tokens)
            rows = plan.sample_rows
            logprobs = RawLogprobs.of(
                output.logits, output.tokens, self._rows.num_logprobs[rows], self._device.upload
            )
            if logprobs is not None:
                logprobs = logprobs.download(self._device)
            tokens = self._device.download(output.tokens[: len(rows)])
            done = torch.cuda.Event()
            done.record(self._device.stream)
        return CudaPending(done, tokens, self._request_ids[rows], logprobs)

    def renew(self) -> None:
        """Nothing: a step that breaks does so in ``launch``, and rows are told when they begin."""

    def close(self) -> None:
        """Wait for the steps in the queue, then destroy the graphs. Idempotent."""
        self._device.close()
        for graphs in (self.graphs, self.chunk_graphs):
            if graphs is not None:
                graphs.close()

    def mark_layers(self, mark: Callable[[str], AbstractContextManager[object]]) -> None:
        """Put ``mark`` around each layer of the steps that are not captured, for profilers."""
        self._model.mark = mark

    def can_replay(self, batch_size: int) -> bool:
        """Whether a decode step of so many rows is captured."""
        return self.graphs is not None and self.graphs.fits(batch_size, 0)

    def time_replays(self, batch_size: int, context: int, steps: int) -> float:
        """Milliseconds of one replay of a captured decode step and nothing else, for benchmarks.

        Rows 0 .. batch_size - 1 advance from ``context`` positions by ``steps``, over pages of
        their own as far as there are enough. To be called while no request is running.
        """
        assert self.graphs is not None
        table = self._rows.table
        dummy, max_pages = table.dummy_row, table.pages.shape[1]
        with self._device.queue():
            needed = -(-(context + steps + 1) // self._rows.page_size)
            pages = torch.arange(batch_size * needed, device=table.pages.device)
            pages = (pages % int(table.pages[dummy, 0])).view(batch_size, needed)
            table.pages[:batch_size, : min(needed, max_pages)] = pages.to(torch.int32)
            table.lengths[:batch_size] = context
            rows = np.arange(batch_size, dtype=np.int32)
            positions = np.full(batch_size, context, np.int32)
            no_grants = np.empty((3, 0), np.int32)
            self.graphs.replay(rows, positions, no_grants)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(self._device.stream)
            for step in range(1, steps + 1):
                self.graphs.replay(rows, positions + np.int32(step), no_grants)
            last.record(self._device.stream)
            last.synchronize()
        return float(first.elapsed_time(last)) / steps

    def _decode_step(self, inbox: StepInbox, batch_size: int) -> StepOutput:
        """A whole decode step of the first rows of ``inbox``; this is what graphs hold."""
        table, attention = self._rows.table, self._attention.decode
        inputs = begin_decode(table, inbox, batch_size, self._rows.page_size)
        metadata = attention.plan_rows(
            DecodeRows(
                rows=inputs.rows,
                lengths=inputs.lengths,
                page_table=table.pages,
                pdl=self._model.launches_early(batch_size),
            )
        )

        def attend(q: Tensor, kv: PagedKV, layer: int) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attention.decode(out, q, kv, layer, metadata)
            return out

        hidden = self._model.hidden(inputs.tokens, inputs.positions, inputs.slots, attend)
        logits = self._model.logits(hidden, out=self._logits[:batch_size])
        sampled = sample(logits, table.sampling, inputs.rows, inputs.lengths, self._workspace)
        tokens = self._group.broadcast(sampled)
        keep_sampled(table, inputs.rows, inputs.lengths, tokens)
        return StepOutput(tokens, logits)

    def _step(self, batch: FlatBatch, prefill_tokens: IntArray) -> StepOutput:
        """Any step: the layers over its tokens, then head and sampling."""
        if self.chunk_graphs is not None and self.chunk_graphs.fits(batch):
            hidden = self.chunk_graphs.replay(batch, prefill_tokens)
        else:
            hidden = self._layers.launched(batch, prefill_tokens)
        if not len(batch.samples):
            return self._no_output
        numbers = np.stack([batch.samples, batch.sample_rows, batch.sample_positions])
        samples, rows, positions = self._device.upload(numbers.astype(np.int32))
        table = self._rows.table
        logits = self._model.logits(hidden.index_select(0, samples))
        sampled = sample(logits, table.sampling, rows, positions, self._workspace)
        tokens = self._group.broadcast(sampled)
        keep_sampled(table, rows, positions, tokens)
        return StepOutput(tokens, logits)

    @property
    def _no_output(self) -> StepOutput:
        nothing = torch.empty(0, dtype=torch.int32, device=self._device.torch_device)
        return StepOutput(nothing, self._logits[:0])

    def _warm_up(self, chunks: list[int], num_decodes: int) -> None:
        """Compile what a step of prompt chunks of these lengths and so many decodes launches, and
        find out whether it has the memory it needs, with logprobs of all its samples."""
        plan = self._dummy_plan(chunks, num_decodes)
        try:
            with self._device.queue():
                output = self._step(FlatBatch.of(plan), plan.prefill_tokens)
                wanted = np.ones(len(output.tokens), np.int64)
                RawLogprobs.of(output.logits, output.tokens, wanted, self._device.upload)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {sum(chunks) + num_decodes} tokens does not fit beside the KV pages: "
                "lower memory_ratio, num_pages, max_prefill_tokens or max_running_requests"
            ) from error

    def _dummy_plan(self, chunks: list[int], num_decodes: int) -> StepPlan:
        """The dummy row has all chunks and all decodes: only its page is written."""
        row, empty = self._rows.table.dummy_row, np.empty(0, np.int32)
        return StepPlan(
            step=-1,
            released_rows=empty,
            broken_pages=empty,
            admissions=(),
            grant_rows=empty,
            grant_indices=empty,
            grant_pages=empty,
            prefill_rows=np.full(len(chunks), row, np.int32),
            prefill_starts=np.zeros(len(chunks), np.int32),
            prefill_lengths=np.array(chunks, np.int32),
            prefill_samples=np.ones(len(chunks), np.int32),
            prefill_tokens=np.zeros(sum(chunks), np.int32),
            decode_rows=np.full(num_decodes, row, np.int32),
            decode_positions=np.zeros(num_decodes, np.int32),
        )


class CudaPending:
    """A launched step (``Pending``)."""

    def __init__(
        self,
        done: torch.cuda.Event,
        tokens: Tensor,
        request_ids: HostArray,
        logprobs: RawLogprobs | None,
    ):
        """``tokens`` int32[num_samples] and ``logprobs`` are on the host, and valid once ``done``
        is; ``request_ids`` are those of the samples."""
        self._done = done
        self._tokens = tokens
        self._request_ids = request_ids
        self._logprobs = logprobs

    def tokens(self) -> SampledTokens:
        self._done.synchronize()
        token_ids = self._tokens.numpy()
        for index in np.flatnonzero(token_ids == NO_TOKEN).tolist():
            logger.error("request %d: the logits are not finite", self._request_ids[index])
        logprobs = self._logprobs.by_sample(token_ids) if self._logprobs else {}
        return SampledTokens(token_ids, logprobs)
