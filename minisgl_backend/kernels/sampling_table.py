"""The sampling parameters of each row, which the host writes when a request takes the row.

For most rows these are a few numbers. Penalties, biases, grammars and held-back stop tokens change
single logits before a token is chosen. Their data for each token of the vocabulary is in a line of
``marks`` and ``bias``; other rows' lines are never read. Masks belong to the samples of a step, as
a row may have several, each with its own: they are written again for each step.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32

COLUMNS: Final = (
    "temperature",  # 0 is greedy
    "top_k",  # 0 is off
    "top_p",  # 1 is off
    "min_p",  # 0 is off
    "repetition",  # 1 is off
    "presence",  # 0 is off
    "frequency",  # 0 is off
    "stops_from",  # the first position at which stop tokens may be sampled
    "marked",  # 1 if the row's line of marks counts, else 0
    "biased",  # 1 if its line of bias counts, else 0
    "masked",  # 1 if the lines of masks of its samples count, else 0
)

IN_PROMPT: Final = 1
IS_STOP: Final = 2
ONCE: Final = 4
"""A mark is the sum of these: the first if the prompt has the token, the second if the token ends
the request, and ``ONCE`` for each time that it has been sampled."""

WORD: Final = 32
"""Tokens per word of a mask: token t is allowed if bit t % 32 of word t // 32 is set."""


class SamplingTable(NamedTuple):
    """``numbers`` float32 [num_rows, len(COLUMNS)], ``seeds`` int64 [num_rows], ``marks`` int32 and
    ``bias`` float32 [num_rows, vocab_size], and ``masks`` int32 [most_samples, vocab_size / WORD],
    a line for each sample of a step, in their order.

    It is a tuple because Triton's kernels take it as a whole.
    """

    numbers: Tensor
    seeds: Tensor
    marks: Tensor
    bias: Tensor
    masks: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, vocab_size: int, device: torch.device, most_guesses: int = 0
    ) -> SamplingTable:
        """Greedy rows. A step samples a token for each row and after each guess, at most. On a CPU,
        lines of marks and bias take no memory until they are written."""
        lines = (num_rows, vocab_size)
        of_masks = (num_rows + most_guesses, num_words(vocab_size))
        table = cls(
            numbers=torch.zeros((num_rows, len(COLUMNS)), dtype=torch.float32, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            # unlike torch's, numpy's zeros are pages that the system maps only when touched
            marks=torch.from_numpy(np.zeros(lines, np.int32)).to(device),
            bias=torch.from_numpy(np.zeros(lines, np.float32)).to(device),
            # all tokens, as for samples of rows that have ended before their masks were written
            masks=torch.full(of_masks, -1, dtype=torch.int32, device=device),
        )
        table.column("top_p").fill_(1)
        table.column("repetition").fill_(1)
        return table

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int, most_guesses: int = 0) -> int:
        """Bytes of all marks, biases and masks; the rest is little."""
        mask_bytes = 4 * num_words(vocab_size)
        return num_rows * (8 * vocab_size + mask_bytes) + most_guesses * mask_bytes

    @property
    def vocab_size(self) -> int:
        return self.marks.shape[1]

    @property
    def most_samples(self) -> int:
        """The most tokens that a step samples."""
        return self.masks.shape[0]

    def column(self, name: str) -> Tensor:
        """float32 [num_rows], a view."""
        return self.numbers[:, COLUMNS.index(name)]


class Samples(NamedTuple):
    """Which tokens a step samples; int32 [num_samples].

    ``rows`` of the table, ``positions`` of the new tokens, and ``previous``, the tokens at the
    positions before. A row with guesses has several samples, next to each other and in order: the
    ``previous`` of all but the first are its guesses. Those of first samples are not read.
    """

    rows: Tensor
    positions: Tensor
    previous: Tensor

    def at(self, index: Tensor) -> Samples:
        """The samples at ``index``, int64 [n]."""
        return Samples(*(each[index] for each in self))

    @property
    def follow_guesses(self) -> Tensor:
        """Which samples come after a guess of their row, bool [num_samples]."""
        is_same = self.rows[1:] == self.rows[:-1]
        return torch.nn.functional.pad(is_same, (1, 0))


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // WORD)


def adjust_reference(
    logits: Tensor, table: SamplingTable, samples: Samples, index: Tensor
) -> Tensor:
    """``logits`` [batch_size, vocab_size] of ``samples``, with penalties and biases; -inf for stop
    tokens that are held back, and for tokens that a mask forbids. ``index`` int64 [batch_size] says
    which of the step's samples these are.

    The repetition penalty (CTRL, arXiv 1909.05858) divides positive logits of tokens in the prompt
    or the output, and multiplies negative ones. The presence penalty is subtracted once from the
    logits of tokens in the output, and the frequency penalty once for each occurrence. To a sample,
    the guesses before it are part of the output.
    """
    rows, positions, previous = samples

    def column(name: str) -> Tensor:
        return table.column(name)[rows][:, None]

    x = at_least_float32(logits)
    marks = table.marks[rows]  # a copy
    for sample in samples.follow_guesses.nonzero().flatten().tolist():
        marks[sample] = marks[sample - 1]
        marks[sample, previous[sample]] += ONCE
    marks = marks.where(column("marked") > 0, 0)
    counts = marks // ONCE
    repeated = torch.where(x > 0, x / column("repetition"), x * column("repetition"))
    x = torch.where((marks & ~IS_STOP) > 0, repeated, x)
    x = x - column("frequency") * counts - column("presence") * (counts > 0)
    x = x + table.bias[rows].where(column("biased") > 0, 0)
    is_early = positions[:, None] < column("stops_from")
    x = x.masked_fill(is_early & ((marks & IS_STOP) > 0), -torch.inf)
    is_masked = column("masked") > 0
    if not is_masked.any():
        return x
    tokens = torch.arange(x.shape[1], device=x.device)
    bits = table.masks[index][:, tokens // WORD] >> (tokens % WORD)  # [batch_size, vocab_size]
    return x.masked_fill(is_masked & ((bits & 1) == 0), -torch.inf)
