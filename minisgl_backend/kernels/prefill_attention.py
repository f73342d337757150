"""Attention of prompt chunks over the paged KV cache, which already holds their own keys.

FlashAttention-2's scheme (arXiv 2307.08691): each program has a block of queries and a KV head, and
streams the keys with an online softmax. The query heads that share a KV head are rows of one block,
so each key is read once for all of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl_backend.kernels.activation import soft_cap_reference
from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.kernels.paged_kv import PagedKV


def prefill_attention(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    *,
    rows: Tensor,
    offsets: Tensor,
    ends: Tensor,
    max_length: int,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
    out: Tensor,
) -> None:
    """Causal attention of chunks, each of which is the last positions before its end.

    ``q`` [num_tokens, num_heads, head_dim], tokens may be strided. Chunks come one after another;
    tokens before and after them are left alone. ``page_table`` int32 [num_rows, max_pages]. For
    each chunk, in int32: ``rows`` [num_chunks] of the page table; ``offsets`` [num_chunks + 1] into
    the tokens; ``ends`` [num_chunks], the row's positions up to and including the chunk's last. A
    chunk may be empty. ``max_length`` is the most tokens of a chunk. The scores s = q k^T *
    ``scale`` are bounded as c tanh(s / c), with c the ``cap``, unless that is 0. With ``window`` a
    query attends to that number of positions, its own included. ``out`` [num_tokens, num_heads,
    head_dim] gets the result.
    """
    if not use_triton(q):
        prefill_attention_reference(
            out,
            q,
            kv,
            page_table,
            rows=rows,
            offsets=offsets,
            ends=ends,
            scale=scale,
            cap=cap,
            window=window,
        )
        return
    from minisgl_backend.kernels.triton_kernels.prefill_attention_kernel import (
        launch_prefill_attention,
    )

    launch_prefill_attention(
        out,
        q,
        kv,
        page_table,
        rows=rows,
        offsets=offsets,
        ends=ends,
        max_length=max_length,
        scale=scale,
        cap=cap,
        window=window,
    )


def prefill_attention_reference(
    out: Tensor,
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    *,
    rows: Tensor,
    offsets: Tensor,
    ends: Tensor,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
) -> None:
    """The twin of ``prefill_attention``: one chunk after another, with a dense softmax. Fills
    ``out``."""
    page_size, num_kv_heads = kv.keys.shape[1:3]
    group = q.shape[1] // num_kv_heads
    grouped_q = q.reshape(len(q), num_kv_heads, group, q.shape[2])
    borders = offsets.tolist()
    for chunk, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
        tokens = slice(borders[chunk], borders[chunk + 1])
        pages = page_table[row, : -(-end // page_size)].long()
        k = at_least_float32(kv.keys[pages].flatten(0, 1)[:end])  # [end, num_kv_heads, head_dim]
        v = at_least_float32(kv.values[pages].flatten(0, 1)[:end])
        if kv.k_scale is not None and kv.v_scale is not None:
            k, v = k * kv.k_scale, v * kv.v_scale
        grouped = at_least_float32(grouped_q[tokens])
        scores = torch.einsum("thgd,nhd->hgtn", grouped, k) * scale  # [heads, group, tokens, end]
        if cap:
            soft_cap_reference(scores, cap)
        key = torch.arange(end, device=q.device)
        query = key[end - grouped.shape[0] :, None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(dim=-1)
        if kv.sinks is not None:
            of_heads = at_least_float32(kv.sinks).view(num_kv_heads, group, 1)
            weights = weights * (scores.logsumexp(dim=-1) - of_heads).sigmoid()[..., None]
        out[tokens] = torch.einsum("hgtn,nhd->thgd", weights, v).flatten(1, 2).to(out.dtype)
