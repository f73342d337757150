"""Token embedding and output head, whose vocabulary is split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl_backend.kernels.embedding import embedding
from minisgl_backend.layers.weight_place import WeightPlace
from minisgl_backend.parallel.group import Group


class VocabEmbedding(nn.Module):
    """A matrix with a row per token id: the embedding, the output head, or both at once.

    Each rank holds ``share`` = ceil(vocab_size / group.size) rows, from ``start`` on. The last
    rank's rows beyond the vocabulary are never read.
    """

    def __init__(self, vocab_size: int, hidden_size: int, group: Group):
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.share = -(-vocab_size // group.size)
        self.start = self.share * group.rank
        self.weight = nn.Parameter(torch.empty(self.share, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embed token ids: int [num_tokens] -> [num_tokens, hidden_size]."""
        return self.group.all_reduce(embedding(token_ids, self.weight, start=self.start))

    def gather(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Join the logits of all ranks: [num_rows, share] -> [num_rows, vocab_size].

        ``out``, if given, takes the result of several ranks.
        """
        size = self.group.size
        if size == 1:
            return logits
        parts = self.group.all_gather(logits, dim=0).chunk(size)
        held = [
            max(0, min(self.share, self.vocab_size - self.share * rank)) for rank in range(size)
        ]
        known = [part[:, :width] for part, width in zip(parts, held, strict=True)]
        return torch.cat(known, dim=1) if out is None else torch.cat(known, dim=1, out=out)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        held = max(0, min(self.share, self.vocab_size - self.start))
        full = (self.vocab_size, self.weight.shape[1])
        start = min(self.start, self.vocab_size)
        yield "weight", WeightPlace(self.weight.data[:held], full, 0, start)
