"""The next token of each row from its logits, inside a CUDA graph: all parameters are GPU tensors.

Greedy rows are an argmax. Random rows add Gumbel noise (``noise``) to logits / temperature and take
the largest; no softmax is written. Where all tokens may be drawn, this is done twice: one of
``SPLITS`` parts of the vocabulary is drawn by the sums of their weights, then a token of that part,
so that few tokens need noise.

Filters are thresholds on the weight w = exp((x - max) / temperature) of a token, found by search
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

NO_TOKEN = -1
"""Stands for the token of a row whose largest logit is not finite or that holds a NaN."""

SPLITS = 32
MAX_CANDIDATES = 2048


@dataclass(frozen=True, slots=True, eq=False)
class RowParameters:
    """How each row of a batch is sampled; all [batch_size] on the device of the logits.

    ``temperature`` float32, 0 is greedy; ``top_k`` int32, 0 is off; ``top_p`` float32, 1 is off;
    ``min_p`` float32, 0 is off; ``seeds`` int64; ``positions`` int32 or int64 of the tokens that
    are sampled. Padding rows may hold any values of these ranges.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """What tokens seen so far do to logits; rows without penalties have line -1.

    ``lines`` int32 [batch_size] into ``output_counts`` int32 [num_lines, vocab_size] and
    ``in_prompt`` bool [num_lines, vocab_size]; ``repetition`` (CTRL, arXiv 1909.05858: divides
    positive logits of seen tokens, multiplies negative ones), ``presence`` and ``frequency``
    float32 [batch_size].
    """

    lines: Tensor
    output_counts: Tensor
    in_prompt: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class SamplingWorkspace:
    """Partial results of the splits and the candidates of the filters; one a stream."""

    def __init__(self, max_batch_size: int, device: torch.device) -> None:
        splits = (max_batch_size, SPLITS)
        self.best = torch.empty(splits, dtype=torch.float32, device=device)
        self.tokens = torch.empty(splits, dtype=torch.int32, device=device)
        candidates = (max_batch_size, MAX_CANDIDATES)
        self.scaled = torch.empty(candidates, dtype=torch.float32, device=device)
        self.candidates = torch.empty(candidates, dtype=torch.int32, device=device)


def sample(
    logits: Tensor,
    rows: RowParameters,
    workspace: SamplingWorkspace,
    *,
    penalties: Penalties | None = None,
    pdl: bool = False,
) -> Tensor:
    """int32 [batch_size] tokens of ``logits`` [batch_size, vocab_size], which stay as they are."""
    if not use_jit(logits):
        return sample_reference(logits, rows, penalties=penalties)
    from minisgl_backend.kernels.jit import sampling as jit

    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    jit.launch_sample(out, logits, rows, workspace, penalties, pdl=pdl)
    return out


def sample_reference(
    logits: Tensor, rows: RowParameters, *, penalties: Penalties | None = None
) -> Tensor:
    """The twin of ``sample``, by sorting."""
    x = logits.float()
    if penalties is not None:
        x = penalize_reference(x, penalties)
    best = x.amax(dim=-1, keepdim=True)
    greedy = rows.temperature == 0
    temperature = torch.where(greedy, 1.0, rows.temperature)[:, None]
    scaled = (x - best) * (1 / temperature)
    weights = scaled.exp()
    threshold = filter_threshold_reference(weights, rows)
    key = noise.keys(rows.seeds, rows.positions)[:, None]
    tokens = torch.arange(x.shape[1], device=x.device)
    noisy = scaled + noise.gumbel(key, tokens)
    split = _split_reference(scaled, key)
    is_filtered = ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))[:, None]
    excluded = torch.where(
        is_filtered, weights < threshold, tokens // split_size(x.shape[1]) != split
    )
    noisy = noisy.masked_fill(excluded, -torch.inf)
    scores = torch.where(greedy[:, None], x, noisy)
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
    # ids behind the vocabulary stand for the splits
    ids = vocab_size + torch.arange(SPLITS, device=scaled.device)
    return (masses + noise.gumbel(key, ids)).argmax(dim=-1, keepdim=True)


def filter_threshold_reference(weights: Tensor, rows: RowParameters) -> Tensor:
    """float32 [batch_size, 1]: the least weight that passes all filters of the row."""
    vocab_size = weights.shape[1]
    ordered = weights.sort(dim=-1, descending=True).values
    limit = torch.where(rows.top_k > 0, rows.top_k, vocab_size).clamp_max(vocab_size)
    least = ordered.gather(1, limit.long()[:, None] - 1)
    passed = ordered.masked_fill(ordered < least, 0)
    before = passed.cumsum(dim=-1, dtype=torch.float64) - passed
    target = rows.top_p[:, None].double() * passed.sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = ((before < target) & (passed > 0)) | (rows.top_p[:, None] >= 1)
    kept[:, 0] = True
    by_mass = ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    least = torch.where(rows.top_p[:, None] < 1, torch.maximum(least, by_mass), least)
    return torch.maximum(least, rows.min_p[:, None]).clamp_max(1.0)


def penalize_reference(logits: Tensor, penalties: Penalties) -> Tensor:
    """float32 logits after the penalties of their rows."""
    held = (penalties.lines >= 0)[:, None]
    lines = penalties.lines.clamp_min(0).long()
    counts = penalties.output_counts[lines]
    seen = (penalties.in_prompt[lines] | (counts > 0)) & held
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(seen, repeated, logits)
    changed = changed - penalties.frequency[:, None] * counts
    changed = changed - penalties.presence[:, None] * (counts > 0)
    return torch.where(held, changed, logits)
