"""The tokens of a step as one flat batch: those of decoding rows, then one chunk after another.

All arrays are on the host. Must not know pages: the page table is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from minisgl_backend.device.base import HostArray
from minisgl_backend.plan import NO_GROUPS, Groups, StepPlan
from minisgl_backend.request import EMPTY, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Where each token, chunk and sample of a step is.

        tokens         one of each decoding row | chunk 0         | chunk 1         | ...
        flat index     0                        chunk_offsets[0]  chunk_offsets[1]  chunk_offsets[2]
        in its row     position                 ends[0] - length  ends[1] - length

    int64[num_tokens]: ``rows``, ``positions``.
    int32[num_chunks]: ``chunk_rows``; ``chunk_ends``, the position after each chunk's last one.
    int32[num_chunks + 1]: ``chunk_offsets``, the flat index of each chunk's first token, and then
    the number of tokens.
    ``begun_from`` [num_chunks]; ``saved_chunks``, ``saved_positions``, ``saved_snapshots`` [V]: see
    ``StepPlan``.
    int64[num_samples]: ``samples``, the flat indices of the tokens whose logits are sampled, with
    their ``sample_rows``; ``sample_positions``, the positions that the new tokens will have. Chunks
    come first here, as in ``StepPlan.sample_rows``.
    ``groups``: those of the plan, with the flat indices of decoding tokens as members.
    """

    rows: HostArray
    positions: HostArray
    chunk_rows: IntArray
    chunk_offsets: IntArray
    chunk_ends: IntArray
    begun_from: IntArray
    saved_chunks: IntArray
    saved_positions: IntArray
    saved_snapshots: IntArray
    samples: HostArray
    sample_rows: HostArray
    sample_positions: HostArray
    groups: Groups = NO_GROUPS

    @classmethod
    def of(cls, plan: StepPlan) -> FlatBatch:
        groups = plan.groups
        if not len(plan.prefill_rows):
            return replace(cls.of_decodes(plan.decode_rows, plan.decode_positions), groups=groups)
        lengths = plan.prefill_lengths.astype(np.int64)  # [num_chunks]
        ends = plan.prefill_starts + lengths  # [num_chunks]
        decodes = np.arange(len(plan.decode_rows))
        offsets = len(decodes) + np.concatenate([[0], np.cumsum(lengths)])  # [num_chunks + 1]
        chunked = np.arange(offsets[0], offsets[-1])  # flat indices, which become positions
        chunked += np.repeat(plan.prefill_starts - offsets[:-1], lengths)
        sampled = plan.prefill_samples != 0
        return cls(
            rows=np.concatenate(
                [plan.decode_rows, np.repeat(plan.prefill_rows, lengths)], dtype=int
            ),
            positions=np.concatenate([plan.decode_positions, chunked], dtype=int),
            chunk_rows=plan.prefill_rows,
            chunk_offsets=offsets.astype(np.int32),
            chunk_ends=ends.astype(np.int32),
            begun_from=plan.begun_from,
            saved_chunks=plan.saved_chunks,
            saved_positions=plan.saved_positions,
            saved_snapshots=plan.saved_snapshots,
            samples=np.concatenate([offsets[1:][sampled] - 1, decodes], dtype=int),
            sample_rows=plan.sample_rows.astype(np.int64),
            sample_positions=np.concatenate([ends[sampled], plan.decode_positions + 1], dtype=int),
            groups=groups,
        )

    @classmethod
    def of_decodes(cls, decode_rows: IntArray, decode_positions: IntArray) -> FlatBatch:
        """A step of these decoding rows only, which may be none; int32 [num_decodes] both."""
        rows, positions = decode_rows.astype(np.int64), decode_positions.astype(np.int64)
        offsets, samples = np.array([len(rows)], np.int32), np.arange(len(rows))
        none = (EMPTY,) * 5
        return cls(rows, positions, EMPTY, offsets, *none, samples, rows, positions + 1)

    @property
    def num_decodes(self) -> int:
        """Number of rows that decode: the leading tokens are theirs."""
        return int(self.chunk_offsets[0])
