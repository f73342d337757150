"""The rule by which each row's next token follows from its logits, on every device.

Logits are adjusted by their row's entry in ``SamplingTable``. Greedy rows take the token with the
largest one. Random rows add Gumbel noise (``noise``) to logits / temperature and take the largest;
no softmax is computed. Rows without filters do this twice: they draw one of ``SPLITS`` parts of the
vocabulary by the sums of their weights, then a token of that part, so that few tokens need noise.
Ties go to the least token id. A row whose largest logit is not finite, or that has a NaN, gets
``NO_TOKEN``.

Filters are thresholds on the weight w = exp((x - max) / temperature) of a token: top-k keeps the
k-th largest w and above; top-p (arXiv 1904.09751) then takes the largest threshold whose tokens
reach the share p of the mass that top-k kept; min-p (arXiv 2407.01082) keeps w >= min_p. Tokens
that tie with the last kept one are kept too. The most likely token always passes.

``sample_reference`` follows the rule to the letter, by sorting, and is the oracle of the tests.
Logits in float64 stay so; all others are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.sampling_table import SamplingTable, adjust_reference
from minisgl_backend.plan import NO_TOKEN

SPLITS: Final = 32


def split_size(vocab_size: int) -> int:
    """Tokens of a split, a multiple of 16; the last splits may have fewer, or none."""
    return -(-vocab_size // (16 * SPLITS)) * 16


def sample_reference(
    logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor
) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size]; as ``sampling.sample``."""
    of_rows = rows.long()
    x = adjust_reference(logits, table, of_rows, positions)
    best = x.amax(dim=-1, keepdim=True)
    temperature = table.column("temperature")[of_rows][:, None]
    scaled = (x - best) * (1 / torch.where(temperature == 0, 1.0, temperature))
    weights = scaled.exp()
    filters = Filters.of(table, of_rows)
    threshold = filter_threshold_reference(weights, filters)
    key = noise.keys(table.seeds[of_rows], positions)[:, None]
    tokens = torch.arange(x.shape[1], device=x.device)
    noisy = scaled + noise.gumbel(key, tokens)
    split = _split_reference(scaled, key)
    excluded = torch.where(
        filters.are_on, weights < threshold, tokens // split_size(x.shape[1]) != split
    )
    scores = torch.where(temperature == 0, x, noisy.masked_fill(excluded, -torch.inf))
    chosen = scores.argmax(dim=-1)
    return torch.where(best.squeeze(1).isfinite(), chosen, NO_TOKEN).int()


def split_noise(key: Tensor, vocab_size: int) -> Tensor:
    """float32 [batch_size, SPLITS] Gumbel variables of keys int64 [batch_size, 1]: those of the
    token ids beyond the vocabulary."""
    return noise.gumbel(key, vocab_size + torch.arange(SPLITS, device=key.device))


def _split_reference(scaled: Tensor, key: Tensor) -> Tensor:
    """int64 [batch_size, 1]: the split of each row's token, drawn by keys [batch_size, 1]."""
    vocab_size = scaled.shape[1]
    size = split_size(vocab_size)
    padded = torch.nn.functional.pad(scaled, (0, SPLITS * size - vocab_size), value=-torch.inf)
    masses = padded.view(-1, SPLITS, size).logsumexp(dim=-1)  # [batch_size, SPLITS]
    return (masses + split_noise(key, vocab_size)).argmax(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """The filters of a batch's rows, float32 [batch_size, 1] each."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, table: SamplingTable, rows: Tensor) -> Filters:
        return cls(*(table.column(name)[rows][:, None] for name in ("top_k", "top_p", "min_p")))

    @property
    def are_on(self) -> Tensor:
        """bool [batch_size, 1]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def filter_threshold_reference(weights: Tensor, filters: Filters) -> Tensor:
    """[batch_size, 1] like ``weights``: the least weight that passes all filters of the row."""
    vocab_size = weights.shape[1]
    ordered = weights.sort(dim=-1, descending=True).values
    limit = torch.where(filters.top_k > 0, filters.top_k, vocab_size).clamp_max(vocab_size)
    least = ordered.gather(1, limit.long() - 1)
    passed = ordered.masked_fill(ordered < least, 0)
    before = passed.cumsum(dim=-1, dtype=torch.float64) - passed
    target = filters.top_p.double() * passed.sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = ((before < target) & (passed > 0)) | (filters.top_p >= 1)
    kept[:, 0] = True
    by_mass = ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    least = torch.where(filters.top_p < 1, torch.maximum(least, by_mass), least)
    return torch.maximum(least, filters.min_p).clamp_max(1.0)
