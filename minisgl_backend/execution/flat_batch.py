"""The tokens of a step as one flat batch: first those of decoding rows, then chunk after chunk.

All arrays are on the host. Must not know pages: the page table is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.device.base import HostArray
from minisgl_backend.execution.checks import as_decodes, check_lengths
from minisgl_backend.plan import Checks, Groups, PromptChunks, Snapshots, StepPlan
from minisgl_backend.request import EMPTY, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Where each token, chunk and sample of a step is.

        tokens         those of decoding rows   | chunk 0         | chunk 1         | ...
        flat index     0                        chunk_offsets[0]  chunk_offsets[1]  chunk_offsets[2]
        in its row     position                 ends[0] - length  ends[1] - length

    int64[num_tokens]: ``rows``, ``positions``.
    int32[num_tokens]: ``tokens``, each a token id or ``LAST_TOKEN``.
    int32[num_chunks]: ``chunk_rows``; ``chunk_ends``, the position after each chunk's last one.
    int32[num_chunks + 1]: ``chunk_offsets``, the flat index of each chunk's first token, and then
    the number of tokens.
    int64[num_samples]: ``sample_indices``, the flat indices of the tokens after which a token is
    sampled, with their ``sample_rows``; ``sample_positions``, the positions of the new tokens.
    They are in the order of ``StepPlan.sample_rows``.
    ``groups``, ``snapshots``: the plan's; members of groups are flat indices.
    ``check_lengths``: if guesses are decoded, as the function of this name has it; else empty.
    """

    rows: HostArray
    positions: HostArray
    tokens: IntArray
    chunk_rows: IntArray
    chunk_offsets: IntArray
    chunk_ends: IntArray
    sample_indices: HostArray
    sample_rows: HostArray
    sample_positions: HostArray
    groups: Groups
    snapshots: Snapshots
    check_lengths: IntArray

    @classmethod
    def of(cls, plan: StepPlan, *, decodes_checks: bool = False) -> FlatBatch:
        """With ``decodes_checks``, tokens of checks are those of decoding rows, and the first of
        these. Otherwise checks are chunks, and the last of these."""
        chunks, checks = plan.chunks, plan.checks
        decodes, tokens, groups = as_decodes(plan, with_checks=decodes_checks)
        num_decodes, num_checked = len(decodes.rows), len(checks.tokens)
        kinds: list[PromptChunks | Checks] = [chunks] if decodes_checks else [chunks, checks]
        chunk_rows = np.concatenate([kind.rows for kind in kinds])
        starts = np.concatenate([kind.starts for kind in kinds])
        lengths = np.concatenate([kind.lengths for kind in kinds], dtype=int)
        offsets = num_decodes + np.concatenate([[0], np.cumsum(lengths)])  # [num_chunks + 1]
        end = int(offsets[-1])
        in_row = np.arange(num_decodes, end) + np.repeat(starts - offsets[:-1], lengths)
        first, decoding = (0, num_checked) if decodes_checks else (end - num_checked, 0)
        sample_indices = (
            np.arange(first, first + num_checked),
            offsets[1:][chunks.sampled] - 1,
            np.arange(decoding, num_decodes),
        )
        return cls(
            rows=np.concatenate([decodes.rows, np.repeat(chunk_rows, lengths)], dtype=int),
            positions=np.concatenate([decodes.positions, in_row], dtype=int),
            tokens=np.concatenate([tokens, *(kind.tokens for kind in kinds)]),
            chunk_rows=chunk_rows,
            chunk_offsets=offsets.astype(np.int32),
            chunk_ends=(starts + lengths).astype(np.int32),
            sample_indices=np.concatenate(sample_indices, dtype=int),
            sample_rows=plan.sample_rows.astype(np.int64),
            sample_positions=plan.sample_positions.astype(np.int64),
            groups=groups,
            snapshots=plan.snapshots,
            check_lengths=check_lengths(plan) if decodes_checks else EMPTY,
        )

    @property
    def num_decodes(self) -> int:
        """Number of tokens of decoding rows, which come first."""
        return int(self.chunk_offsets[0])
