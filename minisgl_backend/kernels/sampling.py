"""The next token of each row from its logits, inside a CUDA graph: all parameters are on the GPU
(``SamplingTable``), and logits are adjusted by those of their row as they are read.

Greedy rows are an argmax. Random rows add Gumbel noise (``noise``) to logits / temperature and take
the largest; no softmax is written. Where all tokens may be drawn, this is done twice: one of
``SPLITS`` parts of the vocabulary is drawn by the sums of their weights, then a token of that part,
so that few tokens need noise.

Filters are thresholds on the weight w = exp((x - max) / temperature) of a token, found by counting
instead of sorting: top-k keeps w of the k-th largest and above; top-p (arXiv 1904.09751) then keeps
the largest threshold whose tokens reach the share p of what top-k kept; min-p (arXiv 2407.01082)
keeps w >= min_p. Tokens that tie with the last kept one are kept too. The most likely token always
passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.dispatch import use_jit
from minisgl_backend.kernels.sampling_table import SamplingTable, adjust_reference

NO_TOKEN = -1
"""Stands for the token of a row whose largest logit is not finite or that holds a NaN."""

SPLITS = 32
BLOCK = 1024
"""Tokens of a split that a program reads at once."""
ROUNDS = 2
"""How often the splits of a row with filters may count its tokens."""
BINS = 64
SUMS = 3
"""Masses of a split in one round: above its bins, in them, and below."""
BRACKET = 6
"""How many numbers say where the threshold of a row is."""
MAX_CANDIDATES = 2048
"""The most tokens of a row among which its threshold is searched for."""


class SamplingWorkspace:
    """Partial results of the splits, and for rows with filters: the largest weight of each block,
    tokens and masses by bin, the bracket of the threshold, the best of what lies above it, and the
    candidates in it; one a stream.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((max_batch_size, *shape), dtype=dtype, device=device)

        self.best = empty(SPLITS)
        self.tokens = empty(SPLITS, dtype=torch.int32)
        self.heaviest = empty(SPLITS, -(-split_size(vocab_size) // BLOCK))
        self.counts = empty(ROUNDS, SPLITS, BINS, dtype=torch.int32)
        self.sums = empty(ROUNDS, SPLITS, SUMS)
        self.brackets = empty(BRACKET, dtype=torch.int32)
        self.above = empty(SPLITS)
        self.above_scores = empty(SPLITS)
        self.above_tokens = empty(SPLITS, dtype=torch.int32)
        self.scaled = empty(MAX_CANDIDATES)
        self.candidates = empty(MAX_CANDIDATES, dtype=torch.int32)


def sample(
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    workspace: SamplingWorkspace,
) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size], which stay as they are.

    ``rows`` of the table and ``positions`` of the tokens are int32 [batch_size].
    """
    if not use_jit(logits):
        return sample_reference(logits, table, rows, positions)
    from minisgl_backend.kernels.jit import sampling as jit

    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    jit.launch_sample(out, logits, table, rows, positions, workspace)
    return out


def sample_reference(
    logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor
) -> Tensor:
    """The twin of ``sample``, by sorting."""
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


def split_size(vocab_size: int) -> int:
    """Tokens of a split, a multiple of 16; the last ones may have fewer, or none."""
    return -(-vocab_size // (16 * SPLITS)) * 16


def _split_reference(scaled: Tensor, key: Tensor) -> Tensor:
    """int64 [batch_size, 1]: the split of each row's token, drawn by keys [batch_size, 1]."""
    vocab_size = scaled.shape[1]
    size = split_size(vocab_size)
    padded = torch.nn.functional.pad(scaled, (0, SPLITS * size - vocab_size), value=-torch.inf)
    masses = padded.view(-1, SPLITS, size).logsumexp(dim=-1)  # [batch_size, SPLITS]
    # token ids beyond the vocabulary give the splits their noise
    ids = vocab_size + torch.arange(SPLITS, device=scaled.device)
    return (masses + noise.gumbel(key, ids)).argmax(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Those of a batch's rows, float32 [batch_size, 1]."""

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
    """float32 [batch_size, 1]: the least weight that passes all filters of the row."""
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
