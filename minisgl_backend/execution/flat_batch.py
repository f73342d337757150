"""The tokens of a step as one flat batch: first those of decoding rows, then chunk after chunk.

All arrays are on the host. Must not know pages: the page table is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from minisgl_backend.device.base import HostArray
from minisgl_backend.plan import LAST_TOKEN, NO_GROUPS, Decodes, Groups, Snapshots, StepPlan
from minisgl_backend.request import EMPTY, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Where each token, chunk and sample of a step is.

        tokens         one of each decoding row | chunk 0         | chunk 1         | ...
        flat index     0                        chunk_offsets[0]  chunk_offsets[1]  chunk_offsets[2]
        in its row     position                 ends[0] - length  ends[1] - length

    int64[num_tokens]: ``rows``, ``positions``.
    int32[num_tokens]: ``tokens``, each a token id or ``LAST_TOKEN``.
    int32[num_chunks]: ``chunk_rows``; ``chunk_ends``, the position after each chunk's last one.
    int32[num_chunks + 1]: ``chunk_offsets``, the flat index of each chunk's first token, and then
    the number of tokens.
    int64[num_samples]: ``sample_indices``, the flat indices of the tokens after which a token is
    sampled, with their ``sample_rows``; ``sample_positions``, the positions of the new tokens.
    Here chunks come first, as in ``StepPlan.sample_rows``.
    ``groups``, ``snapshots``: the plan's; members of groups are flat indices.
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
    groups: Groups = NO_GROUPS
    snapshots: Snapshots = field(default_factory=Snapshots)

    @classmethod
    def of(cls, plan: StepPlan) -> FlatBatch:
        groups, chunks, decodes = plan.groups_by_index, plan.chunks, plan.decodes
        if not len(chunks.rows):
            return replace(cls.of_decodes(decodes), groups=groups)
        lengths = chunks.lengths.astype(np.int64)  # [num_chunks]
        decoding = np.arange(len(decodes.rows))
        offsets = len(decoding) + np.concatenate([[0], np.cumsum(lengths)])  # [num_chunks + 1]
        chunked = np.arange(offsets[0], offsets[-1])  # flat indices, which become positions
        chunked += np.repeat(chunks.starts - offsets[:-1], lengths)
        counts = chunks.num_sampled
        sampled = chunks.sample_positions - 1 + np.repeat(offsets[:-1] - chunks.starts, counts)
        return cls(
            rows=np.concatenate([decodes.rows, np.repeat(chunks.rows, lengths)], dtype=int),
            positions=np.concatenate([decodes.positions, chunked], dtype=int),
            tokens=np.concatenate([_tokens(decodes), chunks.tokens]),
            chunk_rows=chunks.rows,
            chunk_offsets=offsets.astype(np.int32),
            chunk_ends=chunks.ends,
            sample_indices=np.concatenate([sampled, decoding], dtype=int),
            sample_rows=plan.sample_rows.astype(np.int64),
            sample_positions=plan.sample_positions.astype(np.int64),
            groups=groups,
            snapshots=plan.snapshots,
        )

    @classmethod
    def of_decodes(cls, decodes: Decodes) -> FlatBatch:
        """A step with only these decoding rows; there may be none."""
        rows, positions = decodes.rows.astype(np.int64), decodes.positions.astype(np.int64)
        offsets, samples = np.array([len(rows)], np.int32), np.arange(len(rows))
        return cls(
            rows=rows,
            positions=positions,
            tokens=_tokens(decodes),
            chunk_rows=EMPTY,
            chunk_offsets=offsets,
            chunk_ends=EMPTY,
            sample_indices=samples,
            sample_rows=rows,
            sample_positions=positions + 1,
        )

    @property
    def num_decodes(self) -> int:
        """Number of decoding rows, whose tokens come first."""
        return int(self.chunk_offsets[0])


def _tokens(decodes: Decodes) -> IntArray:
    """The tokens of decoding rows, int32[num_decodes]."""
    return np.full(len(decodes.rows), LAST_TOKEN, np.int32)
