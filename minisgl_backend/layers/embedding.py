"""Token embedding and output head, whose vocabulary is split over the ranks, and the embedding of
positions, which each rank holds as a whole.

Must not know sequences, or how a token is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from minisgl_backend.kernels.embedding import embedding
from minisgl_backend.kernels.sampling_rule import split_size, splits_of_rank
from minisgl_backend.layers.matrix import DenseMatrix
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import Place, Share, WeightPlace, empty_parameter, whole
from minisgl_backend.parallel.group import Group

_ALIGNMENT: Final = 16


class OutputHead(nn.Module):
    """A matrix with a row per token id.

    Each rank holds ``share`` rows, from ``start`` on: the rows of its ``splits``, into which the
    sampling rule divides the vocabulary (``split_size``). A single rank's are a multiple of
    ``_ALIGNMENT``, since kernels for odd numbers are several times as slow. What the last rank
    computes beyond the vocabulary is never read.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        group: Group,
        matrices: Matrices,
    ):
        """``name`` is the module's in the checkpoint."""
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.splits = splits_of_rank(vocab_size, group.rank, group.size)
        first_splits = splits_of_rank(vocab_size, 0, group.size)
        aligned = -(-vocab_size // _ALIGNMENT) * _ALIGNMENT
        self.share = min(len(first_splits) * split_size(vocab_size), aligned)
        self.start = self.share * group.rank
        held = Share(vocab_size, min(self.start, vocab_size), self._num_held(group.rank))
        inputs = Share(hidden_size, 0, hidden_size)
        self.matrix = matrices.make({name: held}, inputs, out_features=self.share)
        self.bias = empty_parameter(self.share) if bias else None

    def part(self, x: Normed, out: Tensor | None = None) -> Tensor:
        """The logits of this rank's token ids: [num_rows, hidden_size] -> [num_rows, share].

        ``out``, of that shape, takes the result if that saves memory.
        """
        logits = self.matrix.gemm(x, out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def gathered(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits of all ranks, [num_rows, vocab_size], from each rank's ``part``. A single
        rank's are a view of its part; those of several are written to ``out``, if that is given."""
        if self.group.size == 1:
            return part[:, : self.vocab_size]
        parts = self.group.all_gather(part)  # [size, num_rows, share]
        known = [part[:, : self._num_held(rank)] for rank, part in enumerate(parts)]
        return torch.cat(known, dim=1) if out is None else torch.cat(known, dim=1, out=out)

    def places(self) -> Iterator[tuple[str, Place]]:
        (name,) = self.matrix.parts
        yield "weight", self.matrix.place(name)
        if self.bias is not None:
            held = self.bias.data[: self._num_held(self.group.rank)]
            yield "bias", WeightPlace(held, (self.vocab_size,), 0, self.start)

    def _num_held(self, rank: int) -> int:
        """The number of token ids whose rows a rank holds."""
        return max(0, min(self.share, self.vocab_size - self.share * rank))


class VocabEmbedding(OutputHead):
    """The embedding, which may also be the output head. Its weight is dense in any format."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embed token ids: int [num_tokens] -> [num_tokens, hidden_size]."""
        return self.group.all_reduce(self.own_rows(token_ids))

    def own_rows(self, token_ids: Tensor) -> Tensor:
        """The same, except that the rows of ids that other ranks hold are zeros."""
        assert isinstance(self.matrix, DenseMatrix)
        start = self.start if self.group.size > 1 else None
        return embedding(token_ids, self.matrix.weight, start=start)


class PositionEmbedding(nn.Module):
    """A vector for each position, to be added to the embedding of its token; ``offset`` is the row
    of the first position's."""

    def __init__(self, num_positions: int, hidden_size: int, *, offset: int):
        super().__init__()
        self.weight = empty_parameter(offset + num_positions, hidden_size)
        self._offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """int [num_tokens] -> [num_tokens, hidden_size]"""
        return embedding(positions, self.weight[self._offset :])

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        yield "weight", whole(self.weight)
