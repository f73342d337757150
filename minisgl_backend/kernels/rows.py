"""What a decode step reads from the state of its rows before the layers, and writes back after.

The state of a request lives on the GPU, one entry a row (``RowTable``): its last token, its length,
its pages and how it is sampled. A step is told only which rows decode and which pages they were
granted (``StepInbox``), and finds everything else itself: a captured graph needs no other input.

The last row of the table is the *dummy row*: padding decodes it at position 0 over and over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_jit
from minisgl_backend.kernels.sampling import RowParameters


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """The state of all rows; tensors [num_rows + 1], of which the last is the dummy row.

    ``tokens`` int32: sampled last, not computed yet. ``lengths`` int32: the position at which that
    token stands. ``pages`` int32 [num_rows + 1, max_pages]. ``temperature``, ``top_p``, ``min_p``
    float32, ``top_k`` int32, ``seeds`` int64: see ``sampling.RowParameters``.
    """

    tokens: Tensor
    lengths: Tensor
    pages: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, *, max_pages: int, dummy_page: int, device: torch.device
    ) -> RowTable:
        """Greedy rows of length 0 whose pages are all the dummy page."""

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows + 1, dtype=dtype, device=device)

        shape = (num_rows + 1, max_pages)
        return cls(
            tokens=zeros(torch.int32),
            lengths=zeros(torch.int32),
            pages=torch.full(shape, dummy_page, dtype=torch.int32, device=device),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32) + 1,
            min_p=zeros(torch.float32),
            seeds=zeros(torch.int64),
        )

    @property
    def dummy_row(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True, eq=False)
class StepInbox:
    """What the host tells a decode step, in one buffer: int32 [1 + max_batch + 3 * max_grants].

    The number of grants, then the rows that decode, then for each grant row, index and page:
    pages[row, index] = page.
    """

    buffer: Tensor
    max_batch: int
    max_grants: int

    @classmethod
    def empty(cls, max_batch: int, max_grants: int, device: torch.device) -> StepInbox:
        size = 1 + max_batch + 3 * max_grants
        return cls(torch.zeros(size, dtype=torch.int32, device=device), max_batch, max_grants)

    @property
    def rows(self) -> Tensor:
        """int32 [max_batch]."""
        return self.buffer[1 : 1 + self.max_batch]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """What the layers and the sampler of one decode step read; tensors [batch_size].

    int32: ``rows``, ``tokens``, ``positions``, ``slots`` (page * page_size + offset) and
    ``lengths``, positions + 1.
    """

    rows: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    sampling: RowParameters


def begin_decode(
    table: RowTable, inbox: StepInbox, batch_size: int, page_size: int, *, pdl: bool = False
) -> DecodeInputs:
    """Write the granted pages, then look up the first ``batch_size`` rows of the inbox."""
    device = table.tokens.device
    numbers = torch.empty((4, batch_size), dtype=torch.int32, device=device)
    tokens, positions, slots, lengths = numbers
    counts = torch.empty(batch_size, dtype=torch.int32, device=device)
    shares = torch.empty((3, batch_size), dtype=torch.float32, device=device)
    seeds = torch.empty(batch_size, dtype=torch.int64, device=device)
    sampling = RowParameters(
        temperature=shares[0],
        top_k=counts,
        top_p=shares[1],
        min_p=shares[2],
        seeds=seeds,
        positions=lengths,
    )
    inputs = DecodeInputs(inbox.rows[:batch_size], tokens, positions, slots, lengths, sampling)
    if not use_jit(table.tokens):
        begin_decode_reference(inputs, table, inbox, page_size)
        return inputs
    from minisgl_backend.kernels.jit import rows as jit

    jit.launch_begin_decode(inputs, table, inbox, page_size, pdl=pdl)
    return inputs


def begin_decode_reference(
    inputs: DecodeInputs, table: RowTable, inbox: StepInbox, page_size: int
) -> None:
    """The twin of the kernel of ``begin_decode``."""
    num_grants = int(inbox.buffer[0])
    grants = inbox.buffer[1 + inbox.max_batch :].view(-1, 3)[:num_grants].long()
    table.pages[grants[:, 0], grants[:, 1]] = grants[:, 2].int()
    rows = inputs.rows.long()
    inputs.tokens.copy_(table.tokens[rows])
    inputs.positions.copy_(table.lengths[rows])
    inputs.lengths.copy_(inputs.positions + 1)
    pages = table.pages[rows, inputs.positions.long() // page_size]
    inputs.slots.copy_(pages * page_size + inputs.positions % page_size)
    sampling = inputs.sampling
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        getattr(sampling, name).copy_(getattr(table, name)[rows])


def finish_decode(
    table: RowTable, inbox: StepInbox, inputs: DecodeInputs, sampled: Tensor, *, pdl: bool = False
) -> None:
    """Keep the ``sampled`` tokens, int32 [batch_size], and count them; empty the inbox of grants.

    A token of -1 (not finite logits) is kept as 0, a valid id. The dummy row stays at length 0.
    """
    if not use_jit(sampled):
        finish_decode_reference(table, inbox, inputs, sampled)
        return
    from minisgl_backend.kernels.jit import rows as jit

    jit.launch_finish_decode(table, inbox, inputs, sampled, pdl=pdl)


def finish_decode_reference(
    table: RowTable, inbox: StepInbox, inputs: DecodeInputs, sampled: Tensor
) -> None:
    """The twin of ``finish_decode``."""
    rows = inputs.rows.long()
    table.tokens[rows] = sampled.clamp_min(0)
    table.lengths[rows] = inputs.lengths
    table.lengths[table.dummy_row] = 0
    inbox.buffer[0] = 0
