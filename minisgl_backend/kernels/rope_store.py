"""What happens to packed q, k and v between projection and attention, in one pass.

Per-head RMSNorm of q and k (Qwen3; optional), rotary embedding (arXiv 2104.09864) from a cos/sin
table, so that every scaling variant is only another table, and the store of k and v into the paged
cache (arXiv 2309.06180).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_jit
from minisgl_backend.kernels.rms_norm import rms_norm_reference

FP8_MAX = 448.0
"""The largest finite value of float8_e4m3fn; larger ones are clamped to it when stored."""


def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Norm, rotate and store; q is rewritten in place and returned as a view.

    ``qkv`` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, k, v in this order.
    ``positions`` and ``slots`` int32 or int64 [num_tokens]; a slot is page * page_size + offset,
    and a negative one stores nothing. ``cos_sin`` float32 [max_positions, head_dim]: cosines, then
    sines; dimension i of a head rotates with i + head_dim / 2. ``k_cache``, ``v_cache``
    [num_pages, page_size, num_kv_heads, head_dim], of float8_e4m3fn where ``k_scale`` and
    ``v_scale`` (float32 [1]) are given: then they hold k / k_scale and v / v_scale.
    ``q_weight``, ``k_weight`` [head_dim], both or none. Returns q
    [num_tokens, num_heads, head_dim].
    """
    if not use_jit(qkv):
        return qk_norm_rope_store_reference(
            qkv,
            positions,
            slots,
            cos_sin,
            k_cache,
            v_cache,
            num_heads=num_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    from minisgl_backend.kernels.jit import rope_store as jit

    jit.launch_qk_norm_rope_store(
        qkv,
        positions,
        slots,
        cos_sin,
        k_cache,
        v_cache,
        num_heads=num_heads,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
        pdl=pdl,
    )
    head_dim = k_cache.shape[-1]
    return qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)


def qk_norm_rope_store_reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The twin of ``qk_norm_rope_store``."""
    num_kv_heads, head_dim = k_cache.shape[-2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.tensor_split([num_heads, num_heads + num_kv_heads], dim=1)
    table = cos_sin[positions.long()][:, None]  # [num_tokens, 1, head_dim]
    new_q = _norm_rope(q, q_weight, eps, table)
    new_k = _norm_rope(k, k_weight, eps, table)
    q.copy_(new_q)
    stored = slots >= 0
    where = slots[stored].long()
    # indexing by page and offset, since a cache with other layers between pages has no flat view
    pages, offsets = where // k_cache.shape[1], where % k_cache.shape[1]
    k_cache[pages, offsets] = _to_cache(new_k[stored], k_cache.dtype, k_scale)
    v_cache[pages, offsets] = _to_cache(v[stored], v_cache.dtype, v_scale)
    return q


def _norm_rope(x: Tensor, weight: Tensor | None, eps: float, table: Tensor) -> Tensor:
    wide = x.float()  # [num_tokens, heads, head_dim]
    if weight is not None:
        wide = rms_norm_reference(wide, weight, eps)
    cos, sin = table.chunk(2, dim=-1)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _to_cache(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    wide = x.float() if scale is None else x.float() / scale
    if dtype == torch.float8_e4m3fn:
        wide = wide.clamp(-FP8_MAX, FP8_MAX)
    return wide.to(dtype)
