"""Attention over paged latents, one KV head for all query heads (arXiv 2405.04434).

Scores are dot products with whole keys, latent and rotated part; values are the latents, so a tile
of them is loaded once for both. For decoding, a row's positions are cut into splits as in
flash-decoding (Dao et al., 2023), whose results a second kernel merges by their log-sum-exp. For
prompts, a program has a tile of (token, head) pairs of one chunk. Lengths, offsets and the page
table are read on the GPU, and grids depend only on shapes, so launches may be captured. The twins
are those of other keys and values.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.decode_attention import decode_attention_reference
from minisgl_backend.kernels.dispatch import num_processors, use_triton
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.prefill_attention import prefill_attention_reference

MAX_SPLITS: Final = 64
_LEAST_HEADS: Final = 16
_MOST_HEADS: Final = 64
"""The fewest and the most query heads of a program, of which a multiprocessor takes one."""


def heads_of_tile(num_heads: int) -> int:
    """How many query heads a program of decoding has: the fewest that tensor cores take or, if that
    wastes none, as many as the tensor cores of Hopper take."""
    return _MOST_HEADS if num_heads % _MOST_HEADS == 0 else _LEAST_HEADS


def num_splits(batch_size: int, num_heads: int, processors: int) -> int:
    """How many splits a row gets: a power of two, with which programs fill the multiprocessors."""
    tiles = batch_size * -(-num_heads // heads_of_tile(num_heads))
    wanted = processors // tiles
    return min(1 << int(math.log2(wanted)), MAX_SPLITS) if wanted > 1 else 1


class LatentWorkspace:
    """Results of the splits; one workspace is enough for all layers of a stream.

    It has float32 outputs [places, num_heads, latent_dim] and log-sum-exps [places, num_heads],
    with a place for each split of each row of any batch.
    """

    def __init__(
        self, max_batch_size: int, num_heads: int, latent_dim: int, device: torch.device
    ) -> None:
        processors = num_processors(device)
        splits = {
            batch_size: num_splits(batch_size, num_heads, processors)
            for batch_size in range(1, max_batch_size + 1)
        }
        places = max(
            (batch_size * number for batch_size, number in splits.items() if number > 1), default=0
        )
        shape = places, num_heads
        self.outputs = torch.empty((*shape, latent_dim), dtype=torch.float32, device=device)
        self.lses = torch.empty(shape, dtype=torch.float32, device=device)


def latent_decode_attention(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    lengths: Tensor,
    workspace: LatentWorkspace,
    *,
    rows: Tensor,
    scale: float,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """softmax(q k^T * scale) v for one query per row.

    ``q`` [batch_size, num_heads, latent_dim + rope_dim], rows may be strided; ``page_table`` int32
    [num_rows, max_pages]; ``lengths`` int32 [batch_size], at least 1, since the new token's
    position is included; ``rows`` int [batch_size]: each query's row of the page table. ``out``
    [batch_size, num_heads, latent_dim], in the dtype of ``q``, gets the result.
    """
    if not use_triton(q):
        out.copy_(decode_attention_reference(q, kv, page_table, lengths, rows=rows, scale=scale))
        return
    from minisgl_backend.kernels.triton_kernels.latent_attention_kernels import launch_latent_decode

    num_heads = q.shape[1]
    launch_latent_decode(
        out,
        q,
        kv,
        page_table,
        lengths,
        (workspace.outputs, workspace.lses),
        rows=rows,
        scale=scale,
        block_heads=heads_of_tile(num_heads),
        splits=num_splits(len(q), num_heads, num_processors(q.device)),
        pdl=pdl,
    )


def latent_prefill_attention(
    q: Tensor,
    kv: PagedKV,
    page_table: Tensor,
    *,
    rows: Tensor,
    offsets: Tensor,
    ends: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Causal attention of chunks, each of which is the last positions before its end.

    ``q`` [num_tokens, num_heads, latent_dim + rope_dim]; ``page_table``, ``rows``, ``offsets`` and
    ``ends`` as for ``prefill_attention.prefill_attention``. ``out`` [num_tokens, num_heads,
    latent_dim] gets the result; tokens that belong to no chunk are left alone.
    """
    if not use_triton(q):
        prefill_attention_reference(
            out, q, kv, page_table, rows=rows, offsets=offsets, ends=ends, scale=scale
        )
        return
    from minisgl_backend.kernels.triton_kernels.latent_attention_kernels import (
        launch_latent_prefill,
    )

    launch_latent_prefill(
        out, q, kv, page_table, rows=rows, offsets=offsets, ends=ends, scale=scale
    )
