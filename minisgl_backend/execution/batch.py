"""A plan as the index tensors of one forward pass.

All arithmetic on rows, positions and pages happens here, on the host and over whole arrays: a
decode step takes the same few numpy calls whatever its size. Must not know models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.attention.base import Batch, HostArray
from minisgl_backend.device.base import Device
from minisgl_backend.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepIndices:
    """Where everything of a step is, as int64 arrays on the host.

    A run is what a step computes of one row: a chunk of its prompt, or one decoded token. All
    tokens of the step form one flat batch, run after run, the chunks first.

    [num_runs]: ``rows``; ``starts``, the first position of each run; ``lengths``; ``offsets``, the
    flat index of its first token.
    [num_tokens]: ``positions``; ``slots``, where in the pages the token's key and value go.
    [num_samples]: ``samples``, the flat indices of the tokens whose logits are sampled, with their
    ``sample_rows``; ``sample_positions``, the positions that the new tokens will have.
    ``fresh_pages``: the pages whose first position is written in this step.
    """

    rows: HostArray
    starts: HostArray
    lengths: HostArray
    offsets: HostArray
    positions: HostArray
    slots: HostArray
    fresh_pages: HostArray
    samples: HostArray
    sample_rows: HostArray
    sample_positions: HostArray

    @classmethod
    def of(cls, plan: StepPlan, page_table: PageTable) -> StepIndices:
        """Those of ``plan``, whose grants are written to ``page_table`` already."""
        num_chunks, num_decodes = len(plan.prefill_rows), len(plan.decode_rows)
        rows = np.concatenate([plan.prefill_rows, plan.decode_rows]).astype(np.int64)
        starts = np.concatenate([plan.prefill_starts, plan.decode_positions]).astype(np.int64)
        lengths = np.ones(num_chunks + num_decodes, np.int64)
        lengths[:num_chunks] = plan.prefill_lengths
        offsets = np.cumsum(lengths) - lengths
        if num_chunks:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
        else:
            token_rows, positions = rows, starts
        slots, fresh_pages = page_table.locate(token_rows, positions)
        sampled = np.ones(len(rows), bool)
        sampled[:num_chunks] = plan.prefill_samples != 0
        return cls(
            rows=rows,
            starts=starts,
            lengths=lengths,
            offsets=offsets,
            positions=positions,
            slots=slots,
            fresh_pages=fresh_pages,
            samples=(offsets + lengths - 1)[sampled],
            sample_rows=rows[sampled],
            sample_positions=(starts + lengths)[sampled],
        )

    def batch(self, page_table: PageTable, device: Device) -> Batch:
        """What attention needs to know."""
        return Batch(
            positions=device.upload(self.positions),
            slots=device.upload(self.slots),
            starts=self.starts,
            lengths=self.lengths,
            offsets=self.offsets,
            page_table=page_table.rows(self.rows, self.starts + self.lengths),
        )


class PageTable:
    """The executor's page table, which follows the grants of plans.

    ``pages`` is int64[max_rows, max_pages]: pages[row, index] has the positions of the row from
    index * page_size on.
    """

    def __init__(self, *, max_rows: int, max_sequence_length: int, page_size: int, dummy_page: int):
        self.page_size = page_size
        self.dummy_page = dummy_page
        max_pages = -(-max_sequence_length // page_size)
        self.pages: HostArray = np.full((max_rows, max_pages), dummy_page, np.int64)

    def grant(self, plan: StepPlan) -> None:
        """Write the plan's grants."""
        if len(plan.grant_rows):
            self.pages[plan.grant_rows, plan.grant_indices] = plan.grant_pages

    def locate(self, rows: HostArray, positions: HostArray) -> tuple[HostArray, HostArray]:
        """The slots of (row, position) pairs, and the pages whose first position is among them.

        A slot is page * page_size + offset. ``rows``, ``positions`` and slots: int64[num_tokens].
        """
        indices, within = np.divmod(positions, self.page_size)
        pages = self.pages[rows, indices]
        return pages * self.page_size + within, pages[within == 0]

    def rows(self, rows: HostArray, ends: HostArray) -> HostArray:
        """The pages of ``rows`` up to the positions ``ends``, then the dummy page.

        int64[num_rows, most pages of any of them].
        """
        counts = -(-ends // self.page_size)
        most = int(counts.max())
        behind = np.arange(most) >= counts[:, None]
        return np.where(behind, self.dummy_page, self.pages[rows, :most])
