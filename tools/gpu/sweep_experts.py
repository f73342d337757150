"""``python3 -m tools.gpu.sweep_experts KIND SIZES``: the kernels of experts by number of tokens.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. KIND is bf16
or fp8, SIZES such as 1,16,64. The shape is that of Qwen3-30B-A3B. All cuts are timed from captured
graphs over the weights of several layers, so that none is in the L2 cache; beside them the kernels
that serve today, the router and the sums. The table has microseconds and terabytes of weights a
second. KIND compile only fills the cache of compiled kernels, 12 at a time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.kernels import moe
from minisgl_backend.kernels.cuda.experts import ExpertCut, GroupedKernel, RoutingKernel
from minisgl_backend.kernels.quantized import QuantizedWeight, quantize
from minisgl_backend.kernels.triton_kernels.expert_rows import (
    launch_expert_rows,
    launch_sum_outputs,
)
from minisgl_backend.kernels.triton_kernels.grouped_linear import launch_grouped_linear
from minisgl_backend.weight_format import Encoding

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
NUM_LAYERS: Final = 6
SHAPES: Final = ((NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER))
KINDS: Final = (
    # features, KiB of shared memory, thread blocks that fit, thread blocks that are launched
    *((64, 112, 2, 1), (64, 112, 2, 2), (64, 74, 3, 3), (64, 226, 1, 1)),
    *((128, 112, 2, 1), (128, 112, 2, 2), (128, 226, 1, 1)),
)
ROWS: Final = ((4, 1024, 4), (8, 512, 4), (8, 1024, 8), (2, 1024, 2), (2, 2048, 4), (16, 256, 4))
"""Of the kernel for single rows: output features, in_features of an iteration, warps."""

Call = Callable[[], object]
Weight = Tensor | QuantizedWeight


def blocks_for(num_tokens: int, bits: int) -> list[int]:
    if num_tokens <= 16:
        return [8, 16]
    if num_tokens <= 64:
        return [8, 16, 32]
    if num_tokens <= 256:
        return [16, 32, 64]
    return [64, 128] if bits == 16 else [32, 64]


def cut_of(features: int, tokens: int, bits: int, kib: int, fit: int, launched: int) -> ExpertCut:
    """With as many stages as the memory holds."""
    cuts = [ExpertCut(features, tokens, stages, fit, launched) for stages in range(2, 25)]
    return [cuts[0], *(cut for cut in cuts if cut.shared_bytes(bits) <= kib * 1024)][-1]


def cuts_for(num_tokens: int, bits: int) -> list[ExpertCut]:
    return [
        cut_of(features, tokens, bits, kib, fit, launched)
        for tokens in blocks_for(num_tokens, bits)
        for features, kib, fit, launched in KINDS
    ]


def kernels_of(cut: ExpertCut, bits: int, device: torch.device) -> list[GroupedKernel]:
    return [
        GroupedKernel(shape, device, bits=bits, gated=index == 0, cuts=[cut])
        for index, shape in enumerate(SHAPES)
    ]


def compile_all(device: torch.device) -> None:
    def compiled(one: tuple[ExpertCut, int]) -> None:
        kernels_of(*one, device)

    todo = {
        (cut, bits)
        for bits in (16, 8)
        for size in (1, 64, 256, 1024)
        for cut in cuts_for(size, bits)
    }
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compiled, todo))
    print(f"compiled {len(todo)} cuts")


def microseconds(calls: Sequence[Call]) -> float:
    """Of a call, in a captured graph of all of them."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(3):
        event: Any = partial(torch.cuda.Event, enable_timing=True)
        first, last = event(), event()
        first.record()
        graph.replay()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 2 / len(calls) * 1e3)
    return statistics.median(times)


@dataclass(frozen=True)
class Layer:
    """Inputs and weights of one layer."""

    x: Tensor
    inner: Tensor
    ids: Tensor
    gate_up: Weight
    down: Weight


def converted(weight: Tensor) -> QuantizedWeight:
    parts = [quantize(one, Encoding.E4M3, (128, 128)) for one in weight]
    codes, scales = (torch.stack([getattr(p, name) for p in parts]) for name in ("codes", "scales"))
    return QuantizedWeight(Encoding.E4M3, (128, 128), codes, scales)


def normal(*shape: int) -> Tensor:
    drawn = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return drawn.mul_(shape[-1] ** -0.5)


def sweep(bits: int, sizes: Sequence[int], device: torch.device) -> None:
    made = [[normal(*shape) for shape in SHAPES] for _ in range(NUM_LAYERS)]
    weights: list[list[Weight]] = [list(pair) for pair in made]
    if bits == 8:
        weights = [[converted(weight) for weight in pair] for pair in made]
    for size in sizes:
        layers = []
        for pair in weights:
            ids = torch.randn(size, NUM_EXPERTS, device=device).topk(TOP_K, dim=-1).indices.int()
            layers.append(Layer(normal(size, HIDDEN), normal(size * TOP_K, INNER), ids, *pair))
        sweep_size(size, bits, layers * (4 if size <= 64 else 1), device)


def sweep_size(size: int, bits: int, layers: list[Layer], device: torch.device) -> None:
    used = statistics.mean(len(set(layer.ids.flatten().tolist())) for layer in layers)
    num_bytes, num_pairs = used * INNER * HIDDEN * bits / 8, size * TOP_K
    inner, outer = normal(num_pairs, INNER), normal(num_pairs, HIDDEN)

    def show(name: str, up: Sequence[Call], down: Sequence[Call]) -> None:
        try:
            first, second = microseconds(up), microseconds(down)
        except Exception as error:  # a cut that does not fit leaves the others to be timed
            print(f"{name:34} {error!r:.200}", flush=True)
            return
        speeds = 2 * num_bytes / first / 1e6, num_bytes / second / 1e6
        print(
            f"{name:34} {size:5} gate/up {first:8.1f} us {speeds[0]:5.2f} TB/s"
            f"   down {second:8.1f} us {speeds[1]:5.2f} TB/s",
            flush=True,
        )

    if bits == 16:
        block = 16 if num_pairs <= 16 * NUM_EXPERTS else 64
        both: list[list[Call]] = [[], []]
        for layer in layers:
            sorted_ = moe.align(layer.ids, NUM_EXPERTS, block)
            for timed, out, x, weight, top_k in (
                (both[0], inner, layer.x, layer.gate_up, TOP_K),
                (both[1], outer, layer.inner, layer.down, 1),
            ):
                assert isinstance(weight, Tensor)
                pairs, experts = sorted_.pairs, sorted_.experts
                run = partial(
                    launch_grouped_linear, out, x, weight, pairs, experts, None, block=block
                )
                timed.append(partial(run, top_k=top_k, gated=top_k > 1))
        show("today", *both)
    if bits == 16 and size <= 8:
        for rows, width, warps in ROWS:
            form: dict[str, Any] = {"rows": rows, "num_warps": warps, "pdl": True}
            run_up = partial(
                launch_expert_rows, inner, top_k=TOP_K, gated=True, block=width, **form
            )
            short = min(width, 256)
            run_down = partial(launch_expert_rows, outer, top_k=1, gated=False, block=short, **form)
            show(
                f"rows {rows} x {width}, {warps} warps",
                [partial(run_up, one.x, one.gate_up, one.ids.flatten()) for one in layers],
                [partial(run_down, one.inner, one.down, one.ids.flatten()) for one in layers],
            )
    for cut in cuts_for(size, bits):
        up, down = kernels_of(cut, bits, device)
        calls: list[list[Call]] = [[], []]
        for layer in layers:
            aligned = moe.align(layer.ids, NUM_EXPERTS, cut.tokens)
            held = aligned.pairs, aligned.experts, num_pairs
            fixed: dict[str, Any] = {"block": cut.tokens, "pdl": True}
            calls[0].append(partial(up, layer.x, layer.gate_up, *held, top_k=TOP_K, **fixed))
            calls[1].append(partial(down, layer.inner, layer.down, *held, top_k=1, **fixed))
        show(
            f"{cut.features} x {cut.tokens}, {cut.stages} stages,"
            f" {cut.resident} of {cut.per_processor}",
            *calls,
        )
    if bits == 16:
        show_rest(size, outer.view(size, TOP_K, HIDDEN), device)


def show_rest(size: int, parts: Tensor, device: torch.device) -> None:
    """Router, routing, sums."""
    x, router = normal(size, HIDDEN), normal(NUM_EXPERTS, HIDDEN)
    logits, weights = normal(size, NUM_EXPERTS), torch.rand(size, TOP_K, device=device)
    residual, norm = normal(size, HIDDEN), normal(HIDDEN)
    out, block = torch.empty_like(residual), blocks_for(size, 16)[0]
    route = RoutingKernel(
        NUM_EXPERTS, TOP_K, HIDDEN, device, sigmoid=False, normalize=True, blocks=[0, block]
    )
    run_sum = partial(launch_sum_outputs, out, parts, weights, None, residual, norm, 1e-6, pdl=True)
    named: dict[str, Call] = {
        "router, library": partial(torch.nn.functional.linear, x, router),
        "routing": partial(route, logits, block=0, pdl=True),
        "routing and sorting": partial(route, logits, block=block, pdl=True),
        "sum, add, norm": run_sum,
    }
    for name, call in named.items():
        print(f"{name:34} {size:5} {microseconds([call] * 20):8.1f} us", flush=True)


def main() -> None:
    kind, *sizes = sys.argv[1:]
    device = torch.device("cuda")
    if kind == "compile":
        compile_all(device)
    else:
        counts = [int(size) for size in sizes[0].split(",")]
        sweep(8 if kind == "fp8" else 16, counts, device)


if __name__ == "__main__":
    main()
