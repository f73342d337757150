"""Attention of one new token per request over its paged KV cache, split along the sequence.

Flash-decoding (Dao et al., 2023): a row's positions are cut into splits, which different programs
reduce with an online softmax (arXiv 2205.14135). The last program of a row to finish merges the
partial results by their log-sum-exp. Lengths and page table are read on the GPU, and the grid
depends only on the batch size. So nothing has to be planned, and the launch may be captured.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.activation import soft_cap_reference
from minisgl_backend.kernels.dispatch import at_least_float32, num_processors, use_triton
from minisgl_backend.kernels.paged_kv import PagedKV

MAX_SPLITS: Final = 32


class DecodeWorkspace:
    """Partial results of the splits; one workspace is enough for all layers of a stream.

    It has float32 outputs [max_batch_size, num_heads, MAX_SPLITS, head_dim], float32 log-sum-exps,
    and the counters that tell the last program of a row; these are zero between launches.
    """

    def __init__(
        self, max_batch_size: int, num_heads: int, head_dim: int, device: torch.device
    ) -> None:
        partial = (max_batch_size, num_heads, MAX_SPLITS)
        self.outputs = torch.empty((*partial, head_dim), dtype=torch.float32, device=device)
        self.lses = torch.empty(partial, dtype=torch.float32, device=device)
        self.counters = torch.zeros((max_batch_size, num_heads), dtype=torch.int32, device=device)


def num_splits(batch_size: int, num_kv_heads: int, processors: int, max_length: int = 0) -> int:
    """How many splits a row gets: a power of two, 1 if rows alone fill the multiprocessors.

    With more splits, merging would cost what they gain, except for rows of many thousand positions.
    """
    rows = batch_size * num_kv_heads
    if rows >= 3 * processors:
        return 1
    most = MAX_SPLITS if max_length > 8192 else MAX_SPLITS // 2
    return min(1 << int(math.log2(8 * processors / rows)), most)


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    workspace: DecodeWorkspace,
    *,
    rows: Tensor,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """softmax(q k^T * scale) v for one query per row.

    ``q`` [batch_size, num_heads, head_dim], rows may be strided, with num_heads a multiple of the
    pages' num_kv_heads; ``page_table`` int32 [num_rows, max_pages]; ``lengths`` int32 [batch_size],
    at least 1, since the new token's position is included; ``rows`` int [batch_size]: each query's
    row of the page table. Unless ``cap`` c is 0, it bounds scores s as c tanh(s / c). With
    ``window`` only the last ``window`` positions are attended to. ``out`` [batch_size, num_heads,
    head_dim], in the dtype of ``q``, gets the result.
    """
    if not use_triton(q):
        attended = decode_attention_reference(
            q, kv, page_table, lengths, rows=rows, scale=scale, cap=cap, window=window
        )
        out.copy_(attended)
        return
    from minisgl_backend.kernels.triton_kernels.decode_attention_kernel import (
        launch_decode_attention,
    )

    launch_decode_attention(
        out,
        q,
        kv,
        page_table,
        lengths,
        (workspace.outputs, workspace.lses, workspace.counters),
        rows=rows,
        scale=scale,
        cap=cap,
        window=window,
        splits=num_splits(
            len(q),
            kv.keys.shape[2],
            num_processors(q.device),
            max_length=page_table.shape[1] * kv.keys.shape[1],
        ),
        pdl=pdl,
    )


def decode_attention_reference(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    *,
    rows: Tensor,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """The twin of ``decode_attention``: one gather of all positions and a dense softmax."""
    table = page_table[rows.long()].long()
    longest = table.shape[1] * kv.keys.shape[1]
    # [batch_size, longest, num_kv_heads, head_dim]
    k, v = (at_least_float32(_pages(of, table).flatten(1, 2)) for of in (kv.keys, kv.values))
    if kv.k_scale is not None and kv.v_scale is not None:
        k, v = k * kv.k_scale, v * kv.v_scale
    position = torch.arange(longest, device=q.device)
    seen = position < lengths[:, None]  # [batch_size, longest]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    num_kv_heads = k.shape[2]
    # [batch_size, num_kv_heads, group, head_dim]
    grouped = at_least_float32(q).reshape(len(q), num_kv_heads, -1, q.shape[-1])
    scores = torch.einsum("bhgd,bnhd->bhgn", grouped, k) * scale
    if cap:
        soft_cap_reference(scores, cap)
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    # unseen positions may hold anything, NaN included
    v = v.masked_fill(~seen[:, :, None, None], 0.0)
    weights = scores.softmax(dim=-1)
    if kv.sinks is not None:
        of_heads = at_least_float32(kv.sinks).view(num_kv_heads, -1)
        weights = weights * (scores.logsumexp(dim=-1) - of_heads).sigmoid()[..., None]
    out = torch.einsum("bhgn,bnhd->bhgd", weights, v)
    return out.flatten(1, 2).to(q.dtype)


def _pages(of_layer: Tensor, table: Tensor) -> Tensor:
    """The pages of each row, [batch_size, max_pages, page_size, num_kv_heads, head_dim]."""
    if of_layer.dtype == torch.float8_e4m3fn:  # only its bytes can be indexed on every device
        return of_layer.view(torch.uint8)[table].view(of_layer.dtype)
    return of_layer[table]
