"""The cases of `minisgl bench kernels`: calls over a model's shapes, some with their twins.

This module has the GEMMs, the kernels between them and sampling; ``kernel_attention`` has attention
and a whole layer, ``kernel_experts`` experts, ``kernel_indexer`` indexers. Must not know how calls
are timed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels import small_batch
from minisgl_backend.kernels.activation import open_gates, open_gates_reference
from minisgl_backend.kernels.embedding import embedding, embedding_reference
from minisgl_backend.kernels.float8_rows import float8_rows
from minisgl_backend.kernels.linear_cut import MAX_TOKENS
from minisgl_backend.kernels.packed_weight import PackedWeight, pack
from minisgl_backend.kernels.quantized import quantize
from minisgl_backend.kernels.quantized_linear import Float8Weight, float8_linear
from minisgl_backend.kernels.rms_norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from minisgl_backend.kernels.rope_store import TokenPlaces, qk_norm_rope_store
from minisgl_backend.kernels.sampling import sample
from minisgl_backend.kernels.sampling_rule import sample_reference
from minisgl_backend.kernels.sampling_table import Samples, SamplingTable
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace
from minisgl_backend.kernels.small_batch import (
    small_batch_linear,
    small_batch_linear_reference,
)
from minisgl_backend.packages import import_error
from minisgl_backend.weight_format import Encoding

Call: TypeAlias = Callable[[], object]

PAGE_SIZE = 16
_COLD_BYTES = 300_000_000
"""Several times the L2 cache of any GPU this runs on."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that kernels depend on."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab_size: int = 151_936

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


MODELS = {
    "qwen3-0.6b": Shape(hidden=1024, intermediate=3072, num_heads=16, num_kv_heads=8),
    "qwen3-14b": Shape(hidden=5120, intermediate=17408, num_heads=40, num_kv_heads=8),
}
ATTENTION_MODELS = {
    "qwen3.6-27b": Shape(
        hidden=5120, intermediate=17408, num_heads=24, num_kv_heads=4, head_dim=256
    ),
    "qwen3.6-35b-a3b": Shape(
        hidden=2048, intermediate=512, num_heads=16, num_kv_heads=2, head_dim=256
    ),
}
"""Models of which attention alone is measured, whose heads are wider."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: calls that do the same, each list over rotating buffers.

    A twin that makes the host wait cannot be captured, so it is not among them.
    """

    kernel: str
    num_bytes: int
    ours: Sequence[Call]
    twin: Sequence[Call] = ()
    library: Sequence[Call] = ()


def copies(num_bytes: int) -> range:
    """The numbers of the buffers: enough of this size to keep their data out of the L2 cache."""
    return range(max(2, min(64, _COLD_BYTES // max(num_bytes, 1) + 1)))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Random bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def each(function: Callable[..., object], buffers: Sequence[Any], **fixed: Any) -> list[Call]:
    """A call of ``function`` on each of ``buffers``."""
    return [functools.partial(function, *of_call, **fixed) for of_call in buffers]


def linear_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """The four GEMMs of a layer with the operations fused into them; the library's without."""
    plans = {
        "norm + qkv": (shape.qkv, shape.hidden, "norm"),
        "o + residual": (shape.hidden, shape.num_heads * shape.head_dim, "residual"),
        "norm + gate/up + silu": (2 * shape.intermediate, shape.hidden, "gated"),
        "down + residual": (shape.hidden, shape.intermediate, "residual"),
    }
    for name, (height, width, kind) in plans.items():
        num_bytes = 2 * height * width
        x = normal(batch_size, width)
        norm = normal(width)
        residual = normal(batch_size, height) if kind == "residual" else None
        weights = [(x, normal(height, width, scale=width**-0.5)) for _ in copies(num_bytes)]
        fused = {
            "norm_weight": None if kind == "residual" else norm,
            "gated": kind == "gated",
            "residual": residual,
        }
        ours = (
            each(small_batch_linear, weights, **fused)
            if batch_size <= small_batch.MAX_TOKENS
            else []
        )
        twin = each(small_batch_linear_reference, weights[:2], **fused)
        yield Case(name, num_bytes, ours, twin, each(F.linear, weights))


def quantized_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """A layer's GEMMs with quantized weights: our kernel on tensor cores if there is one, else the
    one with tokens in 8 bits; the library's with plain weights."""
    sizes = {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, shape.num_heads * shape.head_dim),
        "gate/up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    formats = {
        "fp8": (Encoding.E4M3, (128, 128), True),
        "int8": (Encoding.INT8, (1, 128), True),
        "int4": (Encoding.INT4, (1, 128), False),
    }
    for (name, (height, width)), (form, how) in itertools.product(sizes.items(), formats.items()):
        encoding, block, symmetric = how
        num_bytes = height * width * encoding.bits // 8
        plain = normal(height, width, scale=width**-0.5)
        x, found = normal(batch_size, width), []
        for _ in copies(num_bytes):
            packed = pack(quantize(plain, encoding, block, symmetric=symmetric))
            assert packed is not None
            found.append(packed)
        ours: list[Call] = []
        if batch_size <= MAX_TOKENS and has_hopper_kernels():
            ours = each(_linear_kernel(found[0]), [(x, packed) for packed in found])
        in_8_bits = [weight for packed in found if (weight := Float8Weight.of(packed)) is not None]
        library = each(F.linear, [(x, plain.clone()) for _ in copies(2 * height * width)])
        yield Case(f"{form} {name}", num_bytes, ours, (), library)
        if in_8_bits:
            calls = each(_of_tokens_in_8_bits, [(x, weight) for weight in in_8_bits])
            yield Case(f"{form} {name}, tokens in 8 bits", num_bytes, calls, (), library)


def _of_tokens_in_8_bits(x: Tensor, weight: Float8Weight) -> Tensor:
    return float8_linear(float8_rows(x, weight.group), weight, x.dtype)


def has_hopper_kernels() -> bool:
    """Whether this GPU and installation can run the CUDA kernels that are for Hopper alone."""
    return torch.cuda.get_device_capability() == (9, 0) and not import_error("cuda.bindings")


def _linear_kernel(packed: PackedWeight) -> Callable[[Tensor, PackedWeight], Tensor]:
    # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    kernel = LinearKernel(packed.shape, torch.device("cuda"), codes=packed.kind)
    return functools.partial(kernel, pdl=True)  # as in a layer


def elementwise_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """Embeddings, norms, gate, and the kernel between qkv and attention."""
    table = normal(shape.vocab_size, shape.hidden)
    num_bytes = 4 * batch_size * shape.hidden
    ids = [
        (torch.randint(shape.vocab_size, (batch_size,), device=table.device), table)
        for _ in copies(num_bytes)
    ]
    yield Case(
        "embedding",
        num_bytes,
        each(embedding, ids),
        each(embedding_reference, ids),
        each(F.embedding, ids),
    )
    weight = normal(shape.hidden)
    rows = [(normal(batch_size, shape.hidden), weight, 1e-6) for _ in copies(num_bytes)]
    yield Case("norm", num_bytes, each(rms_norm, rows), each(rms_norm_reference, rows))
    num_bytes = 8 * batch_size * shape.hidden
    pairs = [
        (normal(batch_size, shape.hidden), normal(batch_size, shape.hidden), weight, 1e-6)
        for _ in copies(num_bytes)
    ]
    yield Case(
        "add + norm",
        num_bytes,
        each(fused_add_rms_norm, pairs),
        each(fused_add_rms_norm_reference, pairs),
    )
    num_bytes = 6 * batch_size * shape.intermediate
    gates = [(normal(batch_size, 2 * shape.intermediate),) for _ in copies(num_bytes)]
    of_silu = {"gate": "silu"}
    ours, twin = each(open_gates, gates, **of_silu), each(open_gates_reference, gates, **of_silu)
    yield Case("silu * up", num_bytes, ours, twin)

    cache = normal(batch_size + 1, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    heads = normal(shape.num_heads + shape.num_kv_heads, shape.head_dim)
    positions = torch.arange(batch_size, device="cuda")
    cos_sin = torch.rand(4096, shape.head_dim, device="cuda")
    fixed = {
        "places": TokenPlaces(positions, positions * PAGE_SIZE, cos_sin),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "num_heads": shape.num_heads,
        "head_weights": heads,
    }
    num_bytes = 4 * batch_size * shape.qkv
    packed = [(normal(batch_size, shape.qkv),) for _ in copies(num_bytes)]
    yield Case(
        "qk-norm + rope + store",
        num_bytes,
        each(qk_norm_rope_store, packed, **fixed),
    )


def sampling_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """Greedy, plain random, filtered and penalized rows; the library is torch's argmax."""
    num_bytes = 2 * batch_size * shape.vocab_size
    logits = [(normal(batch_size, shape.vocab_size, scale=2.0),) for _ in copies(num_bytes)]
    device = logits[0][0].device
    filters = {"top_k": 20, "top_p": 0.95}
    penalties = {"repetition": 1.1, "marked": 1.0}
    for name, numbers in (
        ("greedy", {}),
        ("random", {"temperature": 0.6}),
        ("top-k 20, top-p 0.95", {"temperature": 0.6, **filters}),
        ("top-p 0.95", {"temperature": 0.3, "top_p": 0.95}),
        ("top-p 0.95, nearly flat", {"temperature": 0.6, "top_p": 0.95}),
        ("random, penalties", {"temperature": 0.6, **penalties}),
        ("top-k, top-p, penalties", {"temperature": 0.6, **filters, **penalties}),
    ):
        table = SamplingTable.empty(batch_size, shape.vocab_size, device)
        for column, value in numbers.items():
            table.column(column).fill_(value)
        workspace = SamplingWorkspace(batch_size, shape.vocab_size, device)
        rows = torch.arange(batch_size, dtype=torch.int32, device=device)
        samples = Samples(rows, torch.full_like(rows, 5), previous=rows)
        mark_bytes = 4 * batch_size * shape.vocab_size if "marked" in numbers else 0
        yield Case(
            f"sampling, {name}",
            num_bytes + mark_bytes,
            each(sample, logits, table=table, samples=samples, workspace=workspace),
            each(sample_reference, logits[:2], table=table, samples=samples),
            each(torch.argmax, logits, dim=-1) if len(numbers) < 2 else (),
        )
