"""The tokens of a step as one flat batch: one chunk after the other, then the decoding rows.

All arrays are on the host. Must not know pages: on a GPU their table is there, on a CPU ``batch``
adds what depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.attention.base import HostArray
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Where each token, chunk and sample of a step is.

    int64[num_tokens]: ``rows``, ``positions``.
    int32[num_chunks]: ``chunk_rows``; ``chunk_ends``, the position after each chunk's last one.
    int32[num_chunks + 1]: ``chunk_offsets``, the flat index of each chunk's first token, and then
    the number of tokens in chunks.
    int64[num_samples]: ``samples``, the flat indices of the tokens whose logits are sampled, with
    their ``sample_rows``; ``sample_positions``, the positions that the new tokens will have.
    """

    rows: HostArray
    positions: HostArray
    chunk_rows: IntArray
    chunk_offsets: IntArray
    chunk_ends: IntArray
    samples: HostArray
    sample_rows: HostArray
    sample_positions: HostArray

    @classmethod
    def of(cls, plan: StepPlan) -> FlatBatch:
        lengths = plan.prefill_lengths.astype(np.int64)
        ends = plan.prefill_starts + lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        num_chunked, num_decodes = int(offsets[-1]), len(plan.decode_rows)
        chunked = np.arange(num_chunked) + np.repeat(plan.prefill_starts - offsets[:-1], lengths)
        sampled = plan.prefill_samples != 0
        decodes = np.arange(num_chunked, num_chunked + num_decodes)
        return cls(
            rows=np.concatenate(
                [np.repeat(plan.prefill_rows, lengths), plan.decode_rows], dtype=int
            ),
            positions=np.concatenate([chunked, plan.decode_positions], dtype=int),
            chunk_rows=plan.prefill_rows,
            chunk_offsets=offsets.astype(np.int32),
            chunk_ends=ends.astype(np.int32),
            samples=np.concatenate([offsets[1:][sampled] - 1, decodes], dtype=int),
            sample_rows=np.concatenate([plan.prefill_rows[sampled], plan.decode_rows], dtype=int),
            sample_positions=np.concatenate([ends[sampled], plan.decode_positions + 1], dtype=int),
        )

    @property
    def num_chunked(self) -> int:
        """How many tokens belong to chunks."""
        return int(self.chunk_offsets[-1])
