"""Turns documents into rows of tokens for training.

Documents follow each other in a row without a mask between them, so that the model learns to
answer with other text before the question. Between documents, and sometimes inside a prompt, the
positions jump ahead, so that training has distances far longer than a row. Must not know what a
document says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.corpus import PROMPT_WEIGHT, CorpusMaker

_CHUNK: Final = 512
"""Number of documents that are tokenized together."""
_COUNTED: Final = 0.15
"""The share of a prompt's tokens that count in the loss."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens and positions of (rows, length + 1), and the loss weight of each token."""


class BatchMaker:
    """Draws batches of a fixed number of tokens, some of short rows and some of long ones."""

    def __init__(
        self, tokenizer: Tokenizer, seed: int, tokens: int, context: int, long_every: int = 4
    ) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed + 1)
        self._tokens = tokens
        self._context = context
        self._long_every = long_every
        self._short_rows = self._rows(CorpusMaker(seed + 2), False, 256)
        self._long_rows = self._rows(CorpusMaker(seed + 3), True, 1024)

    def batches(self, count: int) -> Iterator[Batch]:
        """Draws ``count`` batches."""
        for i in range(count):
            is_long = i % self._long_every == self._long_every - 1
            length = 1024 if is_long else 256
            source = self._long_rows if is_long else self._short_rows
            rows = list(islice(source, self._tokens // length))
            yield (
                torch.tensor([row[0] for row in rows]),
                torch.tensor([row[1] for row in rows]),
                torch.tensor([row[2] for row in rows], dtype=torch.float32),
            )

    def _rows(
        self, maker: CorpusMaker, has_long: bool, length: int
    ) -> Iterator[tuple[list[int], list[int], list[float]]]:
        tokens: list[int] = []
        weights: list[float] = []
        for ids, piece_weights in self._encoded(maker, has_long):
            tokens += ids
            weights += piece_weights
            if len(tokens) > length:
                tokens, weights = tokens[: length + 1], weights[: length + 1]
                yield tokens, self._positions(weights), weights
                tokens, weights = [], []

    def _encoded(
        self, maker: CorpusMaker, has_long: bool
    ) -> Iterator[tuple[list[int], list[float]]]:
        plain, long = maker.documents(), maker.documents(long=True)
        while True:
            documents = [
                next(long if has_long and self._rng.random() < 0.4 else plain)
                for _ in range(_CHUNK)
            ]
            pieces = [piece for document in documents for piece in document.pieces]
            encodings = iter(self._tokenizer.encode_batch_fast([text for text, _ in pieces]))
            for document in documents:
                ids: list[int] = []
                weights: list[float] = []
                for _, weight in document.pieces:
                    piece_ids = next(encodings).ids
                    ids += piece_ids
                    if weight > PROMPT_WEIGHT:
                        weights += [weight] * len(piece_ids)
                    else:
                        weights += [self._prompt_weight(weight) for _ in piece_ids]
                yield ids, weights

    def _prompt_weight(self, weight: float) -> float:
        """Nothing for most tokens, so that their logits need not be computed."""
        return weight / _COUNTED if self._rng.random() < _COUNTED else 0.0

    def _positions(self, weights: list[float]) -> list[int]:
        """Consecutive positions, or in every third row ones with a few jumps in prompts."""
        rng = self._rng
        count = len(weights)
        jumps: dict[int, int] = {}
        if rng.random() < 0.35:
            room = self._context - count
            for _ in range(rng.randint(1, 3)):
                size = int(room * rng.random() ** 2 / 3)
                place = rng.randrange(count)
                if weights[place] < 0.5:
                    jumps[place] = size
        positions = []
        position = 0
        for i in range(count):
            position += jumps.get(i, 0)
            positions.append(position)
            position += 1
        return positions
