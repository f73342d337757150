"""`minisgl bench kernels`: each kernel against its torch twin, a library and the bandwidth bound.

Times are of one call inside a CUDA graph of many calls that rotate through enough buffers to keep
their data out of the L2 cache: the median of several replays, divided by the calls. The bound is
the bytes that must move (weights and KV once, activations where they matter) over the rate that a
large copy reaches on this GPU.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.bench.report import Report, json_option
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.activation import silu_mul, silu_mul_reference
from minisgl_backend.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
)
from minisgl_backend.kernels.dispatch import has_triton
from minisgl_backend.kernels.moe import fused_experts
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm, fused_add_rms_norm_reference
from minisgl_backend.kernels.rope_store import qk_norm_rope_store
from minisgl_backend.kernels.sampling import (
    RowParameters,
    SamplingWorkspace,
    sample,
    sample_reference,
)
from minisgl_backend.kernels.small_batch import MAX_BATCH_SIZE, small_batch_linear

Call: TypeAlias = Callable[[], object]

_PAGE_SIZE = 16
_COLD_BYTES = 300_000_000
"""Several times the L2 cache of any GPU this runs on."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels see of a model."""

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


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: calls that do the same, each list over rotating buffers."""

    kernel: str
    num_bytes: int
    ours: Sequence[Call]
    twin: Sequence[Call] = ()
    library: Sequence[Call] = ()


def time_us(calls: Sequence[Call], *, repeats: int = 15) -> float:
    """Median microseconds of one call, all captured in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are made there
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(repeats + 2):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return float(statistics.median(times[2:]) * 1e3 / len(calls))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy within the GPU's memory."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(2 * source.numel() / (statistics.median(times) * 1e-3))


def _copies(num_bytes: int) -> range:
    return range(max(2, min(64, _COLD_BYTES // max(num_bytes, 1) + 1)))


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _each(function: Callable[..., object], buffers: Sequence[Any], **fixed: Any) -> list[Call]:
    return [functools.partial(function, *of_call, **fixed) for of_call in buffers]


def linear_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """The four products of a layer, with what is fused around them."""
    plans = {
        "norm + qkv": (shape.qkv, shape.hidden, "norm"),
        "o + residual": (shape.hidden, shape.num_heads * shape.head_dim, "residual"),
        "norm + gate/up + silu": (2 * shape.intermediate, shape.hidden, "gated"),
        "down + residual": (shape.hidden, shape.intermediate, "residual"),
    }
    for name, (height, width, kind) in plans.items():
        num_bytes = 2 * height * width
        x = _normal(batch_size, width)
        norm = _normal(width)
        residual = _normal(batch_size, height) if kind == "residual" else None
        weights = [(x, _normal(height, width, scale=width**-0.5)) for _ in _copies(num_bytes)]
        fused = {
            "norm_weight": None if kind == "residual" else norm,
            "gated": kind == "gated",
            "residual": residual,
        }
        ours = _each(small_batch_linear, weights, **fused) if batch_size <= MAX_BATCH_SIZE else []
        yield Case(name, num_bytes, ours, library=_each(F.linear, weights))


def elementwise_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """Norm, gate, and what stands between qkv and attention."""
    weight = _normal(shape.hidden)
    num_bytes = 8 * batch_size * shape.hidden
    pairs = [
        (_normal(batch_size, shape.hidden), _normal(batch_size, shape.hidden), weight, 1e-6)
        for _ in _copies(num_bytes)
    ]
    yield Case(
        "add + norm",
        num_bytes,
        _each(fused_add_rms_norm, pairs),
        _each(fused_add_rms_norm_reference, pairs),
    )
    num_bytes = 6 * batch_size * shape.intermediate
    gates = [(_normal(batch_size, 2 * shape.intermediate),) for _ in _copies(num_bytes)]
    yield Case("silu * up", num_bytes, _each(silu_mul, gates), _each(silu_mul_reference, gates))

    cache = _normal(batch_size + 1, _PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    head = _normal(shape.head_dim)
    fixed = {
        "positions": torch.arange(batch_size, device="cuda"),
        "slots": torch.arange(batch_size, device="cuda") * _PAGE_SIZE,
        "cos_sin": torch.rand(4096, shape.head_dim, device="cuda"),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "num_heads": shape.num_heads,
        "q_weight": head,
        "k_weight": head,
    }
    num_bytes = 4 * batch_size * shape.qkv
    packed = [(_normal(batch_size, shape.qkv),) for _ in _copies(num_bytes)]
    yield Case(
        "qk-norm + rope + store",
        num_bytes,
        _each(qk_norm_rope_store, packed, **fixed),
    )


def attention_cases(shape: Shape, batch_size: int, context: int) -> Iterator[Case]:
    """Decode attention over bf16 and fp8 pages."""
    pages = -(-context // _PAGE_SIZE)
    num_pages = batch_size * pages
    table = torch.randperm(num_pages, device="cuda").view(batch_size, pages).int()
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device="cuda")
    q = _normal(batch_size, shape.num_heads, shape.head_dim)
    workspace = DecodeWorkspace(batch_size, shape.num_heads, shape.head_dim, q.device)
    one = torch.ones(1, device="cuda")
    for dtype, scales in (
        (torch.bfloat16, {}),
        (torch.float8_e4m3fn, {"k_scale": one, "v_scale": one}),
    ):
        dims = (num_pages, _PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        num_bytes = 2 * batch_size * context * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        caches = [(_normal(*dims).to(dtype), _normal(*dims).to(dtype)) for _ in _copies(num_bytes)]
        inputs = [(q, k, v, table, lengths) for k, v in caches]
        name = "bf16" if dtype == torch.bfloat16 else "fp8"
        twin = _each(decode_attention_reference, inputs[:2], **scales)
        library = _flash_attention(q, caches, table, lengths) if not scales else ()
        yield Case(
            f"attention (Triton), {name}, context {context}",
            num_bytes,
            _each(decode_attention, inputs, workspace=workspace, **scales),
            twin,
            library,
        )
        yield Case(
            f"attention (CUDA), {name}, context {context}",
            num_bytes,
            _cuda_attention(shape, inputs, scales),
            twin,
            library,
        )


def _cuda_attention(
    shape: Shape, inputs: Sequence[tuple[Tensor, ...]], scales: dict[str, Tensor]
) -> list[Call]:
    """This package's kernel in CUDA C++, where the GPU can run it."""
    try:
        from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel
    except ImportError:
        return []
    if torch.cuda.get_device_capability() < (9, 0):
        return []
    q, keys, _, table, lengths = inputs[0]
    kernel = DecodeAttentionKernel(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=_PAGE_SIZE,
        dtype=q.dtype,
        kv_dtype=keys.dtype,
        max_batch_size=len(q),
        device=q.device,
    )
    shared: dict[str, Any] = {"rows": None, "window": None, "pdl": False}
    runs = kernel.plan(table, lengths, **shared)
    of_call = {"scale": shape.head_dim**-0.5, "k_scale": None, "v_scale": None, **scales, **shared}
    return _each(kernel, [(*tensors, runs) for tensors in inputs], **of_call)


def _flash_attention(
    q: Tensor, caches: Sequence[tuple[Tensor, Tensor]], table: Tensor, lengths: Tensor
) -> list[Call]:
    """FlashAttention-3, where sgl_kernel is installed."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError:
        return []
    inputs = [(q[:, None], k, v) for k, v in caches]
    fixed = {"cache_seqlens": lengths, "page_table": table, "causal": True, "ver": 3}
    return _each(flash_attn_with_kvcache, inputs, **fixed)


def sampling_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """Greedy, plain random and filtered rows; the library is torch's argmax."""
    num_bytes = 2 * batch_size * shape.vocab_size
    logits = [_normal(batch_size, shape.vocab_size, scale=2.0) for _ in _copies(num_bytes)]
    workspace = SamplingWorkspace(batch_size, logits[0].device)
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("random", 0.6, 0, 1.0),
        ("top-k 20, top-p 0.95", 0.6, 20, 0.95),
        ("top-p 0.95", 0.6, 0, 0.95),
    ):
        full = functools.partial(torch.full, (batch_size,), device="cuda")
        rows = RowParameters(
            temperature=full(temperature, dtype=torch.float32),
            top_k=full(top_k, dtype=torch.int32),
            top_p=full(top_p, dtype=torch.float32),
            min_p=full(0.0, dtype=torch.float32),
            seeds=full(1, dtype=torch.int64),
            positions=full(5, dtype=torch.int64),
        )
        inputs = [(of_call, rows) for of_call in logits]
        yield Case(
            f"sampling, {name}",
            num_bytes,
            _each(sample, inputs, workspace=workspace),
            _each(sample_reference, inputs[:2]),
            _each(torch.argmax, [(of_call, -1) for of_call in logits]) if top_k == 0 else (),
        )


def expert_cases(batch_size: int) -> Iterator[Case]:
    """Qwen3-30B-A3B: 128 experts, 8 a token."""
    experts, top_k, hidden, inner = 128, 8, 2048, 768
    gate_up = _normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = _normal(experts, hidden, inner, scale=inner**-0.5)
    scores = torch.rand(batch_size, experts, device="cuda")
    weights, ids = scores.topk(top_k, dim=-1)
    used = len(set(ids.flatten().tolist()))
    inputs = [(_normal(batch_size, hidden), gate_up, down, ids, weights)]
    yield Case("experts, 128 x 8", used * 6 * hidden * inner, _each(fused_experts, inputs * 4))


def layer_cases(shape: Shape, batch_size: int, context: int) -> Iterator[Case]:
    """A decoder layer in six kernels, launched one after another and with dependent launches."""
    pages = -(-context // _PAGE_SIZE)
    dims = (batch_size * pages, _PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    table = torch.randperm(dims[0], device="cuda").view(batch_size, pages).int()
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device="cuda")
    slots = table[:, -1].long() * _PAGE_SIZE + (context - 1) % _PAGE_SIZE
    cos_sin = torch.rand(context, shape.head_dim, device="cuda")
    norm, head = _normal(shape.hidden), _normal(shape.head_dim)
    workspace = DecodeWorkspace(batch_size, shape.num_heads, shape.head_dim, norm.device)
    residual = _normal(batch_size, shape.hidden)
    width = shape.num_heads * shape.head_dim
    num_bytes = 2 * (shape.hidden * (shape.qkv + width + 3 * shape.intermediate))
    num_bytes += 4 * batch_size * context * shape.num_kv_heads * shape.head_dim
    layers = [
        (
            _normal(shape.qkv, shape.hidden, scale=0.01),
            _normal(shape.hidden, width, scale=0.01),
            _normal(2 * shape.intermediate, shape.hidden, scale=0.01),
            _normal(shape.hidden, shape.intermediate, scale=0.01),
            _normal(*dims),
            _normal(*dims),
        )
        for _ in range(min(28, len(_copies(num_bytes)) * 4))
    ]

    def layer(
        qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, k: Tensor, v: Tensor, *, pdl: bool
    ) -> None:
        packed = small_batch_linear(residual, qkv, norm_weight=norm, pdl=pdl)
        q = qk_norm_rope_store(
            packed,
            last,
            slots,
            cos_sin,
            k,
            v,
            num_heads=shape.num_heads,
            q_weight=head,
            k_weight=head,
            pdl=pdl,
        )
        out = decode_attention(q, k, v, table, lengths, workspace, pdl=pdl)
        small_batch_linear(out.flatten(1), o, residual=residual, pdl=pdl)
        inner = small_batch_linear(residual, gate_up, norm_weight=norm, gated=True, pdl=pdl)
        small_batch_linear(inner, down, residual=residual, pdl=pdl)

    last = lengths - 1
    for pdl in (False, True):
        name = f"layer of 6, context {context}" + (", dependent launch" if pdl else "")
        yield Case(name, num_bytes, _each(layer, layers, pdl=pdl))


def cases(shape: Shape, batch_size: int, context: int) -> Iterator[Case]:
    """All lines of one model and batch size."""
    yield from linear_cases(shape, batch_size)
    yield from elementwise_cases(shape, batch_size)
    yield from attention_cases(shape, batch_size, context)
    if batch_size <= MAX_BATCH_SIZE:
        yield from layer_cases(shape, batch_size, context)
    if shape is MODELS["qwen3-0.6b"]:
        yield from sampling_cases(shape, batch_size)
        yield from expert_cases(batch_size)


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)))
@click.option("--batch-size", "batch_sizes", multiple=True, type=int, help="[default: 1 8 64 256]")
@click.option("--context", default=1024, show_default=True, help="positions a row attends to")
@click.option("--only", help="kernels whose names contain this")
@json_option
def kernels(
    models: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    context: int,
    only: str | None,
    json_path: Path | None,
) -> None:
    """Time of each GPU kernel against its twin, a library's and the bandwidth bound."""
    if not (torch.cuda.is_available() and has_triton()):
        raise ConfigError("bench kernels needs an NVIDIA GPU and Triton")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    info = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_s": round(bandwidth / 1e12, 2),
    }
    report = Report("kernels, microseconds a call", info=info)
    for model in models or MODELS:
        for batch_size in batch_sizes or (1, 8, 64, 256):
            for case in cases(MODELS[model], batch_size, context):
                if only is None or only in case.kernel:
                    click.echo(f"{model}, batch {batch_size}: {case.kernel}", err=True)
                    report.add(model=model, batch=batch_size, **_measure(case, bandwidth))
            torch.cuda.empty_cache()
    report.emit(json_path)


def _measure(case: Case, bandwidth: float) -> dict[str, Any]:
    bound = case.num_bytes / bandwidth * 1e6
    times = {
        name: time_us(calls) if calls else None
        for name, calls in (("us", case.ours), ("twin", case.twin), ("library", case.library))
    }
    best = times["us"]
    return {
        "kernel": case.kernel,
        **times,
        "bound": bound,
        "of_bound": f"{bound / best:.0%}" if best else "",
    }
