"""The cases of `minisgl bench kernels` for attention and for a whole decoder layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl_backend.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
)
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces, qk_norm_rope_store
from minisgl_backend.kernels.small_batch import small_batch_linear
from minisgl_bench.kernel_cases import PAGE_SIZE, Call, Case, Shape, copies, each, normal


def attention_cases(shape: Shape, batch_size: int, context: int) -> Iterator[Case]:
    """Decode attention over bf16 and fp8 pages."""
    pages = -(-context // PAGE_SIZE)
    num_pages = batch_size * pages
    table = torch.randperm(num_pages, device="cuda").view(batch_size, pages).int()
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device="cuda")
    q = normal(batch_size, shape.num_heads, shape.head_dim)
    workspace = DecodeWorkspace(batch_size, shape.num_heads, shape.head_dim, q.device)
    how: dict[str, Any] = {"rows": _rows(batch_size), "scale": shape.head_dim**-0.5}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        is_fp8 = dtype == torch.float8_e4m3fn
        scale = torch.ones(1, device="cuda") if is_fp8 else None
        dims = (num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        num_bytes = 2 * batch_size * context * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        caches = [(normal(*dims).to(dtype), normal(*dims).to(dtype)) for _ in copies(num_bytes)]
        inputs = [
            (q, PagedKV(keys=k, values=v, k_scale=scale, v_scale=scale), table, lengths)
            for k, v in caches
        ]
        name = "fp8" if is_fp8 else "bf16"
        twin = each(decode_attention_reference, inputs[:2], **how)
        library = _flash_attention(q, caches, table, lengths) if not is_fp8 else ()
        yield Case(
            f"attention (Triton), {name}, context {context}",
            num_bytes,
            each(decode_attention, inputs, workspace=workspace, out=torch.empty_like(q), **how),
            twin,
            library,
        )
        yield Case(
            f"attention (CUDA), {name}, context {context}",
            num_bytes,
            _cuda_attention(shape, inputs, **how),
            twin,
            library,
        )


def _rows(batch_size: int) -> Tensor:
    return torch.arange(batch_size, dtype=torch.int32, device="cuda")


def _cuda_attention(
    shape: Shape,
    inputs: Sequence[tuple[Tensor, PagedKV, Tensor, Tensor]],
    *,
    rows: Tensor,
    scale: float,
) -> list[Call]:
    """This package's kernel in CUDA C++, if the GPU can run it."""
    try:
        from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel, DecodeShape
    except ImportError:
        return []
    if torch.cuda.get_device_capability() < (9, 0):
        return []
    q, kv, table, lengths = inputs[0]
    kernel = DecodeAttentionKernel(
        DecodeShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=PAGE_SIZE,
            dtype=q.dtype,
            kv_dtype=kv.keys.dtype,
        ),
        max_batch_size=len(q),
        device=q.device,
    )
    shared: dict[str, Any] = {"rows": rows, "window": None, "pdl": False}
    runs = kernel.plan(table, lengths, **shared)
    calls = [(*given, runs) for given in inputs]
    return each(kernel, calls, scale=scale, out=torch.empty_like(q), **shared)


def _flash_attention(
    q: Tensor, caches: Sequence[tuple[Tensor, Tensor]], table: Tensor, lengths: Tensor
) -> list[Call]:
    """FlashAttention-3, if sgl_kernel is installed."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError:
        return []
    inputs = [(q[:, None], k, v) for k, v in caches]
    fixed = {"cache_seqlens": lengths, "page_table": table, "causal": True, "ver": 3}
    return each(flash_attn_with_kvcache, inputs, **fixed)


def layer_cases(shape: Shape, batch_size: int, context: int) -> Iterator[Case]:
    """A decoder layer in six kernels, launched one after another and with dependent launches."""
    pages = -(-context // PAGE_SIZE)
    dims = (batch_size * pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    table = torch.randperm(dims[0], device="cuda").view(batch_size, pages).int()
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device="cuda")
    slots = table[:, -1].long() * PAGE_SIZE + (context - 1) % PAGE_SIZE
    cos_sin = torch.rand(context, shape.head_dim, device="cuda")
    norm = normal(shape.hidden)
    heads = normal(shape.num_heads + shape.num_kv_heads, shape.head_dim)
    workspace = DecodeWorkspace(batch_size, shape.num_heads, shape.head_dim, norm.device)
    how: dict[str, Any] = {"rows": _rows(batch_size), "scale": shape.head_dim**-0.5}
    residual = normal(batch_size, shape.hidden)
    width = shape.num_heads * shape.head_dim
    num_bytes = 2 * (shape.hidden * (shape.qkv + width + 3 * shape.intermediate))
    num_bytes += 4 * batch_size * context * shape.num_kv_heads * shape.head_dim
    layers = [
        (
            normal(shape.qkv, shape.hidden, scale=0.01),
            normal(shape.hidden, width, scale=0.01),
            normal(2 * shape.intermediate, shape.hidden, scale=0.01),
            normal(shape.hidden, shape.intermediate, scale=0.01),
            PagedKV(keys=normal(*dims), values=normal(*dims)),
        )
        for _ in range(min(28, len(copies(num_bytes)) * 4))
    ]

    def layer(
        qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, kv: PagedKV, *, pdl: bool
    ) -> None:
        packed = small_batch_linear(residual, qkv, norm_weight=norm, pdl=pdl)
        q = qk_norm_rope_store(
            packed,
            places,
            kv,
            num_heads=shape.num_heads,
            head_weights=heads,
            pdl=pdl,
        )
        out = torch.empty_like(q)
        decode_attention(q, kv, table, lengths, workspace, out=out, pdl=pdl, **how)
        small_batch_linear(out.flatten(1), o, residual=residual, pdl=pdl)
        inner = small_batch_linear(residual, gate_up, norm_weight=norm, gate="silu", pdl=pdl)
        small_batch_linear(inner, down, residual=residual, pdl=pdl)

    places = TokenPlaces(lengths - 1, slots, cos_sin)
    for pdl in (False, True):
        name = f"layer of 6, context {context}" + (", dependent launch" if pdl else "")
        yield Case(name, num_bytes, each(layer, layers, pdl=pdl))
