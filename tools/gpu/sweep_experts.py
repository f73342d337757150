"""``python3 -m tools.gpu.sweep_experts BITS SIZES``: layers of experts by number of tokens.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. BITS of a
weight are 16 or 8, SIZES such as 1,16,64. The shape is that of Qwen3-30B-A3B. Each cut of the
grouped GEMMs is timed within whole layers, from the router's logits to the norm of the sum, in a
captured graph over the weights of several layers, so that none is in the L2 cache; beside them the
kernels for single rows and those in Triton. The table has microseconds a layer, and terabytes of
weights a second. ``kernels.expert_cut`` has the fastest ones.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.kernels import moe
from minisgl_backend.kernels.cuda.experts import GroupedKernel, RoutingKernel
from minisgl_backend.kernels.expert_cut import ExpertCut
from minisgl_backend.kernels.quantized import QuantizedWeight, quantize
from minisgl_backend.kernels.triton_kernels.expert_rows import launch_expert_rows
from minisgl_backend.weight_format import Encoding

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
RULE: Final = RoutingRule(num_experts=NUM_EXPERTS, top_k=TOP_K, normalize=True)
NUM_LAYERS: Final = 6
SHAPES: Final = ((NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER))
KINDS: Final = (
    # features, KiB of shared memory, thread blocks that fit, thread blocks that are launched
    *((64, 112, 2, 1), (64, 112, 2, 2), (64, 74, 3, 3)),
    *((128, 112, 2, 1), (128, 112, 2, 2), (128, 226, 1, 1)),
)
WIDTHS: Final = {1: (8,), 64: (8, 16), 128: (8, 16, 32), 256: (16, 32, 64), 8192: (64, 128)}
"""Rows of a tile that are tried, by the largest number of tokens."""

Form = tuple[int, int, int]
"""Of the kernel for single rows: output features, in_features of an iteration, warps."""


@dataclass(frozen=True)
class Layer:
    """Inputs and weights of one layer."""

    x: Tensor
    logits: Tensor
    residual: Tensor
    norm: Tensor
    weights: moe.ExpertWeights


def cuts_for(num_tokens: int, bits: int) -> Iterator[ExpertCut]:
    widths = next(of for most, of in WIDTHS.items() if num_tokens <= most)
    for tokens in widths:
        for features, kib, fit, launched in KINDS:
            cuts = [ExpertCut(features, tokens, stages, fit, launched) for stages in range(2, 25)]
            held = [cut for cut in cuts if cut.shared_bytes(bits) <= kib * 1024]
            # a thread holds sums of half of its tile's tokens, twice with 8 bits
            if held and tokens * fit * (16 // bits) <= 128:
                yield held[-1]


def seconds(calls: Sequence[Callable[[], object]]) -> float:
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
        times.append(first.elapsed_time(last) / 2e3 / len(calls))
    return statistics.median(times)


def converted(weight: Tensor) -> QuantizedWeight:
    parts = [quantize(one, Encoding.E4M3, (128, 128)) for one in weight]
    codes, scales = (torch.stack([getattr(p, name) for p in parts]) for name in ("codes", "scales"))
    return QuantizedWeight(Encoding.E4M3, (128, 128), codes, scales)


def normal(*shape: int) -> Tensor:
    drawn = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return drawn.mul_(shape[-1] ** -0.5)


def named(form: Form) -> Any:
    return dict(zip(("rows", "block", "num_warps"), form, strict=True))


def finish(layer: Layer, outputs: Tensor, choices: moe.Choices) -> None:
    parts = outputs.view(*choices.ids.shape, HIDDEN)
    moe.add_outputs(parts, choices, None, layer.residual, layer.norm, 1e-6, pdl=True)


def in_triton(layer: Layer, route: RoutingKernel) -> None:
    choices = route(layer.logits, block=0).choices
    finish(layer, moe.expert_outputs(layer.x, layer.weights, choices), choices)


def row_by_row(layer: Layer, route: RoutingKernel, up: Form, down: Form) -> None:
    choices = route(layer.logits, block=0, pdl=True).choices
    ids, num_pairs = choices.ids.flatten(), choices.ids.numel()
    inner = layer.x.new_empty((num_pairs, INNER))
    outer = layer.x.new_empty((num_pairs, HIDDEN))
    gate_up, of_down = layer.weights.gate_up, layer.weights.down
    assert isinstance(gate_up, Tensor) and isinstance(of_down, Tensor)
    launch_expert_rows(inner, layer.x, gate_up, ids, top_k=TOP_K, gated=True, pdl=True, **named(up))
    launch_expert_rows(
        outer, inner, of_down, ids, top_k=1, gated=False, early=True, pdl=True, **named(down)
    )
    finish(layer, outer, choices)


def in_groups(
    layer: Layer,
    route: RoutingKernel,
    kernels: Sequence[GroupedKernel],
    cut: ExpertCut,
    early: bool,
) -> None:
    routed = route(layer.logits, block=cut.tokens, pdl=True)
    aligned, choices, (up, down) = routed.alignment, routed.choices, kernels
    assert aligned is not None
    held = aligned.pairs, aligned.experts, choices.ids.numel()
    inner = up(layer.x, layer.weights.gate_up, *held, cut=cut, top_k=TOP_K, pdl=True)
    outer = down(inner, layer.weights.down, *held, cut=cut, top_k=1, early=early, pdl=True)
    finish(layer, outer, choices)


def sweep(bits: int, sizes: Sequence[int], device: torch.device) -> None:
    blocks = [0, 8, 16, 32, 64, 128]
    route = RoutingKernel(RULE, (0, NUM_EXPERTS), HIDDEN, device, wide=False, blocks=blocks)

    def made(cut: ExpertCut) -> list[GroupedKernel]:
        return [
            GroupedKernel(shape, device, bits=bits, gated=index == 0, cuts=[cut])
            for index, shape in enumerate(SHAPES)
        ]

    all_cuts = {cut for size in sizes for cut in cuts_for(size, bits)}
    with ThreadPoolExecutor(12) as pool:
        kernels = dict(zip(all_cuts, pool.map(made, all_cuts), strict=True))
    weights = [[normal(*shape) for shape in SHAPES] for _ in range(NUM_LAYERS)]
    experts = [
        moe.ExpertWeights(converted(up), converted(down))
        if bits == 8
        else moe.ExpertWeights(up, down)
        for up, down in weights
    ]
    for size in sizes:
        sweep_size(size, bits, experts, route, kernels)


def sweep_size(
    size: int,
    bits: int,
    experts: Sequence[moe.ExpertWeights],
    route: RoutingKernel,
    kernels: dict[ExpertCut, list[GroupedKernel]],
) -> None:
    layers = [
        Layer(
            normal(size, HIDDEN),
            torch.randn(size, NUM_EXPERTS, device="cuda", dtype=torch.bfloat16),
            normal(size, HIDDEN),
            normal(HIDDEN),
            of_layer,
        )
        for of_layer in experts
    ]
    ids = [layer.logits.topk(TOP_K).indices.flatten().tolist() for layer in layers]
    used = statistics.mean(len(set(of_layer)) for of_layer in ids)
    num_bytes = used * 3 * INNER * HIDDEN * bits / 8
    repeated = layers * (4 if size <= 64 else 1)

    def show(name: str, call: Callable[[Layer], None]) -> None:
        time = seconds([partial(call, layer) for layer in repeated])
        speed = num_bytes / time / 1e12
        print(f"{size:5} {name:34} {time * 1e6:8.1f} us {speed:5.2f} TB/s", flush=True)

    if bits == 16:
        show("Triton", partial(in_triton, route=route))
    if bits == 16 and size <= 8:
        for up in ((8, 512, 4), (2, 2048, 4), (4, 1024, 4)):
            for down in ((8, 256, 4), (4, 256, 4), (8, 512, 4), (4, 1024, 4)):
                show(f"rows {up} {down}", partial(row_by_row, route=route, up=up, down=down))
    for cut in cuts_for(size, bits):
        for early in (True, False) if cut.resident < cut.per_processor else (True,):
            name = f"{cut.features} x {cut.tokens}, {cut.stages} stages, "
            name += f"{cut.resident} of {cut.per_processor}{' early' if early else ''}"
            fixed: dict[str, Any] = {"kernels": kernels[cut], "cut": cut, "early": early}
            show(name, partial(in_groups, route=route, **fixed))


def main() -> None:
    bits, sizes = sys.argv[1:]
    sweep(int(bits), [int(size) for size in sizes.split(",")], torch.device("cuda"))


if __name__ == "__main__":
    main()
