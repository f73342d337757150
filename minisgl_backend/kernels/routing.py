"""Which experts the tokens of a mixture of experts take, and which pairs of both share a block.

Knows a router's logits, the rule that picks by them, and how (token, choice) pairs are sorted into
blocks of equal size, which never mix experts. So one kernel can multiply each block by its own
expert's weight. This is the scheme of block-aligned fused MoE kernels (MegaBlocks, arXiv
2211.15841; vLLM's fused_moe). Must not know the experts' weights; ``kernels.experts`` does. On
Hopper ``cuda.routing`` has kernels for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.kernels.dispatch import at_least_float32


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The experts of each token: ``ids`` int and ``weights`` float32, both [num_tokens, top_k].

    An expert's id is its index in ``ExpertWeights``. If ``elsewhere``, other ranks hold some
    experts: their id here is -1, and this rank adds nothing for them.
    """

    ids: Tensor
    weights: Tensor
    elsewhere: bool = False

    @property
    def elsewhere_ids(self) -> Tensor | None:
        """``ids`` if some of them may be -1."""
        return self.ids if self.elsewhere else None


@dataclass(frozen=True, slots=True, eq=False)
class RouterExtras:
    """What a router may have besides its weight, each [num_experts]: a ``bias`` of its logits; the
    ``correction`` and the ``factors`` that ``choose`` takes."""

    bias: Tensor | None = None
    correction: Tensor | None = None
    factors: Tensor | None = None


NO_EXTRAS: Final = RouterExtras()


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """(token, choice) pairs in blocks of one expert each; int32.

    ``pairs`` [num_blocks * block]: token * top_k + choice, or num_tokens * top_k if a block is
    not full. ``experts`` [num_blocks]: each block's expert, -1 for blocks without pairs.
    """

    pairs: Tensor
    experts: Tensor


def choose(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
) -> Choices:
    """The experts that ``rule`` picks by a router's ``logits`` [num_tokens, num_experts].

    ``correction`` [num_experts], if the rule has one. Weights are rounded to the logits' type, as
    in transformers, unless the rule multiplies them by ``factors`` [num_experts].
    """
    scores = at_least_float32(logits)
    compared = scores
    scores = scores.sigmoid() if rule.sigmoid else scores.softmax(dim=-1)
    if correction is not None:
        compared = (compared if rule.corrects_logits else scores) + correction
    elif rule.limits_groups or not rule.sigmoid:
        compared = scores  # otherwise logits, which differ even if sigmoids round to 1
    if rule.limits_groups:
        shape = len(logits), rule.num_groups, rule.num_experts // rule.num_groups
        groups = compared.view(shape)  # [num_tokens, groups, experts of a group]
        of_groups = groups.topk(rule.best_of_group, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(rule.top_groups, dim=-1).indices
        counts = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
        compared = groups.masked_fill(~counts[:, :, None], -torch.inf).flatten(1)
    ids = compared.topk(rule.top_k, dim=-1).indices  # [num_tokens, top_k]
    weights = scores.gather(1, ids)
    if rule.normalize:
        total = weights.sum(dim=-1, keepdim=True)
        # all sigmoids may be 0, and corrections may choose scores that are as small
        weights = weights / (total + 1e-20 if rule.sigmoid else total.clamp_min(1e-12))
    if factors is not None:
        return Choices(ids, weights * rule.scale * factors[ids])
    return Choices(ids, at_least_float32((weights * rule.scale).to(logits.dtype)))


def align(expert_ids: Tensor, num_experts: int, block: int) -> Alignment:
    """Sort ``expert_ids``, int [num_tokens, top_k], into blocks, leaving out ids of -1.

    It takes only tensor operations that never wait for the device, and sizes depend only on shapes.
    So it may be captured.
    """
    flat = expert_ids.flatten().long()
    num_pairs = len(flat)
    if num_pairs <= num_experts // 2:
        # few pairs seldom share an expert: each gets a block, and nothing is sorted
        pairs = torch.full((num_pairs, block), num_pairs, dtype=torch.int32, device=flat.device)
        pairs[:, 0] = torch.arange(num_pairs, dtype=torch.int32, device=flat.device)
        return Alignment(pairs.flatten(), flat.int())
    num_blocks = min(num_pairs, -(-num_pairs // block) + num_experts)
    device = flat.device
    flat = torch.where(flat < 0, num_experts, flat)  # after all others, and in no block
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=device)  # pairs of each expert
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    blocks_of = (counts + block - 1) // block  # [num_experts + 1]
    last_block = blocks_of.cumsum(0)  # [num_experts + 1], the end of each expert's blocks
    first_slot = (last_block - blocks_of) * block  # [num_experts + 1], in the blocks
    first_pair = counts.cumsum(0) - counts  # [num_experts + 1], in the sorted pairs
    order = flat.argsort(stable=True)  # [num_pairs]
    expert = flat[order]
    slot = first_slot[expert] + torch.arange(num_pairs, device=device) - first_pair[expert]
    nowhere = num_blocks * block
    pairs = torch.full((nowhere + 1,), num_pairs, dtype=torch.int32, device=device)
    pairs[torch.where(expert < num_experts, slot, nowhere)] = order.int()
    index = torch.arange(num_blocks, device=device)
    experts = torch.searchsorted(last_block[:-1], index, right=True)
    experts = torch.where(experts < num_experts, experts, -1).int()
    return Alignment(pairs[:-1], experts)
