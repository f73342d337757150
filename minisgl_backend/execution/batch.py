"""A plan as the indices of one forward pass over a page table on the host.

All arithmetic on rows, positions and pages is over whole arrays: a decode step takes the same few
numpy calls whatever its size. Must not know models or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.attention.base import Batch, HostArray
from minisgl_backend.device.base import Device
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepIndices:
    """Where everything of a step is, on the host.

    ``flat`` has the tokens and the samples; ``slots``, int64[num_tokens], says where in the pages
    the keys and values of the tokens go. ``fresh_pages``, int64, are the pages whose first position
    is written in this step.

    A run is what a step computes of one row: one decoded token, or a chunk of its prompt. The runs
    have four arrays, all int64[num_runs]: their ``rows``, first positions ``starts``, ``lengths``,
    and ``offsets``, the flat indices of their first tokens.
    """

    flat: FlatBatch
    slots: HostArray
    fresh_pages: HostArray
    rows: HostArray
    starts: HostArray
    lengths: HostArray
    offsets: HostArray

    @classmethod
    def of(cls, plan: StepPlan, page_table: PageTable) -> StepIndices:
        """The indices of ``plan``, whose grants ``page_table`` holds already."""
        flat = FlatBatch.of(plan)
        slots, fresh_pages = page_table.locate(flat.rows, flat.positions)
        ones = np.ones(len(plan.decode_rows), dtype=int)
        lengths = np.concatenate([ones, plan.prefill_lengths])
        return cls(
            flat=flat,
            slots=slots,
            fresh_pages=fresh_pages,
            rows=np.concatenate([plan.decode_rows, plan.prefill_rows], dtype=int),
            starts=np.concatenate([plan.decode_positions, plan.prefill_starts], dtype=int),
            lengths=lengths,
            offsets=np.cumsum(lengths) - lengths,
        )

    def batch(self, page_table: PageTable, device: Device) -> Batch:
        """What attention needs to know."""
        return Batch(
            positions=device.upload(self.flat.positions),
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
