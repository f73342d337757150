"""Guesses of the model's MTP layer at the tokens after those that a step has sampled. An EAGLE-3
layer in its place makes them in the same way (``models.mtp.GuessingLayer``).

The layer goes over all tokens of each step, behind the model's own layers, once their next tokens
are known (``follow_...``). So its keys and values are as complete as the model's, and are cached
with them. Its state of a row's last sample that counts is kept. From it, ``guess`` makes the first
guess; each other takes one more pass of the layer, at the position after, whose keys and values a
later step overwrites with those of the token that is sampled there. Guesses are kept in the row
table for the row's next step.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437), with one layer for all guesses. The best
token is guessed, whatever the row's sampling parameters are. Must not know what becomes of guesses.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device, Graph, Submission
from minisgl_backend.execution.capture import capture
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.forward import ForwardPass
from minisgl_backend.kernels.rows import DecodeInputs, RowTable
from minisgl_backend.kernels.sampling_table import Samples
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.plan import MTP_GUESS, Checks
from minisgl_backend.progress import Progress
from minisgl_backend.request import EMPTY, IntArray


class GuessesOnHost:
    """The guesses for each row that were made last, once they are on the host.

    A plan names guesses by numbers below ``LAST_TOKEN``, since it is made before they are known.
    """

    def __init__(self) -> None:
        self._of_rows: dict[int, tuple[Submission[Tensor], int]] = {}

    def put(self, rows: IntArray, guesses: Submission[Tensor]) -> None:
        """Take the guesses for ``rows``, int32 [num_guesses, num_rows]."""
        self._of_rows |= {row: (guesses, index) for index, row in enumerate(rows.tolist())}

    def checked(self, checks: Checks) -> Callable[[], IntArray] | None:
        """A function that returns the tokens of ``checks`` once these are computed; None if the
        plan has all of them."""
        at = np.flatnonzero(checks.tokens <= MTP_GUESS)
        if not len(at):
            return None
        of_rows = [self._of_rows[row] for row in checks.token_rows[at].tolist()]

        def tokens() -> IntArray:
            found = checks.tokens.copy()
            values = {guesses: guesses.result().numpy() for guesses, _ in of_rows}
            for index, (guesses, column) in zip(at.tolist(), of_rows, strict=True):
                found[index] = values[guesses][MTP_GUESS - found[index], column]
            return found

        return tokens


class MTPGuesses:
    """The layer's work on a device, used only in submitted work."""

    def __init__(
        self, model: Decoder, forward: ForwardPass, table: RowTable, device: Device
    ) -> None:
        self._model = model
        self._forward = forward
        self._table = table
        self._device = device
        assert model.mtp is not None
        shape = len(table.lengths), model.mtp.state_size
        self._states = torch.zeros(shape, dtype=model.dtype, device=device.torch_device)
        """The layer's states of the samples that the row table has the tokens of."""
        self._rows = torch.empty(0, dtype=torch.int32, device=device.torch_device)
        """The rows that graphs read."""
        self._written: IntArray = EMPTY
        """The same on the host."""
        self._graphs: dict[int, Graph[Tensor]] = {}

    def follow_batch(
        self,
        batch: FlatBatch,
        layer_input: Tensor,
        samples: Samples,
        indices: Tensor,
        sampled: Tensor,
    ) -> None:
        """Go over the tokens of a step, from what the layer reads of the other layers.
        ``indices`` [num_samples] are those of the tokens after which ``sampled`` were sampled."""
        next_tokens = self._device.upload(batch.next_tokens)
        next_tokens.index_copy_(0, indices.long(), sampled)
        states = self._forward.mtp_over_batch(batch, layer_input, next_tokens.clamp_(min=0))
        self._keep(samples.rows, samples.positions, states.index_select(0, indices))

    def follow_decodes(self, inputs: DecodeInputs, layer_input: Tensor, sampled: Tensor) -> None:
        """The same for a decode step to be captured."""
        states = self._forward.mtp_over_decodes(inputs, layer_input, sampled.clamp(min=0))
        self._keep(inputs.rows, inputs.lengths, states)

    def _keep(self, rows: Tensor, positions: Tensor, states: Tensor) -> None:
        """Keep the states of samples at these positions, if they are the last that count."""
        table = self._table
        is_last = table.lengths.index_select(0, rows) == positions
        to = torch.where(is_last, rows, table.dummy_row).long()
        self._states.index_copy_(0, to, states)

    def guess(self, rows: IntArray) -> Tensor:
        """Guess the tokens after the last one of each of ``rows``, as many as the row table has
        room for. Returns them, too, int32 [num_guesses, num_rows], until the next call."""
        sizes = sorted(self._graphs)
        at = bisect.bisect_left(sizes, len(rows))
        if at == len(sizes):
            return self._guessed(self._device.upload(rows))
        padded = np.full(sizes[at], self._table.dummy_row, np.int32)
        padded[: len(rows)] = rows
        if not np.array_equal(self._written[: len(padded)], padded):
            self._device.overwrite(self._rows[: len(padded)], padded)
            self._written[: len(padded)] = padded
        graph = self._graphs[sizes[at]]
        graph.replay()
        return graph.output[:, : len(rows)]

    def capture(self, sizes: Sequence[int], progress: Progress) -> None:
        """Capture graphs for these numbers of rows."""
        device = self._device
        self._written = np.full(max(sizes), self._table.dummy_row, np.int32)
        self._rows = device.upload(self._written).clone()
        self._graphs = capture(
            device,
            "number of rows, guesses of the MTP layer",
            sizes,
            lambda size: self._guessed(self._rows[:size]),
            prepare=lambda size: None,
            option="speculative_max_requests",
            progress=progress,
        ).graphs

    def close(self) -> None:
        """Destroy the graphs."""
        self._graphs.clear()

    def _guessed(self, rows: Tensor) -> Tensor:
        positions = self._table.lengths.index_select(0, rows)  # of the tokens sampled last
        states = self._states.index_select(0, rows)  # [num_rows, state_size]
        kept = self._table.known[1:]  # [num_guesses, num_rows of the table]
        guesses = [self._model.best_mtp_tokens(states)]
        for passed in range(len(kept) - 1):
            states = self._forward.mtp_over_rows(rows, positions + passed, states, guesses[-1])
            guesses.append(self._model.best_mtp_tokens(states))
        found = torch.stack(guesses)
        kept.index_copy_(1, rows.long(), found)
        return found
