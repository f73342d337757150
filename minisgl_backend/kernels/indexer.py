"""Which positions a token attends to: the lightning indexer of DeepSeek Sparse Attention
(DeepSeek-V3.2, arXiv 2512.02556).

Beside its keys and values each position has one small *index key*, and each token has a few *index
queries*, with a weight for each. The score of a position is the weighted sum of relu(query . key).
A token attends to the ``top_k`` positions with the highest scores; of equal ones, to the first.

Results are slots of positions (page * page_size + offset), so they are a page table with pages of
one position. Lengths and the page table are read on the GPU, and grids depend only on shapes, so
launches may be captured. On Hopper ``cuda.position_choice`` has a kernel for the choice.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.kernels.rope_store import TokenPlaces, rotated, store


def rope_store_index(
    q: Tensor,
    k: Tensor,
    places: TokenPlaces,
    index_keys: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    rotates_last: bool = False,
    pdl: bool = False,
) -> None:
    """Rotate the index queries ``q`` in place, and store the index keys of tokens.

    ``q`` [num_tokens, num_heads, key_dim] is contiguous; its first columns rotate, or with
    ``rotates_last`` the last. ``k`` [num_tokens, key_dim], which may be
    strided along tokens, gets a LayerNorm and is rotated; it goes to the token's slot in
    ``index_keys`` [num_pages + 1, page_size, key_dim], which may be float8.
    """
    if not use_triton(q):
        rope_store_index_reference(
            q,
            k,
            places,
            index_keys,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            rotates_last=rotates_last,
        )
        return
    from minisgl_backend.kernels.triton_kernels.indexer_kernels import launch_rope_store_index

    launch_rope_store_index(
        q,
        k,
        places.positions,
        places.slots,
        places.cos_sin,
        index_keys,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        eps=eps,
        interleaved=places.interleaved,
        rotates_last=rotates_last,
        pdl=pdl,
    )


def rope_store_index_reference(
    q: Tensor,
    k: Tensor,
    places: TokenPlaces,
    index_keys: Tensor,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    rotates_last: bool = False,
) -> None:
    """The twin of ``rope_store_index``; float64 stays float64."""
    first = q.shape[2] - places.cos_sin.shape[1] if rotates_last else 0

    def turned(heads: Tensor) -> Tensor:
        return torch.cat([heads[..., :first], rotated(heads[..., first:], places)], dim=-1)

    q.copy_(turned(at_least_float32(q)))
    normed = F.layer_norm(at_least_float32(k), norm_weight.shape, None, None, eps)
    keys = turned((normed * norm_weight + norm_bias)[:, None])
    store(index_keys[:, :, None], places, keys, None)


def index_scores(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    width: int,
    top_k: int,
    pdl: bool = False,
) -> Tensor:
    """The scores of each token's positions, float32 [num_tokens, ``width``]; undefined from the
    token's length on, and for tokens that see at most ``top_k`` positions, which are all chosen.

    ``q`` [num_tokens, num_heads, key_dim] and ``weights`` [num_tokens, num_heads] are contiguous;
    ``index_keys`` as above; ``page_table`` int32 [num_rows, max_pages]; ``rows`` int32
    [num_tokens]: each token's row of it; ``lengths`` int32 [num_tokens], at least 1 and at most
    ``width``: how many positions it sees, its own included.
    """
    if not use_triton(q):
        return index_scores_reference(
            q, weights, index_keys, page_table, rows, lengths, width=width
        )
    from minisgl_backend.kernels.triton_kernels.indexer_kernels import launch_index_scores

    out = torch.empty((len(q), width), dtype=torch.float32, device=q.device)
    launch_index_scores(
        out, q, weights, index_keys, page_table, rows, lengths, top_k=top_k, pdl=pdl
    )
    return out


def index_scores_reference(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    page_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    width: int,
) -> Tensor:
    """The twin of ``index_scores``: one row after another, head by head, so that no more numbers
    are in memory than results; float64 stays float64."""
    queries = at_least_float32(q)
    num_pages = -(-width // index_keys.shape[1])
    scores = queries.new_zeros(len(q), width)
    for row in sorted(set(rows.tolist())):
        tokens = (rows == row).nonzero()[:, 0]
        keys = index_keys[page_table[row, :num_pages].long()].flatten(0, 1)[:width]
        keys, of_row = keys.to(queries.dtype).T, queries.new_zeros(len(tokens), width)
        for head in range(q.shape[1]):
            products = queries[tokens, head] @ keys  # [num_tokens of the row, width]
            of_row.addcmul_(products.relu_(), weights[tokens, head, None].to(queries.dtype))
        scores[tokens] = of_row
    return scores


class ChooseSlots(Protocol):
    """``choose_slots``, or another with its results."""

    def __call__(
        self,
        out: Tensor,
        scores: Tensor,
        page_table: Tensor,
        rows: Tensor,
        lengths: Tensor,
        *,
        page_size: int,
        pdl: bool = False,
    ) -> None: ...


def choose_slots(
    out: Tensor,
    scores: Tensor,
    page_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Fill ``out`` int32 [num_tokens, top_k] with the slots of the positions with the highest
    scores, in the order of positions. If a token sees fewer, what is behind them is left alone.

    ``scores`` [num_tokens, width]; the others as for ``index_scores``.
    """
    if not use_triton(scores):
        choose_slots_reference(out, scores, page_table, rows, lengths, page_size=page_size)
        return
    from minisgl_backend.kernels.triton_kernels.position_choice import launch_choose_slots

    launch_choose_slots(out, scores, page_table, rows, lengths, page_size=page_size, pdl=pdl)


def choose_slots_reference(
    out: Tensor,
    scores: Tensor,
    page_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
) -> None:
    """The twin of ``choose_slots``."""
    top_k = min(out.shape[1], scores.shape[1])
    is_hidden = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]
    best_first = scores.masked_fill(is_hidden, -torch.inf).sort(descending=True, stable=True)
    # those that a token does not see come last
    chosen = best_first.indices[:, :top_k]
    is_there = torch.arange(top_k, device=scores.device) < lengths[:, None]
    chosen = chosen.masked_fill(~is_there, scores.shape[1]).sort(dim=1).values
    pages, offsets = (
        part.masked_fill(~is_there, 0) for part in (chosen // page_size, chosen % page_size)
    )
    slots = page_table[rows.long()].gather(1, pages).long() * page_size + offsets
    out[:, :top_k] = torch.where(is_there, slots.to(out.dtype), out[:, :top_k])
