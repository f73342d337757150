"""The layers over the flat batch of a step: launched one by one, or to be captured over an inbox.

Both give the same residual stream for the tokens of the step. Knows the model's forward pass, the
state of rows and attention. Must not know plans, graphs or sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.paged import Chunks, DecodeRows, PagedAttention, PagedKV
from minisgl_backend.device.base import Device
from minisgl_backend.execution.chunk_graphs import LAST_TOKEN, ChunkInbox
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.models.fused import Attend, FusedDecoder
from minisgl_backend.request import IntArray


class FlatLayers:
    """The layers of ``model`` over tokens of ``rows``."""

    def __init__(
        self, model: FusedDecoder, rows: DeviceRows, attention: PagedAttention, device: Device
    ) -> None:
        self._model = model
        self._rows = rows
        self._attention = attention
        self._device = device

    def launched(self, batch: FlatBatch, prefill_tokens: IntArray) -> Tensor:
        """The residual stream after the layers, [num_tokens, hidden_size]."""
        upload, rows, num_decodes = self._device.upload, self._rows, batch.num_decodes
        token_rows, positions = upload(np.stack([batch.rows, batch.positions]))
        last = rows.table.tokens[token_rows[:num_decodes]]
        tokens = torch.cat([last, upload(prefill_tokens)])
        slots = rows.slots(token_rows, positions)
        chunks = decodes = None
        if len(batch.chunk_rows):
            chunks = Chunks(
                rows=upload(batch.chunk_rows),
                offsets=upload(batch.chunk_offsets),
                ends=upload(batch.chunk_ends),
                page_table=rows.table.pages,
                max_length=int(np.diff(batch.chunk_offsets).max()),
                max_end=int(batch.chunk_ends.max()),
                host_offsets=batch.chunk_offsets,
                host_ends=batch.chunk_ends,
            )
        if num_decodes:
            lengths = (batch.positions[:num_decodes] + 1).astype(np.int32)
            decodes = DecodeRows(
                rows=upload(batch.rows[:num_decodes].astype(np.int32)),
                lengths=upload(lengths),
                page_table=rows.table.pages,
                host_lengths=lengths,
            )
        return self._model.hidden(tokens, positions, slots, self._attend_to(decodes, chunks))

    def over(self, inbox: ChunkInbox) -> Tensor:
        """The same for whatever stands in ``inbox``, and rows of padding; may be captured."""
        table, rows, positions = self._rows.table, inbox.rows.long(), inbox.positions
        tokens = torch.where(inbox.tokens == LAST_TOKEN, table.tokens[rows], inbox.tokens)
        slots = self._rows.slots(rows, positions.long()).to(torch.int32)
        chunks = Chunks(
            rows=inbox.chunk_rows,
            offsets=inbox.chunk_offsets,
            ends=inbox.chunk_ends,
            page_table=table.pages,
            max_length=len(tokens),
            max_end=table.pages.shape[1] * self._rows.page_size,
        )
        decodes = DecodeRows(
            rows=inbox.decode_rows, lengths=inbox.decode_lengths, page_table=table.pages
        )
        return self._model.hidden(tokens, positions, slots, self._attend_to(decodes, chunks))

    def _attend_to(self, decodes: DecodeRows | None, chunks: Chunks | None) -> Attend:
        """Attention of the decoding rows, which stand first, then of the chunks.

        There may be more decoding rows than the flat batch has: then the chunks overwrite what the
        padding left.
        """
        prefill, decode = self._attention.prefill, self._attention.decode
        of_chunks = None if chunks is None else prefill.plan_chunks(chunks)
        of_decodes = None if decodes is None else decode.plan_rows(decodes)
        num_decodes = 0 if decodes is None else len(decodes.rows)
        out: Tensor | None = None

        def attend(q: Tensor, kv: PagedKV, layer: int) -> Tensor:
            nonlocal out
            if out is None:
                # Padding behind the chunks is attended as decodes of the dummy row, or not at all:
                # then it stays 0 in all layers. So what it stores in the dummy page is finite.
                out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            if of_decodes is not None:
                decode.decode(out[:num_decodes], q[:num_decodes], kv, layer, of_decodes)
            if of_chunks is not None:
                prefill.prefill(out, q, kv, layer, of_chunks)
            return out

        return attend
