"""The state of rows on the device, which a step reads before the layers and updates after them.

It has one entry per row (``RowTable``): last token, length, pages, and sampling parameters
(``SamplingTable``). A decode step is told which rows decode, which pages they were granted, and the
tokens that the table does not have (``StepInputs``). It looks up everything else itself, so a
captured graph needs no other input.

The last row of the table is the *dummy row*: padding decodes it, always at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.sampling_table import ONCE, Samples, SamplingTable
from minisgl_backend.plan import LAST_TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """The state of all rows; tensors [num_rows + 1], of which the last is the dummy row.

    ``tokens`` int32: the token that was sampled last and is not computed yet. ``known`` int32 [1 +
    mtp_tokens, num_rows + 1] are these and the MTP layer's guesses at the tokens after it; a number
    -1 - k in place of a token stands for known[k]. ``lengths`` int32: the position of the token
    that was sampled last. ``pages`` int32 [num_rows + 1, max_pages]. ``lines`` is everything
    that grants may write to: the lines of ``pages`` and, if layers have window pages, then one line
    of these for each row.
    """

    known: Tensor
    lengths: Tensor
    lines: Tensor
    pages: Tensor
    window_pages: Tensor | None
    sampling: SamplingTable

    @classmethod
    def empty(
        cls,
        num_rows: int,
        *,
        max_pages: int,
        dummy_page: int,
        vocab_size: int,
        device: torch.device,
        dummy_window_page: int | None = None,
        most_guesses: int = 0,
        mtp_tokens: int = 0,
    ) -> RowTable:
        """Greedy rows of length 0 whose pages are all the dummy page. With ``dummy_window_page``
        they also have window pages. ``most_guesses``: see ``SamplingTable.empty``; ``mtp_tokens``:
        the number of the MTP layer's guesses."""
        num_lines = (num_rows + 1) * (1 if dummy_window_page is None else 2)
        shape = (num_lines, max_pages)
        lines = torch.full(shape, dummy_page, dtype=torch.int32, device=device)
        window_pages = None
        if dummy_window_page is not None:
            window_pages = lines[num_rows + 1 :].fill_(dummy_window_page)
        return cls(
            known=torch.zeros((1 + mtp_tokens, num_rows + 1), dtype=torch.int32, device=device),
            lengths=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            lines=lines,
            pages=lines[: num_rows + 1],
            window_pages=window_pages,
            sampling=SamplingTable.empty(num_rows + 1, vocab_size, device, most_guesses),
        )

    @property
    def tokens(self) -> Tensor:
        return self.known[0]

    @property
    def dummy_row(self) -> int:
        return len(self.lengths) - 1

    def resolved(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """``tokens`` of ``rows``, int32 [num_tokens] each; the table has those that are below
        0."""
        known = self.known[(-1 - tokens).clamp_(min=0), rows]
        return torch.where(tokens < 0, known, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What the host tells a decode step, in one buffer: int32 [1 + 3 * max_batch + 3 * max_grants].

        num_grants | rows | tokens | positions | (line, index, page) of each grant

    ``rows``, ``tokens`` and ``positions`` have ``max_batch`` numbers each. A row computes the token
    at the position. A token below 0 is in the table (``RowTable.known``), and so is the position of
    ``LAST_TOKEN``. A row with guesses occurs several times, next to each other, at ascending
    positions. A grant means lines[line, index] = page.
    """

    buffer: Tensor
    max_batch: int
    max_grants: int

    @classmethod
    def empty(cls, max_batch: int, max_grants: int, device: torch.device) -> StepInputs:
        size = 1 + 3 * max_batch + 3 * max_grants
        inputs = cls(torch.zeros(size, dtype=torch.int32, device=device), max_batch, max_grants)
        inputs.lines[1] = LAST_TOKEN
        return inputs

    @property
    def lines(self) -> Tensor:
        """``rows``, ``tokens`` and ``positions``, int32 [3, max_batch]."""
        return self.buffer[1 : 1 + 3 * self.max_batch].view(3, self.max_batch)

    @property
    def grants(self) -> Tensor:
        """int32 [max_grants, 3]."""
        return self.buffer[1 + 3 * self.max_batch :].view(-1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """What the layers and the sampler of one decode step read; tensors [batch_size].

    int32: ``rows``, ``tokens``, ``positions``, ``slots`` (page * page_size + offset) and
    ``lengths``, which is positions + 1: the positions of the tokens to be sampled. ``window_slots``
    are those in window pages, if layers have them.
    """

    rows: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    window_slots: Tensor | None = None


def begin_decode(
    table: RowTable, given: StepInputs, batch_size: int, page_size: int
) -> DecodeInputs:
    """Write the grants to the page table and clear their number, then look up the first
    ``batch_size`` rows."""
    num_kinds = 4 if table.window_pages is None else 5
    numbers = torch.empty((num_kinds, batch_size), dtype=torch.int32, device=table.tokens.device)
    inputs = DecodeInputs(given.lines[0, :batch_size], *numbers)
    if not use_triton(table.tokens):
        begin_decode_reference(inputs, table, given, page_size)
        return inputs
    from minisgl_backend.kernels.triton_kernels.row_kernels import launch_begin_decode

    launch_begin_decode(
        (inputs.tokens, inputs.positions, inputs.slots, inputs.lengths, inputs.window_slots),
        given.buffer,
        table.known,
        table.lengths,
        table.lines,
        max_batch=given.max_batch,
        page_size=page_size,
    )
    return inputs


def begin_decode_reference(
    inputs: DecodeInputs, table: RowTable, given: StepInputs, page_size: int
) -> None:
    """The twin of the kernel of ``begin_decode``."""
    num_grants = int(given.buffer[0])
    if num_grants:
        grants = given.grants[:num_grants]
        table.lines[grants[:, 0], grants[:, 1]] = grants[:, 2]
        given.buffer[0] = 0
    rows, tokens, positions = given.lines[:, : len(inputs.rows)]
    inputs.tokens.copy_(table.resolved(rows, tokens))
    torch.where(tokens == LAST_TOKEN, table.lengths[rows], positions, out=inputs.positions)
    torch.add(inputs.positions, 1, out=inputs.lengths)
    of_kinds = ((table.pages, inputs.slots), (table.window_pages, inputs.window_slots))
    for pages, slots in of_kinds:
        if pages is not None and slots is not None:
            page = pages[inputs.rows, inputs.positions // page_size]
            torch.add(inputs.positions % page_size, page, alpha=page_size, out=slots)


def keep_sampled(table: RowTable, samples: Samples, sampled: Tensor) -> None:
    """Write the ``sampled`` tokens, int32 [num_samples], and their positions to the table, and
    count them in marked rows.

    Of a row with guesses, the samples up to the first that is not what was guessed count; the last
    of these is kept. A token of -1 (logits that are not finite) is kept as 0, a valid id, and not
    counted. The dummy row keeps any token, and length 0.
    """
    if not use_triton(sampled):
        keep_sampled_reference(table, samples, sampled)
        return
    from minisgl_backend.kernels.triton_kernels.row_kernels import launch_keep_sampled

    launch_keep_sampled(table.tokens, table.lengths, table.sampling, samples, sampled)


def keep_sampled_reference(table: RowTable, samples: Samples, sampled: Tensor) -> None:
    """The twin of ``keep_sampled``."""
    counts = torch.ones_like(sampled, dtype=torch.bool)
    is_last = counts.clone()
    for sample in samples.follow_guesses.nonzero().flatten().tolist():
        counts[sample] = counts[sample - 1] & (sampled[sample - 1] == samples.previous[sample])
        is_last[sample - 1] &= ~counts[sample]
        is_last[sample] = counts[sample]
    last = samples.rows[is_last].long()
    table.tokens.index_copy_(0, last, sampled[is_last].clamp_min(0))
    table.lengths.index_copy_(0, last, samples.positions[is_last])
    table.lengths[table.dummy_row].zero_()
    is_marked = table.sampling.column("marked").index_select(0, samples.rows) > 0
    if is_marked.any():  # touch no other lines: they may have no memory yet
        counted = is_marked & counts & (sampled >= 0)
        at = samples.rows[counted].long(), sampled[counted].long()
        table.sampling.marks.index_put_(at, sampled.new_tensor(ONCE), accumulate=True)
