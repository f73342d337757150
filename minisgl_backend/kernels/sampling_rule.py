"""The rule by which each row's next token follows from its logits, on every device.

Logits are adjusted by their row's entry in ``SamplingTable``. Greedy rows take the token with the
largest logit. Random rows add Gumbel noise (``noise``) to logits / temperature and take the
largest; no softmax is computed. Rows without filters do this twice, so that few tokens need noise:
they draw one of ``SPLITS`` parts of the vocabulary by the sum of its weights, then a token of that
part. Ties go to the smallest token id. A row whose largest logit is not finite, or that has a NaN,
gets ``NO_TOKEN``.

Filters are thresholds on the weight w = exp((x - max) / temperature) of a token. Top-k keeps the
k-th largest w and above. Top-p (arXiv 1904.09751) then takes the largest threshold whose tokens
reach the share p of the mass that top-k kept. Min-p (arXiv 2407.01082) keeps w >= min_p. Tokens
that tie with the last one kept are also kept. The most likely token always passes.

``sample_reference`` follows the rule to the letter, by sorting, and is the oracle of the tests.
Logits in float64 stay float64; all others are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.sampling_table import SamplingTable, adjust_reference
from minisgl_backend.plan import NO_TOKEN

SPLITS: Final = 32


def split_size(vocab_size: int) -> int:
    """Tokens per split, a multiple of 16; the last splits may have fewer, or none."""
    return -(-vocab_size // (16 * SPLITS)) * 16


def splits_of_rank(vocab_size: int, rank: int, num_ranks: int) -> range:
    """The splits whose tokens a rank has, if ranks share the vocabulary."""
    num_splits = -(-vocab_size // split_size(vocab_size))
    most = -(-num_splits // num_ranks)
    begin = min(most * rank, num_splits)
    return range(begin, min(begin + most, num_splits))


def sample_reference(
    logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor
) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size]: ``sampling.sample``."""
    of_rows = rows.long()
    samples = torch.arange(len(logits), device=logits.device)
    x = adjust_reference(logits, table, of_rows, positions, samples)
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
    """float32 [batch_size, SPLITS]: the Gumbel variables of the token ids right after the
    vocabulary, for keys int64 [batch_size, 1]."""
    return noise.gumbel(key, vocab_size + torch.arange(SPLITS, device=key.device))


def _split_reference(scaled: Tensor, key: Tensor) -> Tensor:
    """int64 [batch_size, 1]: the split of each row's token, drawn by keys [batch_size, 1]."""
    vocab_size = scaled.shape[1]
    size = split_size(vocab_size)
    padded = torch.nn.functional.pad(scaled, (0, SPLITS * size - vocab_size), value=-torch.inf)
    masses = padded.view(-1, SPLITS, size).logsumexp(dim=-1)  # [batch_size, SPLITS]
    return (masses + split_noise(key, vocab_size)).argmax(dim=-1, keepdim=True)


def best_of_part_reference(
    part: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, splits: range
) -> Tensor:
    """The twin of ``sampling.best_of_part``."""
    vocab_size = table.vocab_size
    size, of_rows = split_size(vocab_size), rows.long()
    begin, end = size * splits.start, min(size * splits.stop, vocab_size)
    x = at_least_float32(part[:, : end - begin])
    temperature = table.column("temperature")[of_rows][:, None]
    is_greedy = temperature == 0
    scaled = x * (1 / torch.where(is_greedy, 1.0, temperature))
    padding = (0, size * len(splits) - scaled.shape[1])
    of_splits = torch.nn.functional.pad(scaled, padding, value=-torch.inf)
    of_splits = of_splits.view(len(x), len(splits), size)
    key = noise.keys(table.seeds[of_rows], positions)[:, None]
    masses = of_splits.logsumexp(dim=-1)
    masses = masses + split_noise(key, vocab_size)[:, splits.start : splits.stop]
    mass, split = masses.max(dim=-1, keepdim=True)
    tokens = begin + split * size + torch.arange(size, device=x.device)  # [batch_size, size]
    of_split = of_splits.gather(1, split[:, :, None].expand(-1, 1, size)).squeeze(1)
    drawn = (of_split + noise.gumbel(key, tokens)).argmax(dim=-1, keepdim=True)
    best = x.amax(dim=-1, keepdim=True)
    score = torch.where(is_greedy, best, mass).masked_fill(
        best.isnan() | (best == torch.inf), torch.inf
    )
    token = torch.where(is_greedy, begin + x.argmax(dim=-1, keepdim=True), tokens.gather(1, drawn))
    return torch.cat([score, token.to(score.dtype)], dim=1)


def best_of_parts_reference(found: Tensor) -> Tensor:
    """The twin of ``sampling.best_of_parts``."""
    scores, tokens = found.unbind(dim=2)
    best = scores.argmax(dim=0, keepdim=True)  # of equals the first: the smallest token
    is_finite = scores.gather(0, best).isfinite()
    return torch.where(is_finite, tokens.gather(0, best), NO_TOKEN).squeeze(0).int()


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
    """[batch_size, 1] like ``weights``: the smallest weight that passes all filters of the row."""
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
