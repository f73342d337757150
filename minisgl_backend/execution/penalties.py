"""How often each token has occurred in the rows of a CPU whose sampling depends on it.

Only rows with penalties have a line here, since a line is as long as the vocabulary. Lines are used
again, and their number doubles when none is free. Must not know pages or plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.attention.base import HostArray
from minisgl_backend.request import IntArray


class TokenCounts:
    """For each line and token: how often the output has it, and whether the prompt has it."""

    def __init__(self, vocab_size: int):
        self._outputs = torch.zeros(0, vocab_size, dtype=torch.int32)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool)
        self._line_of_row: dict[int, int] = {}
        self._free: list[int] = []

    def open(self, row: int, history: IntArray, num_prompt_tokens: int) -> None:
        """Give the row a line, and count ``history`` in it: the prompt, then the output so far.

        ``history`` is int32[num_tokens].
        """
        self.close(row)
        if not self._free:
            self._grow()
        line = self._line_of_row[row] = self._free.pop()
        tokens = torch.from_numpy(history).long()
        vocab_size = self._outputs.shape[1]
        self._outputs[line] = tokens[num_prompt_tokens:].bincount(minlength=vocab_size)
        self._in_prompt[line] = False
        self._in_prompt[line, tokens[:num_prompt_tokens]] = True

    def close(self, row: int) -> None:
        """Free the line of the row, if it has one."""
        line = self._line_of_row.pop(row, None)
        if line is not None:
            self._free.append(line)

    def record(self, rows: HostArray, tokens: Tensor) -> None:
        """Count the sampled tokens of rows, int64[num_rows]; negative ids are not counted."""
        lines = self._lines(rows)
        valid = (tokens >= 0).to(torch.int32)
        self._outputs.index_put_((lines, tokens.clamp_min(0)), valid, accumulate=True)

    def penalize(
        self,
        logits: Tensor,
        rows: HostArray,
        *,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> Tensor:
        """The logits of rows, [num_rows, vocab_size], after three penalties, [num_rows, 1] each.

        Repetition (CTRL, arXiv 1909.05858) divides positive and multiplies negative logits of
        tokens that occur in prompt or output. For tokens that occur in the output, presence is
        subtracted once, and frequency once for each occurrence.
        """
        lines = self._lines(rows)
        outputs = self._outputs[lines].to(logits.dtype)  # [num_rows, vocab_size]
        seen = self._in_prompt[lines] | (outputs > 0)  # bool[num_rows, vocab_size]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * outputs - presence * (outputs > 0)

    def _lines(self, rows: HostArray) -> Tensor:
        lines = [self._line_of_row[row] for row in rows.tolist()]
        return torch.tensor(lines)

    def _grow(self) -> None:
        num_lines, vocab_size = self._outputs.shape
        shape = (max(num_lines, 4), vocab_size)
        self._outputs = torch.cat([self._outputs, self._outputs.new_zeros(shape)])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(shape)])
        self._free = list(range(len(self._outputs) - 1, num_lines - 1, -1))
