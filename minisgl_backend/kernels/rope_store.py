"""The operations on packed q, k and v between projection and attention, in one pass.

These are RMSNorm of each head of q and k (optional; Qwen3), perhaps after the rotation (Hunyuan) or
also of v (Gemma 4), rotary embedding (arXiv 2104.09864), and the store of k and v into the paged
cache (arXiv 2309.06180). The rotation is read from a cos/sin table, so every scaling variant is
only a different table. A narrower table rotates only the first dimensions of a head (Phi-4-mini).

For multi-head latent attention (arXiv 2405.04434) these are RMSNorm of the latents, rotary
embedding of the parts of queries and keys that rotate, and the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.quantized import FP8_MAX


@dataclass(frozen=True, eq=False)
class TokenPlaces:
    """Where the tokens of a step are, the same in all layers.

    ``positions`` in their sequences and ``slots`` in the pages (page * page_size + offset; a
    negative slot stores nothing), int32 or int64 [num_tokens]. ``cos_sin`` float32
    [max_positions, rotary_dim] holds the rotation at each position: cosines, then sines. Dimension
    i of a head rotates with i + rotary_dim / 2 or, if ``interleaved``, dimension 2 i with 2 i + 1.
    Dimensions from rotary_dim on do not rotate.

    The twin computes the cached properties at the first layer.
    """

    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    interleaved: bool = False

    @cached_property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """The factors for each rotary dimension and for the dimension that it rotates with, both
        [num_tokens, 1, rotary_dim]."""
        cos, sin = self.cos_sin[self.positions].unsqueeze(1).chunk(2, dim=-1)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], dim=-1).flatten(-2)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    @cached_property
    def stored(self) -> tuple[Tensor, Tensor | None]:
        """The slots to be written, int64, and which tokens go there; None for all."""
        slots = self.slots.long()
        is_kept = slots >= 0
        return (slots, None) if is_kept.all() else (slots[is_kept], is_kept)


def qk_norm_rope_store(
    qkv: Tensor,
    places: TokenPlaces,
    kv: PagedKV,
    *,
    num_heads: int,
    head_weights: Tensor | None = None,
    norm_last: bool = False,
    gated: bool = False,
    value_norm: bool = False,
    keys_are_values: bool = False,
    eps: float = 1e-6,
    pdl: bool = False,
) -> Tensor:
    """Norm, rotate and store; returns q [num_tokens, num_heads, head_dim].

    ``qkv`` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, k, v in this order.
    If it is ``gated``, head_dim more numbers follow each head of q (``gates_of``). If
    ``keys_are_values``, there are no heads of v: those of k are taken, as they are in ``qkv``. With
    ``value_norm`` v is normalized, without a weight.
    Pages of float8_e4m3fn, which have scales, hold k / k_scale and v / v_scale.
    ``head_weights`` [num_heads + num_kv_heads, head_dim]: the norm's weight for each head of q and
    k; all heads of q have the same weight, and so do all heads of k. With ``norm_last`` these are
    normalized after they were rotated.
    """
    if not use_triton(qkv):
        return qk_norm_rope_store_reference(
            qkv,
            places,
            kv,
            num_heads=num_heads,
            head_weights=head_weights,
            norm_last=norm_last,
            gated=gated,
            value_norm=value_norm,
            keys_are_values=keys_are_values,
            eps=eps,
        )
    from minisgl_backend.kernels.triton_kernels.rope_store_kernel import launch_qk_norm_rope_store

    q = torch.empty((len(qkv), num_heads, kv.keys.shape[-1]), dtype=qkv.dtype, device=qkv.device)
    launch_qk_norm_rope_store(
        q,
        qkv,
        places.positions,
        places.slots,
        places.cos_sin,
        kv,
        gated=gated,
        value_norm=value_norm,
        keys_are_values=keys_are_values,
        q_weight=None if head_weights is None else head_weights[0],
        k_weight=None if head_weights is None else head_weights[num_heads],
        norm_last=norm_last,
        eps=eps,
        interleaved=places.interleaved,
        pdl=pdl,
    )
    return q


def qk_norm_rope_store_reference(
    qkv: Tensor,
    places: TokenPlaces,
    kv: PagedKV,
    *,
    num_heads: int,
    head_weights: Tensor | None = None,
    norm_last: bool = False,
    gated: bool = False,
    value_norm: bool = False,
    keys_are_values: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """The twin of ``qk_norm_rope_store``; float64 stays float64."""
    num_kv_heads, head_dim = kv.keys.shape[-2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    if gated:
        asked, others = heads.tensor_split([2 * num_heads], dim=1)
        heads = torch.cat([asked[:, ::2], others], dim=1)
    qk, v = heads.tensor_split([num_heads + num_kv_heads], dim=1)
    if keys_are_values:
        v = qk[:, num_heads:]
    if value_norm:
        v = F.rms_norm(at_least_float32(v), (head_dim,), None, eps)
    qk = at_least_float32(qk)
    if norm_last:
        qk = rotated(qk, places)
    if head_weights is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps).mul_(head_weights)
    if not norm_last:
        qk = rotated(qk, places)
    q, k = qk.tensor_split([num_heads], dim=1)
    store(kv.keys, places, k, kv.k_scale)
    store(kv.values, places, v, kv.v_scale)
    return q.to(qkv.dtype)


def gates_of(qkv: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """The gates after the heads of q in ``qkv``, a view [num_tokens, num_heads, head_dim]."""
    asked = qkv[:, : 2 * num_heads * head_dim].view(len(qkv), num_heads, 2, head_dim)
    return asked[:, :, 1]


def rotated_queries(
    q: Tensor,
    places: TokenPlaces,
    num_heads: int,
    head_weights: Tensor | None,
    eps: float,
    *,
    pdl: bool = False,
) -> Tensor:
    """Norm and rotate only queries, [num_tokens, num_heads * head_dim], like
    ``qk_norm_rope_store``. Returns [num_tokens, num_heads, head_dim]."""
    if not use_triton(q):
        return rotated_queries_reference(q, places, num_heads, head_weights, eps)
    from minisgl_backend.kernels.triton_kernels.rope_store_kernel import launch_qk_norm_rope_store

    out = torch.empty((len(q), num_heads, q.shape[1] // num_heads), dtype=q.dtype, device=q.device)
    launch_qk_norm_rope_store(
        out,
        q,
        places.positions,
        places.slots,
        places.cos_sin,
        None,
        q_weight=None if head_weights is None else head_weights[0],
        eps=eps,
        interleaved=places.interleaved,
        pdl=pdl,
    )
    return out


def rotated_queries_reference(
    q: Tensor, places: TokenPlaces, num_heads: int, head_weights: Tensor | None, eps: float
) -> Tensor:
    """The twin of ``rotated_queries``; float64 stays float64."""
    heads = at_least_float32(q.view(len(q), num_heads, -1))
    if head_weights is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], None, eps).mul_(head_weights)
    return rotated(heads, places).to(q.dtype)


def rope_store_latents(
    queries: Tensor,
    q: Tensor,
    compressed: Tensor,
    places: TokenPlaces,
    kv: PagedKV,
    *,
    norm_weight: Tensor,
    eps: float,
    pdl: bool = False,
) -> None:
    """Rotate ``q`` into ``queries``, and store the latents of tokens with their rotated keys.

    ``queries`` and ``q`` [num_tokens, num_heads, rope_dim] and ``compressed`` [num_tokens,
    latent_dim + rope_dim] may be strided except along their last dimension; ``queries`` may be
    ``q``; all of rope_dim rotates. The first latent_dim numbers of ``compressed`` are normalized
    with ``norm_weight`` [latent_dim], and the others are rotated; both go to the token's slot in
    ``kv.keys``.
    """
    if not use_triton(q):
        rope_store_latents_reference(
            queries, q, compressed, places, kv, norm_weight=norm_weight, eps=eps
        )
        return
    from minisgl_backend.kernels.triton_kernels.latent_store_kernel import launch_store_latents

    launch_store_latents(
        queries,
        q,
        compressed,
        places.positions,
        places.slots,
        places.cos_sin,
        kv,
        norm_weight=norm_weight,
        eps=eps,
        interleaved=places.interleaved,
        pdl=pdl,
    )


def rope_store_latents_reference(
    queries: Tensor,
    q: Tensor,
    compressed: Tensor,
    places: TokenPlaces,
    kv: PagedKV,
    *,
    norm_weight: Tensor,
    eps: float,
) -> None:
    """The twin of ``rope_store_latents``; float64 stays float64."""
    queries.copy_(rotated(at_least_float32(q), places))
    latents, keys = at_least_float32(compressed).tensor_split([len(norm_weight)], dim=1)
    latents = F.rms_norm(latents, norm_weight.shape, None, eps) * norm_weight
    keys = rotated(keys[:, None], places)  # [num_tokens, 1, rope_dim]
    store(kv.keys, places, torch.cat([latents[:, None], keys], dim=-1), kv.k_scale)


def rotated(heads: Tensor, places: TokenPlaces) -> Tensor:
    """``heads`` [num_tokens, num_heads, head_dim], rotated to their positions."""
    of_own, of_other = places.rotation
    rotary_dim = of_own.shape[-1]
    turned = heads[..., :rotary_dim]
    if places.interleaved:
        other = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        other = turned.roll(rotary_dim // 2, dims=-1)
    turned = torch.addcmul(turned * of_own, other, of_other)
    if rotary_dim == heads.shape[-1]:
        return turned
    return torch.cat([turned, heads[..., rotary_dim:]], dim=-1)


def store(cache: Tensor, places: TokenPlaces, x: Tensor, scale: Tensor | None) -> None:
    """Write ``x`` [num_tokens, num_kv_heads, head_dim] to its slots."""
    slots, is_kept = places.stored
    if is_kept is not None:
        x = x[is_kept]
    if scale is not None:
        x = at_least_float32(x) / scale
    if cache.dtype == torch.float8_e4m3fn:
        # Values beyond the range are clamped. Float8 tensors themselves cannot be indexed on every
        # device, but their bytes can.
        x = at_least_float32(x).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    page_size = cache.shape[1]
    if cache.stride(0) == page_size * cache.stride(1):
        cache.flatten(0, 1).index_copy_(0, slots, x.to(cache.dtype))
    else:  # other layers lie between the pages
        cache[slots // page_size, slots % page_size] = x.to(cache.dtype)
