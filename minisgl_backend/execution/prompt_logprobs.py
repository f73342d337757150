"""Log-probabilities of a prompt's own tokens, from the residual stream of its chunks.

The output head runs over a slice of the positions at a time, so there are never more than
``most_rows`` rows of logits, however long the chunks are. A slice leaves only a few numbers for
each position. Runs after the layers, whether these are captured or not.

All ranks run the head, which is split over them; only rank 0 reads the logits. Must not know pages,
attention or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.kernels.likelihood import Likelihoods, likelihoods
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.plan import Admission, PromptChunks, Scores
from minisgl_backend.request import FloatArray, IntArray, PromptLogprobs

_SLICE_BYTES: Final = 2**28
_TILE_ROWS: Final = 128
"""Slices are multiples of the tiles of GEMMs on a GPU."""
_MOST_ROWS: Final = 1024
"""With more rows a GEMM takes no less time per row."""


def rows_at_once(vocab_size: int, dtype: torch.dtype) -> int:
    """How many positions' logits are computed at once: as many as fit in 256 MiB, at most 1,024."""
    held = _SLICE_BYTES // (vocab_size * dtype.itemsize)
    return max(_TILE_ROWS, min(held // _TILE_ROWS * _TILE_ROWS, _MOST_ROWS))


@dataclass(frozen=True, slots=True, eq=False)
class ScoredChunks:
    """The scored positions of a step's S scored chunks, one chunk after another.

    On the host: ``tokens`` int32 [num_scored], the tokens after the positions; ``borders`` int64
    [S + 1], where each chunk's begin and end; ``counts`` int64 [S], the number of alternatives that
    each chunk asks for. ``found`` [num_scored] is on the device until ``download``.
    """

    tokens: IntArray
    borders: HostArray
    counts: HostArray
    found: Likelihoods

    def download(self, device: Device) -> ScoredChunks:
        """The same on the host, valid once the queue has run the copy."""
        return replace(self, found=self.found.each(device.download))

    def by_chunk(self) -> tuple[PromptLogprobs, ...]:
        """The log-probabilities of each chunk. All must be on the host."""
        logprobs: FloatArray = self.found.logprobs.numpy().astype(np.float32)
        ranks: IntArray = self.found.ranks.numpy().astype(np.int32)
        top: FloatArray = self.found.top.numpy().astype(np.float32)
        top_ids: IntArray = self.found.top_ids.numpy().astype(np.int32)
        return tuple(
            PromptLogprobs(
                self.tokens[begin:end],
                logprobs[begin:end],
                ranks[begin:end],
                top_ids[begin:end, :count],
                top[begin:end, :count],
            )
            for (begin, end), count in zip(
                pairwise(self.borders.tolist()), self.counts.tolist(), strict=True
            )
        )


class PromptScorer:
    """Scores positions of prompts with the head of ``model``."""

    def __init__(self, model: Decoder, device: Device, *, num_rows: int, most_rows: int) -> None:
        """``num_rows`` is that of the row table; ``most_rows`` bounds the logits of a slice."""
        self._model = model
        self._device = device
        self._most_rows = most_rows
        self._num_alternatives = np.zeros(num_rows, np.int64)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note the number of alternatives that each request asks for."""
        for admission in admissions:
            asked = admission.sampling.num_prompt_logprobs
            self._num_alternatives[admission.row] = asked or 0

    def scored(
        self, hidden: Tensor, scores: Scores, chunks: PromptChunks, chunk_offsets: IntArray
    ) -> ScoredChunks | None:
        """Compute the ``scores`` of a plan, of which there are S > 0. None on ranks other than 0.

        ``hidden`` [num_tokens, hidden_size] is the residual stream of the step, in which chunk i
        begins at ``chunk_offsets`` [i].
        """
        of, lengths = scores.chunks, scores.lengths
        borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # [S + 1]
        begins = chunk_offsets[of] + scores.starts - chunks.starts[of]  # [S]
        positions = np.arange(borders[-1]) + np.repeat(begins - borders[:-1], lengths)
        counts = self._num_alternatives[chunks.rows[of]]  # [S]
        counts = np.minimum(counts, self._model.spec.vocab_size)
        found = self.score(hidden, positions, scores.tokens, int(counts.max()))
        return None if found is None else ScoredChunks(scores.tokens, borders, counts, found)

    def score(
        self, hidden: Tensor, positions: HostArray, tokens: IntArray, num_top: int
    ) -> Likelihoods | None:
        """Score ``tokens`` [n] after the ``positions`` [n] of ``hidden`` [num_tokens,
        hidden_size]. None on ranks other than 0."""
        numbers = np.stack([positions, tokens], dtype=np.int32, casting="same_kind")
        where, targets = self._device.upload(numbers)  # int32 [n] each
        slices = zip(where.split(self._most_rows), targets.split(self._most_rows), strict=True)
        parts = [self._score_slice(hidden, *each, num_top) for each in slices]
        if self._model.group.rank > 0:
            return None
        fields = zip(*((p.logprobs, p.ranks, p.top, p.top_ids) for p in parts), strict=True)
        return Likelihoods(*(torch.cat(field) for field in fields))

    def _score_slice(
        self, hidden: Tensor, where: Tensor, targets: Tensor, num_top: int
    ) -> Likelihoods:
        """A separate function, so that its logits are freed before the next are computed."""
        logits = self._model.logits(hidden.index_select(0, where))  # [<= most_rows, vocab_size]
        if self._model.group.rank > 0:
            nothing = logits[:0, 0]
            return Likelihoods(nothing, nothing, nothing, nothing)
        return likelihoods(logits, targets, num_top)
