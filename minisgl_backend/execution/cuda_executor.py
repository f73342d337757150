"""Runs plans on a GPU: decode steps as CUDA graphs, and so the layers of other steps up to a size.

What outlives a step is on the GPU, by row or page (``rows``), so a step is enqueued without knowing
what the one before it sampled. Everything runs in the order of one stream.

Every way to sample is part of the captured step. Only logprobs are computed after it, for the rows
that ask for them, from the logits that it leaves; nothing but the reader of the tokens waits for
them.

Must not know queues, caches or why rows and pages are granted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.paged import DecodeRows, PagedAttention, PagedKV, ScheduledDecode
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.chunk_graphs import ChunkGraphs
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.flat_layers import FlatLayers
from minisgl_backend.execution.graphs import DecodeGraphs, StepOutput
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.storage import KVStorage, zeroed_layers
from minisgl_backend.kernels.rows import StepInbox, begin_decode, keep_sampled
from minisgl_backend.kernels.sampling import SamplingWorkspace, sample
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.fused import FusedDecoder
from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import IntArray


class CudaExecutor:
    """A model, its pages and its rows on one GPU.

    Rows are numbered 0 .. max_rows - 1, pages 0 .. storage.num_pages - 1. ``graph_sizes`` are the
    batch sizes of decode steps to capture, ``chunk_graph_sizes`` the numbers of tokens of steps
    with prompt chunks; an empty list turns these graphs off. Tensors that are handed in must be
    ready on the device's stream (``CudaDevice.catch_up``). Raises ``ConfigError`` if the remaining
    memory cannot hold a step of ``max_prefill_tokens`` beside the graphs.
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
        self.device = device
        self._storage = storage
        self._attention = attention
        self._group = model.group
        with device.queue():
            self._model = FusedDecoder(model, zeroed_layers(storage), fused_experts=fused_experts)
            self.rows = DeviceRows(
                device,
                max_rows=max_rows,
                max_sequence_length=max_sequence_length,
                page_size=storage.page_size,
                dummy_page=storage.dummy_page,
                vocab_size=model.spec.vocab_size,
            )
            self._layers = FlatLayers(self._model, self.rows, attention, device)
            self._workspace = SamplingWorkspace(
                max_rows, model.spec.vocab_size, device.torch_device
            )
            self._logits = torch.empty(
                (max([0, *graph_sizes]), model.spec.vocab_size),
                dtype=model.dtype,
                device=device.torch_device,
            )
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
                self.rows.table,
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
        with self.device.queue():
            if len(plan.broken_pages):
                self._storage.clear(self.device.upload(plan.broken_pages.astype(np.int64)))
            if plan.admissions:
                self.rows.admit(plan.admissions)
            grants = np.stack([plan.grant_rows, plan.grant_indices, plan.grant_pages])
            num_decodes, num_grants = len(plan.decode_rows), grants.shape[1]
            is_decode = num_decodes > 0 and not len(plan.prefill_rows)
            if is_decode and self.graphs and self.graphs.fits(num_decodes, num_grants):
                output = self.graphs.replay(plan.decode_rows, plan.decode_positions, grants)
            else:
                self.rows.grant(*grants)
                output = self._step(FlatBatch.of(plan), plan.prefill_tokens)
            rows = plan.sample_rows
            logprobs = RawLogprobs.of(
                output.logits, output.tokens, self.rows.num_logprobs[rows], self.device.upload
            )
            if logprobs is not None:
                logprobs = logprobs.download(self.device)
            tokens = self.device.download(output.tokens[: len(rows)])
            done = torch.cuda.Event()
            done.record(self.device.stream)
        return CudaPending(done, tokens, logprobs)

    def renew(self) -> None:
        """Do nothing: steps break in ``launch`` only, and an admission says all about its row."""

    def close(self) -> None:
        """Wait for the steps in the queue, then destroy the graphs. Idempotent."""
        self.device.close()
        for graphs in (self.graphs, self.chunk_graphs):
            if graphs is not None:
                graphs.close()

    def mark_layers(self, mark: Callable[[str], AbstractContextManager[object]]) -> None:
        """Put ``mark`` around each layer of the steps that are not captured, for profilers."""
        self._model.mark = mark

    def _decode_step(self, inbox: StepInbox, batch_size: int) -> StepOutput:
        """A whole decode step of the first rows of ``inbox``; this is what graphs hold."""
        table, attention = self.rows.table, self._attention.decode
        inputs = begin_decode(table, inbox, batch_size, self.rows.page_size)
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
        samples, rows, positions = self.device.upload(numbers.astype(np.int32))
        table = self.rows.table
        logits = self._model.logits(hidden.index_select(0, samples))
        sampled = sample(logits, table.sampling, rows, positions, self._workspace)
        tokens = self._group.broadcast(sampled)
        keep_sampled(table, rows, positions, tokens)
        return StepOutput(tokens, logits)

    @property
    def _no_output(self) -> StepOutput:
        nothing = torch.empty(0, dtype=torch.int32, device=self.device.torch_device)
        return StepOutput(nothing, self._logits[:0])

    def _warm_up(self, chunks: list[int], num_decodes: int) -> None:
        """Run a step of prompt chunks of these lengths and so many decodes, with logprobs of all
        its samples: this compiles its kernels, and shows whether there is enough memory for it."""
        plan = self._dummy_plan(chunks, num_decodes)
        try:
            with self.device.queue():
                output = self._step(FlatBatch.of(plan), plan.prefill_tokens)
                wanted = np.ones(len(output.tokens), np.int64)
                RawLogprobs.of(output.logits, output.tokens, wanted, self.device.upload)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {sum(chunks) + num_decodes} tokens does not fit beside the KV pages, "
                f"with {self.device.free_memory() / 2**30:.1f} GiB free: lower memory_ratio, "
                "num_pages, max_prefill_tokens or max_running_requests"
            ) from error

    def _dummy_plan(self, chunks: list[int], num_decodes: int) -> StepPlan:
        """A plan whose chunks and decodes are all of the dummy row: only its page is written."""
        row, empty = self.rows.table.dummy_row, np.empty(0, np.int32)
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
        logprobs: RawLogprobs | None,
    ):
        """``tokens`` int32[num_samples] and ``logprobs`` are on the host, and valid once ``done``
        is."""
        self._done = done
        self._tokens = tokens
        self._logprobs = logprobs

    def tokens(self) -> SampledTokens:
        self._done.synchronize()
        token_ids = self._tokens.numpy()
        logprobs = self._logprobs.by_sample(token_ids) if self._logprobs else {}
        return SampledTokens(token_ids, logprobs)
