"""``sampling.sample`` on a CPU: the tokens of ``sampling_rule``, without sorting vocabularies.

- The largest logit of each block of the vocabulary is computed once. From these the largest logits
  of a row are found.
- Only rows with penalties, a bias, a mask or stop tokens held back are copied and adjusted.
- A random row without filters draws a split by its mass, then noise for that split alone.
- A random row with filters looks for the threshold among a few of its largest logits, or among more
  if these are not enough, and draws noise for the tokens that pass.

Reads the table on the host. Must not change logits or table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.sampling_rule import SPLITS, split_noise, split_size
from minisgl_backend.kernels.sampling_table import COLUMNS, SamplingTable, adjust_reference
from minisgl_backend.plan import NO_TOKEN

_BLOCK: Final = 128
"""Tokens per block."""
_FEW_TOKENS: Final = 2048
"""Up to this vocabulary size, a plain argmax is fast enough."""
_FIRST_CANDIDATES: Final = 64
_MORE: Final = 8
"""Factor by which candidates grow if the threshold was not among them."""


def sample_on_cpu(logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size]: ``sampling.sample``."""
    parameters = _Parameters(table, rows, positions, table.numbers.numpy()[rows.numpy()])
    is_adjusted = parameters.is_adjusted
    if not is_adjusted.any():
        return _choose(_Lines.of(logits, torch.arange(len(logits))), parameters).int()
    tokens = torch.empty(len(logits), dtype=torch.int32)
    if not is_adjusted.all():
        plain = _indices(~is_adjusted)
        tokens[plain] = _choose(_Lines.of(logits, plain), parameters.at(plain)).int()
    index = _indices(is_adjusted)
    of_index = parameters.at(index)
    x = adjust_reference(logits[index], table, of_index.rows, of_index.positions, index)
    tokens[index] = _choose(_Lines.of(x, torch.arange(len(x))), of_index).int()
    return tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Parameters:
    """The sampling parameters of some rows: their ``numbers`` [num_rows, len(COLUMNS)], their
    ``rows`` of the table and the ``positions`` of the tokens, both int32 [num_rows]."""

    table: SamplingTable
    rows: Tensor
    positions: Tensor
    numbers: npt.NDArray[np.float32]

    def at(self, index: Tensor) -> _Parameters:
        if len(index) == len(self.numbers):
            return self
        numbers = self.numbers[index.numpy()]
        return _Parameters(self.table, self.rows[index], self.positions[index], numbers)

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        """float32 [num_rows]."""
        return self.numbers[:, COLUMNS.index(name)]

    def column(self, name: str) -> Tensor:
        """float32 [num_rows, 1]."""
        return torch.from_numpy(self[name])[:, None]

    @property
    def is_adjusted(self) -> npt.NDArray[np.bool_]:
        """bool [num_rows]: whether marks, a bias or a mask change the row's logits."""
        is_changed: npt.NDArray[np.bool_] = (self["biased"] > 0) | (self["masked"] > 0)
        is_marked = self["marked"] > 0
        if not is_marked.any():
            return is_changed
        penalized = (self["repetition"] != 1) | (self["presence"] != 0) | (self["frequency"] != 0)
        is_early = self.positions.numpy() < self["stops_from"]
        is_adjusted: npt.NDArray[np.bool_] = is_changed | (is_marked & (penalized | is_early))
        return is_adjusted

    @property
    def is_filtered(self) -> npt.NDArray[np.bool_]:
        """bool [num_rows]."""
        return (self["top_k"] > 0) | (self["top_p"] < 1) | (self["min_p"] > 0)

    @property
    def keys(self) -> Tensor:
        """int64 [num_rows, 1], the keys of the rows' noise."""
        return noise.keys(self.table.seeds[self.rows], self.positions)[:, None]

    @property
    def inverse_temperatures(self) -> Tensor:
        """float32 [num_rows, 1]."""
        return 1 / self.column("temperature")


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """Rows to sample: ``lines`` int64 [num_rows], ascending, of ``logits`` [batch_size,
    vocab_size], and the largest logit of each of their blocks, [num_rows, num_blocks]."""

    logits: Tensor
    lines: Tensor
    maxima: Tensor

    @classmethod
    def of(cls, logits: Tensor, lines: Tensor) -> _Lines:
        num_rows, vocab_size = logits.shape
        whole = vocab_size // _BLOCK * _BLOCK
        maxima = logits[:, :whole].view(num_rows, whole // _BLOCK, _BLOCK).amax(dim=-1)
        if whole < vocab_size:
            maxima = torch.cat([maxima, logits[:, whole:].amax(dim=-1, keepdim=True)], dim=1)
        return cls(logits, lines, maxima if len(lines) == num_rows else maxima[lines])

    def at(self, index: Tensor) -> _Lines:
        if len(index) == len(self.lines):
            return self
        return _Lines(self.logits, self.lines[index], self.maxima[index])

    @property
    def best(self) -> Tensor:
        """[num_rows, 1]: the largest logit of each row, NaN if there is a NaN."""
        return at_least_float32(self.maxima.amax(dim=-1, keepdim=True))

    def rows(self) -> Tensor:
        """[num_rows, vocab_size]; a copy unless all lines are here."""
        return self.logits if len(self.lines) == len(self.logits) else self.logits[self.lines]

    def gather(self, tokens: Tensor) -> Tensor:
        """Logits of ``tokens`` int64 [num_rows, n]; -inf beyond the vocabulary."""
        vocab_size = self.logits.shape[1]
        found = self.logits[self.lines[:, None], tokens.clamp_max(vocab_size - 1)]
        return found.masked_fill(tokens >= vocab_size, -torch.inf)

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits [num_rows, count], descending, and their tokens, int64. Some of
        several equal logits may be missing."""
        if 2 * count * _BLOCK > self.logits.shape[1]:
            values, tokens = self.rows().topk(count)
            return values, tokens
        # each of these blocks has a logit at least as large as all logits of other blocks
        blocks = self.maxima.topk(count, sorted=False).indices
        tokens = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
        values, at = self.gather(tokens).topk(count)
        return values, tokens.gather(1, at)


def _choose(lines: _Lines, parameters: _Parameters) -> Tensor:
    """int64 [num_rows] tokens."""
    is_finite = np.isfinite(lines.best.numpy()[:, 0])
    is_greedy = parameters["temperature"] == 0
    if is_greedy.all() and is_finite.all():
        return _greedy(lines, parameters)
    tokens = torch.full((len(is_finite),), NO_TOKEN)
    for choose, which in (
        (_greedy, is_greedy),
        (_drawn_of_all, ~is_greedy & ~parameters.is_filtered),
        (_drawn_of_filtered, ~is_greedy & parameters.is_filtered),
    ):
        index = _indices(which & is_finite)
        if len(index):
            tokens[index] = choose(lines.at(index), parameters.at(index))
    return tokens


def _greedy(lines: _Lines, _parameters: _Parameters) -> Tensor:
    """The token with the largest logit. amax, which is vectorized, has found the block, and argmax,
    which is not, finds the token in it."""
    if lines.logits.shape[1] <= _FEW_TOKENS:
        return lines.rows().argmax(dim=-1)
    block = lines.maxima.argmax(dim=-1, keepdim=True)
    tokens = block * _BLOCK + torch.arange(_BLOCK)  # [num_rows, _BLOCK]
    return tokens[:, 0] + lines.gather(tokens).argmax(dim=-1)


def _drawn_of_all(lines: _Lines, parameters: _Parameters) -> Tensor:
    """Draws a split by the masses of all splits, then a token of that split."""
    best, inverse, key = lines.best, parameters.inverse_temperatures, parameters.keys
    vocab_size = lines.logits.shape[1]
    size = split_size(vocab_size)
    weights = (lines.rows() - best).mul_(inverse).exp_()
    whole = vocab_size // size
    masses = weights.new_zeros(len(weights), SPLITS)
    masses[:, :whole] = weights[:, : whole * size].view(len(weights), whole, size).sum(dim=-1)
    if whole < SPLITS:
        masses[:, whole] = weights[:, whole * size :].sum(dim=-1)
    split = (masses.log_() + split_noise(key, vocab_size)).argmax(dim=-1, keepdim=True)
    tokens = split * size + torch.arange(size)  # [num_rows, size]
    scores = (lines.gather(tokens) - best) * inverse + noise.gumbel(key, tokens)
    return tokens.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)


def _drawn_of_filtered(lines: _Lines, parameters: _Parameters) -> Tensor:
    """Draws a token of those that pass the filters."""
    vocab_size = lines.logits.shape[1]
    totals = _totals(lines, parameters, vocab_size)
    tokens = torch.empty(len(totals), dtype=torch.int64)
    count = _FIRST_CANDIDATES
    left = torch.arange(len(totals))  # rows without a token yet
    while len(left):
        count = min(count, vocab_size)
        of_left, parameters_left = lines.at(left), parameters.at(left)
        values, ids = of_left.largest(count)  # [len(left), count]
        scaled = (values - of_left.best).mul_(parameters_left.inverse_temperatures)
        weights = scaled.exp()
        threshold, is_found = _threshold_among_largest(
            weights, totals[left], parameters_left, vocab_size
        )
        passes = weights >= threshold
        most = int(passes.sum(dim=-1).max())  # those that pass come first
        noisy = scaled[:, :most] + noise.gumbel(parameters_left.keys, ids[:, :most])
        scores = noisy.masked_fill(~passes[:, :most], -torch.inf)
        is_best = scores == scores.amax(dim=-1, keepdim=True)
        chosen = torch.where(is_best, ids[:, :most], vocab_size).amin(dim=-1)
        tokens[left[is_found]] = chosen[is_found]
        left = left[~is_found]
        count *= _MORE
    return tokens


def _totals(lines: _Lines, parameters: _Parameters, vocab_size: int) -> Tensor:
    """float64 [num_rows, 1]: the sum of all weights of a row; 0 for rows that do not need it."""
    top_k = parameters["top_k"]
    needed = ((top_k == 0) | (top_k >= vocab_size)) & (parameters["top_p"] < 1)
    totals = torch.zeros(len(needed), 1, dtype=torch.float64)
    index = _indices(needed)
    if len(index):
        of_index = lines.at(index)
        inverse = parameters.at(index).inverse_temperatures
        weights = (of_index.rows() - of_index.best).mul_(inverse).exp_()
        totals[index] = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return totals


def _threshold_among_largest(
    weights: Tensor, totals: Tensor, parameters: _Parameters, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The smallest weight that passes all filters of the row, [num_rows, 1], and whether the
    largest ``weights`` [num_rows, count], descending, are enough to find it, bool [num_rows]."""
    count = weights.shape[1]
    top_k, top_p = parameters.column("top_k"), parameters.column("top_p")
    by_count = (top_k > 0) & (top_k < vocab_size)
    limit = torch.where(by_count, top_k, count).clamp_max(count).long()
    least = weights.gather(1, limit - 1) * by_count
    passed = weights.masked_fill(weights < least, 0)
    before = passed.cumsum(dim=-1, dtype=torch.float64) - passed
    total = torch.where(by_count, passed.sum(dim=-1, keepdim=True, dtype=torch.float64), totals)
    kept = (before < top_p.double() * total) & (passed > 0)
    kept[:, 0] = True
    by_mass = weights.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    threshold = torch.where(top_p < 1, torch.maximum(least, by_mass), least)
    threshold = torch.maximum(threshold, parameters.column("min_p")).clamp_max_(1.0)
    # tokens with the last candidate's weight may be missing, and all lighter tokens are
    last = weights[:, -1:]
    is_found = (threshold > last) & ((least > last) | ~by_count) | (last == 0)
    return threshold, is_found.squeeze(1) | (count == vocab_size)


def _indices(which: npt.NDArray[np.bool_]) -> Tensor:
    """int64 [n]: the indices at which ``which`` is true."""
    return torch.from_numpy(np.flatnonzero(which))
