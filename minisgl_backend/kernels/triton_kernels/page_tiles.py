"""What attention kernels share: keys and values in pages, and the softmax over blocks of them.

Tiles have DIMS columns for the HEAD_DIM dimensions of a head, a power of two (``dims_of``); the
columns after those dimensions are 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV

LOG2E = tl.constexpr(1.4426950408889634)
"""By what scores are multiplied for exp2, which kernels take instead of exp."""


class Pages(NamedTuple):
    """Keys and values of a layer, as kernels take them. The strides from one page, slot or head to
    the next are the same for both."""

    k: Tensor
    v: Tensor
    page_stride: int
    slot_stride: int
    head_stride: int

    @classmethod
    def of(cls, kv: PagedKV) -> "Pages":
        assert kv.keys.stride() == kv.values.stride() and kv.keys.stride(3) == 1
        return cls(kv.keys, kv.values, *kv.keys.stride()[:3])


def shape_of(q: Tensor, kv: PagedKV, window: int | None) -> dict[str, int]:
    """What all kernels of attention over pages are compiled for; GROUP: query heads of a KV head.
    ``q`` [num_tokens, num_heads, head_dim]."""
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = kv.keys.shape
    assert q.stride(1) == head_dim and q.stride(2) == 1
    return {
        "PAGE_SIZE": page_size,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": window or 0,
        "FP8": kv.k_scale is not None,
    }


def dims_of(head_dim: int) -> int:
    """DIMS: what tensor cores take, too."""
    dims: int = triton.next_power_of_2(head_dim)
    return max(16, dims)


class Partials(NamedTuple):
    """Results of the splits of query heads, and for how many splits a head has room."""

    outputs: Tensor | None
    lses: Tensor | None
    counters: Tensor | None
    max_splits: int

    @classmethod
    def of(cls, partial: tuple[Tensor, Tensor, Tensor] | None) -> "Partials":
        """Outputs, log-sum-exps and counters of a ``DecodeWorkspace``, if there are splits."""
        return cls(None, None, None, 0) if partial is None else cls(*partial, partial[0].shape[2])


@triton.jit
def slots_of(pages, page_ptr, at, held, PAGE_SIZE: tl.constexpr):
    """The slots of the positions ``at`` of a row, if ``held``; int64 [BLOCK]. ``page_ptr`` is the
    row's line of the page table."""
    page = tl.load(page_ptr + at // PAGE_SIZE, mask=held, other=0).to(tl.int64)
    return page * pages.page_stride + at % PAGE_SIZE * pages.slot_stride


@triton.jit
def of_heads(rows, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Which numbers of a tile [rows, DIMS] are there, if these ``rows`` are."""
    inside = rows[:, None]
    if DIMS > HEAD_DIM:
        inside = inside & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    return inside


@triton.jit
def load_slots(head_ptr, slots, held, HEAD_DIM: tl.constexpr):
    """One head's keys or values in these slots, [BLOCK, DIMS]."""
    inside = of_heads(held, head_ptr.shape[0], HEAD_DIM)
    return tl.load(head_ptr[None, :] + slots[:, None], mask=inside, other=0.0)


@triton.jit
def scores_of(q, k_head_ptr, slots, held, scale_log2, HEAD_DIM: tl.constexpr):
    """Queries [TILE, DIMS] times the keys in slots, [TILE, BLOCK], scaled for exp2 in place of
    exp."""
    k = load_slots(k_head_ptr, slots, held, HEAD_DIM)
    return tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2


@triton.jit
def capped(scores, cap_log2, CAPPED: tl.constexpr):
    """The scores, bounded by ``cap_log2`` as ``minisgl_backend.kernels.activation.soft_cap`` bounds
    numbers; both are for exp2 in place of exp."""
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = cap_log2 * (2 * tl.sigmoid(2 * scores / cap_log2) - 1)
    return scores


@triton.jit
def attend(
    softmax, scores, v_head_ptr, slots, held, dtype, HEAD_DIM: tl.constexpr, HIDES: tl.constexpr
):
    """An online softmax after one more block of scores: (the best score, the sum of weights, the
    weighted sum of values). With ``HIDES`` a query may not have seen anything yet."""
    best, total, acc = softmax
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best) if HIDES else new_best
    shrink = tl.exp2(best - base)
    p = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    v = load_slots(v_head_ptr, slots, held, HEAD_DIM)
    acc = acc * shrink[:, None] + tl.dot(p.to(dtype), v.to(dtype), input_precision="ieee")
    return new_best, total, acc
