"""Runs the layers over the tokens of a step, which come in one of three forms.

``over_batch`` is for any step, from arrays on the host; ``over_chunks`` for any step to be
captured, from inputs on the device; ``over_decodes`` for a decode step to be captured, from the
state of its rows. All return the same for the same tokens. Steps to be captured may be ``grouped``
(``attention.base.GroupedDecode``). The MTP layer goes over the tokens of a step, or of rows, by
itself (``mtp_over_...``). Knows the model's forward pass, the row table and attention. Must not
know plans, graphs or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minisgl_backend.attention.base import Attend, Chunks, DecodeRows, PagedAttention
from minisgl_backend.device.base import Device
from minisgl_backend.execution.adapters import RowAdapters
from minisgl_backend.execution.chunk_graphs import ChunkInputs
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.checks import NO_PLACE, CheckedTokens
from minisgl_backend.kernels.chunk_runs import Runs
from minisgl_backend.kernels.rows import DecodeInputs
from minisgl_backend.models.decoder import Decoder, LayersOutput
from minisgl_backend.models.token_mixing import RecurrentRows
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Where the tokens of a step are; tensors [num_tokens]."""

    rows: Tensor
    positions: Tensor
    slots: Tensor
    window_slots: Tensor | None
    attend: Attend


class ForwardPass:
    """The layers of ``model`` over tokens of ``rows``."""

    def __init__(
        self,
        model: Decoder,
        rows: DeviceRows,
        attention: PagedAttention,
        device: Device,
        states: StateStorage | None,
        adapters: RowAdapters | None,
    ) -> None:
        """``states`` is given if the model has recurrent layers."""
        self._model = model
        self._adapters = adapters
        self._rows = rows
        self._attention = attention
        self._device = device
        self._states = states
        # PyTorch's operations take 64-bit indices, GPU kernels take 32-bit ones
        self._index_dtype = np.int64 if device.is_host else np.int32

    def over_batch(self, batch: FlatBatch) -> LayersOutput:
        """What the layers return of the tokens of ``batch``."""
        upload, placed, num_decodes = self._device.upload, self._placed(batch), batch.num_decodes
        recurrent = None
        if self._states is not None:
            own_runs, own_tokens, checks = self._states.runs_of(batch), num_decodes, None
            if len(lengths := batch.check_lengths):
                lines = self._states.begin_checks(batch.rows, batch.positions, lengths)
                own_tokens, checks = len(lines), CheckedTokens(upload(lines))
            runs = Runs.of(own_runs, upload) if own_runs else None
            recurrent = RecurrentRows(placed.rows[:own_tokens].long(), runs, checks)
        adapters, adapted = self._adapters, None
        if adapters is not None and adapters.have_any(batch.rows):
            adapted = adapters.of_tokens(batch.rows)
        tokens = upload(batch.tokens)  # int32 [num_tokens]
        if num_own := num_decodes + int(batch.check_lengths.sum()):
            own = tokens[:num_own]
            own.copy_(self._rows.table.resolved(placed.rows[:num_own], own))
        output: LayersOutput = self._model(
            tokens,
            placed.positions,
            placed.slots,
            placed.attend,
            recurrent,
            adapted,
            window_slots=placed.window_slots,
        )
        return output

    def mtp_over_batch(self, batch: FlatBatch, layer_input: Tensor, next_tokens: Tensor) -> Tensor:
        """The states of the MTP layer, [num_tokens, state_size], from what it reads of the other
        layers (``LayersOutput.for_mtp``), and from the token after each."""
        placed = self._placed(batch)
        states = self._model.first_mtp_states(layer_input[: len(next_tokens)])
        return self._model.forward_mtp(
            next_tokens, states, placed.positions, placed.slots, placed.attend
        )

    def _placed(self, batch: FlatBatch) -> _Placed:
        upload, rows, num_decodes = self._device.upload, self._rows, batch.num_decodes
        numbers = [batch.rows, batch.positions, *np.divmod(batch.positions, rows.page_size)]
        # [num_tokens] each
        token_rows, positions, indices, offsets = upload(np.array(numbers, self._index_dtype))
        slots = rows.slots(token_rows, indices, offsets)  # [num_tokens]
        window_slots = rows.window_slots(token_rows, indices, offsets)
        chunks = decodes = None
        if len(batch.chunk_rows):
            chunks = Chunks(
                rows=upload(batch.chunk_rows),
                offsets=upload(batch.chunk_offsets),
                ends=upload(batch.chunk_ends),
                page_table=rows.table.pages,
                window_table=rows.table.window_pages,
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
                window_table=rows.table.window_pages,
                host_lengths=lengths,
                groups=batch.groups,
            )
        attend = self._attention.plan(decodes, chunks)
        return _Placed(token_rows, positions, slots, window_slots, attend)

    def over_chunks(
        self,
        inputs: ChunkInputs,
        *,
        grouped: bool,
        adapted: AdaptedTokens | None,
        runs: Runs | None,
        checks: CheckedTokens | None,
    ) -> LayersOutput:
        """The same for the tokens of ``inputs``, including padding. ``adapted``: the tokens by
        adapter, if any uses one; ``runs``: the chunks, if the model has recurrent layers; and
        ``checks``: those of the decoding rows, if it has, and these have guesses."""
        table, rows, positions = self._rows.table, inputs.rows.long(), inputs.positions
        tokens = table.resolved(rows, inputs.tokens)
        page_size = self._rows.page_size
        indices = (positions // page_size).long()
        slots = self._rows.slots(rows, indices, positions % page_size)
        window_slots = self._rows.window_slots(rows, indices, positions % page_size)
        chunks = Chunks(
            rows=inputs.chunk_rows,
            offsets=inputs.chunk_offsets,
            ends=inputs.chunk_ends,
            page_table=table.pages,
            window_table=table.window_pages,
            max_length=len(tokens),
            max_end=table.pages.shape[1] * page_size,
        )
        decodes = DecodeRows(
            rows=inputs.decode_rows,
            lengths=inputs.decode_lengths,
            page_table=table.pages,
            window_table=table.window_pages,
            grouped=grouped,
        )
        recurrent = None
        if runs is not None:
            own_rows, are_others = inputs.decode_rows, inputs.decode_rows == table.dummy_row
            if checks is not None:
                own_rows = inputs.rows[: len(checks.lines)]
                are_others = checks.lines[:, 0] == NO_PLACE
            recurrent = RecurrentRows(own_rows.masked_fill(are_others, -1).long(), runs, checks)
        output: LayersOutput = self._model(
            tokens,
            positions,
            slots,
            self._attention.plan(decodes, chunks),
            recurrent,
            adapted,
            window_slots=window_slots,
        )
        return output

    def over_decodes(
        self,
        inputs: DecodeInputs,
        *,
        grouped: bool,
        adapted: AdaptedTokens | None,
        checks: CheckedTokens | None,
    ) -> LayersOutput:
        """The same for decoding rows; ``adapted``: the rows by adapter, if any uses one;
        ``checks``: theirs, if they have guesses and the model has recurrent layers."""
        decodes = DecodeRows(
            rows=inputs.rows,
            lengths=inputs.lengths,
            page_table=self._rows.table.pages,
            window_table=self._rows.table.window_pages,
            grouped=grouped,
            pdl=self._model.attention_starts_early(len(inputs.rows)),
        )
        attend = self._attention.plan(decodes, None)
        recurrent = None
        if self._states is not None:
            recurrent = RecurrentRows(inputs.rows.long(), checks=checks)
        output: LayersOutput = self._model(
            inputs.tokens,
            inputs.positions,
            inputs.slots,
            attend,
            recurrent,
            adapted,
            window_slots=inputs.window_slots,
        )
        return output

    def mtp_over_decodes(
        self, inputs: DecodeInputs, layer_input: Tensor, next_tokens: Tensor
    ) -> Tensor:
        """``mtp_over_batch`` for a decode step to be captured."""
        attend = self._attention.plan(self._mtp_rows(inputs.rows, inputs.lengths), None)
        states = self._model.first_mtp_states(layer_input)
        return self._model.forward_mtp(next_tokens, states, inputs.positions, inputs.slots, attend)

    def mtp_over_rows(
        self, rows: Tensor, positions: Tensor, states: Tensor, next_tokens: Tensor
    ) -> Tensor:
        """The next states of the MTP layer, [num_rows, state_size], from its own ``states`` of the
        positions before. ``rows``, ``positions`` and ``next_tokens`` are int32[num_rows]."""
        page_size = self._rows.page_size
        slots = self._rows.slots(rows, positions // page_size, positions % page_size)
        lengths = positions + 1
        host_lengths = lengths.numpy() if self._device.is_host else None
        attend = self._attention.plan(self._mtp_rows(rows, lengths, host_lengths), None)
        return self._model.forward_mtp(next_tokens, states, positions, slots, attend)

    def _mtp_rows(
        self, rows: Tensor, lengths: Tensor, host_lengths: IntArray | None = None
    ) -> DecodeRows:
        """``rows`` as attention of the MTP layer takes them; that of layers with windows is planned
        with it, and not used."""
        table = self._rows.table
        return DecodeRows(
            rows=rows,
            lengths=lengths,
            page_table=table.pages,
            window_table=table.window_pages,
            host_lengths=host_lengths,
        )
