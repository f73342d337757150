"""Token embedding and output head, split over the ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.layers.slot import Slot
from minisgl_backend.parallel.group import Group


class VocabEmbedding(nn.Module):
    """Rows of the embedding matrix by token id, and the product with it where it is also the head.

    A rank holds ceil(vocab / size) rows; what this makes too many at the end is never read.
    """

    def __init__(self, vocab_size: int, hidden_size: int, group: Group):
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.share = -(-vocab_size // group.size)
        self.start = self.share * group.rank
        self.weight = nn.Parameter(torch.empty(self.share, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64[num_tokens] -> [num_tokens, hidden_size]."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= self.share)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(1), 0))

    def project(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> logits [num_rows, vocab_size] of all ranks."""
        return self.gather(F.linear(hidden, self.weight))

    def gather(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """This rank's [num_rows, share] -> those of all ranks, [num_rows, vocab_size].

        ``out`` of that shape is used where ranks are joined.
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

    def slots(self) -> Iterator[tuple[str, Slot]]:
        held = max(0, min(self.share, self.vocab_size - self.start))
        full = (self.vocab_size, self.weight.shape[1])
        yield "weight", Slot(self.weight.data[:held], full, 0, min(self.start, self.vocab_size))
