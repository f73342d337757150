"""The tokens of a step as one flat batch: first those of decoding rows, then those of rows with
guesses, then prompt chunk after prompt chunk.

Rows with guesses are chunks, too. All arrays are on the host. Must not know pages: the page table
is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.device.base import HostArray
from minisgl_backend.plan import LAST_TOKEN, TO_SAMPLE, Groups, Snapshots, StepPlan
from minisgl_backend.request import EMPTY, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Where each token, chunk and sample of a step is.

        tokens         one of each decoding row | chunk 0         | chunk 1         | ...
        flat index     0                        chunk_offsets[0]  chunk_offsets[1]  chunk_offsets[2]
        in its row     position                 ends[0] - length  ends[1] - length

    int64[num_tokens]: ``rows``, ``positions``.
    int32[num_tokens]: ``tokens``, each a token id, ``LAST_TOKEN`` or one of ``MTP_GUESS`` and
    below.
    int32[num_chunks]: ``chunk_rows``; ``chunk_ends``, the position after each chunk's last one. The
    first ``num_checks`` chunks are checks, the others those of the plan.
    int32[num_chunks + 1]: ``chunk_offsets``, the flat index of each chunk's first token, and then
    the number of tokens.
    int64[num_samples]: ``sample_indices``, the flat indices of the tokens after which a token is
    sampled, with their ``sample_rows``; ``sample_positions``, the positions of the new tokens.
    They are in the order of ``StepPlan.sample_rows``.
    int32[num_chunks - num_checks]: ``after_chunks``, the plan's ``next_tokens``.
    ``groups``, ``snapshots``: the plan's; members of groups are flat indices.
    """

    rows: HostArray
    positions: HostArray
    tokens: IntArray
    chunk_rows: IntArray
    chunk_offsets: IntArray
    chunk_ends: IntArray
    num_checks: int
    sample_indices: HostArray
    sample_rows: HostArray
    sample_positions: HostArray
    after_chunks: IntArray
    groups: Groups
    snapshots: Snapshots

    @classmethod
    def of(cls, plan: StepPlan) -> FlatBatch:
        checks, chunks, decodes = plan.checks, plan.chunks, plan.decodes
        num_decodes, num_checked = len(decodes.rows), len(checks.tokens)
        chunk_rows = np.concatenate([checks.rows, chunks.rows])
        starts = np.concatenate([checks.starts, chunks.starts])
        lengths = np.concatenate([checks.lengths, chunks.lengths], dtype=int)
        offsets = num_decodes + np.concatenate([[0], np.cumsum(lengths)])  # [num_chunks + 1]
        in_row = np.arange(num_decodes, offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        sample_indices = (
            np.arange(num_decodes, num_decodes + num_checked),
            offsets[1 + len(checks.rows) :][chunks.sampled] - 1,
            np.arange(num_decodes),
        )
        last = np.full(num_decodes, LAST_TOKEN, np.int32)
        return cls(
            rows=np.concatenate([decodes.rows, np.repeat(chunk_rows, lengths)], dtype=int),
            positions=np.concatenate([decodes.positions, in_row], dtype=int),
            tokens=np.concatenate([last, checks.tokens, chunks.tokens]),
            chunk_rows=chunk_rows,
            chunk_offsets=offsets.astype(np.int32),
            chunk_ends=(starts + lengths).astype(np.int32),
            num_checks=len(checks.rows),
            sample_indices=np.concatenate(sample_indices, dtype=int),
            sample_rows=plan.sample_rows.astype(np.int64),
            sample_positions=plan.sample_positions.astype(np.int64),
            after_chunks=chunks.next_tokens,
            groups=plan.groups_by_index,
            snapshots=plan.snapshots,
        )

    @property
    def num_decodes(self) -> int:
        """Number of decoding rows without guesses, whose tokens come first."""
        return int(self.chunk_offsets[0])

    @property
    def check_lengths(self) -> IntArray:
        """The numbers of tokens of decoding rows, those without guesses first, if some have
        guesses; else empty. Their tokens come first."""
        if not self.num_checks:
            return EMPTY
        lengths = np.diff(self.chunk_offsets[: self.num_checks + 1])
        return np.concatenate([np.ones(self.num_decodes, np.int32), lengths])

    @property
    def next_tokens(self) -> IntArray:
        """The token after each token, int32[num_tokens], or ``TO_SAMPLE``."""
        found, of_prompts = np.roll(self.tokens, -1), self.chunk_offsets[self.num_checks :]
        found[: of_prompts[0]] = TO_SAMPLE
        found[of_prompts[1:] - 1] = self.after_chunks
        return found
