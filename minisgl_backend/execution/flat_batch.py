"""The tokens of an eager step on a GPU, as host arrays: chunk after chunk, then decoding rows.

Unlike ``batch.StepIndices`` it knows no pages: their table is on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.attention.base import HostArray
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """What each token, chunk and sample of a step is.

    ``rows``, ``positions`` int64[num_tokens]. ``chunk_rows``, ``chunk_ends`` int32[num_chunks];
    ``chunk_offsets`` int32[num_chunks + 1], the last one being the number of tokens in chunks.
    int64[num_samples]: ``samples`` index the tokens whose logits are sampled, ``sample_rows`` are
    their rows, ``sample_positions`` those that the new tokens will have.
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
        """Tokens in chunks."""
        return int(self.chunk_offsets[-1])
