"""``python3 -m tools.gpu.sweep_experts FORM SIZES``: layers of experts by number of tokens.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. FORM is bf16,
fp8 (blocks of 128 x 128) or int4 (groups of 128, zero points), with the shape of Qwen3-30B-A3B,
mxfp4, with that of gpt-oss-20b, gelu (bfloat16) or gelu-fp8, with that of Gemma 4 26B-A4B, or relu2
(bfloat16) or relu2-fp8, with that of Nemotron 3 Nano 30B-A3B; SIZES such as 1,16,64. Each cut of
the grouped GEMMs is timed within whole layers, from the router's logits to the norm of the sum, in
a captured graph over the weights of several layers, so that none is in the L2 cache; also the
kernels for many rows and for a few rows, if they take such weights, and for bfloat16 the one for
single rows of ``down`` and those in Triton. The table has microseconds per layer, terabytes of
weights per second and TFLOP/s. ``kernels.expert_cut`` has the fastest cuts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.gates import ClampedGate
from minisgl_backend.kernels.cuda.expert_gemv import ExpertGemv
from minisgl_backend.kernels.cuda.experts import GroupedKernel
from minisgl_backend.kernels.cuda.experts_many import ManyRowsKernel
from minisgl_backend.kernels.cuda.routing import RoutingKernel
from minisgl_backend.kernels.expert_cut import MANY, ExpertCut, fits_many
from minisgl_backend.kernels.experts import ExpertWeights, add_outputs, expert_outputs
from minisgl_backend.kernels.gemv_cut import are_few, expert_gemv_cut, one_batch_cut
from minisgl_backend.kernels.linear_cut import PLAIN, Numbers
from minisgl_backend.kernels.quantized import QuantizedWeight
from minisgl_backend.kernels.routing import Choices
from minisgl_backend.weight_format import Encoding
from minisgl_bench.kernel_experts import FORMS, Form

NUM_LAYERS: Final = 6
KINDS: Final = (
    # features, KiB of shared memory, thread blocks that fit, thread blocks that are launched
    *((64, 113, 2, 1), (64, 113, 2, 2), (64, 74, 3, 3)),
    *((128, 113, 2, 1), (128, 113, 2, 2), (128, 226, 1, 1), (128, 74, 3, 3)),
)
WIDTHS: Final = {1: (8,), 64: (8, 16), 128: (8, 16, 32), 256: (16, 24, 32, 64), 8192: (64, 128)}
"""The rows per tile that are tried, by the largest number of tokens."""

FEW: Final = {
    Encoding.E2M1: ((4, 36), (4, 48), (3, 32)),
    Encoding.E4M3: ((4, 24), (4, 32), (3, 24), (2, 24)),
    None: ((2, 24), (2, 32), (4, 16), (1, 32)),
}
"""By encoding, None being plain, the kernels for a few rows: most columns of a warp, and warps of a
multiprocessor."""


@dataclass(frozen=True)
class Layer:
    """Inputs and weights of one layer."""

    x: Tensor
    logits: Tensor
    residual: Tensor
    norm: Tensor
    weights: ExpertWeights


def cuts_for(num_tokens: int, form: Form) -> Iterator[ExpertCut]:
    widths = next(of for most, of in WIDTHS.items() if num_tokens <= most)
    numbers = (
        PLAIN if form.encoding is None else Numbers(form.bits, 1024 // form.bits, 512 // form.bits)
    )
    for tokens in widths:
        for features, kib, fit, launched in KINDS:
            if tokens * fit > 128:  # a thread holds sums of half of its tile's tokens
                continue
            for rounded in (False, True) if form.encoding is Encoding.E4M3 else (False,):
                cut = ExpertCut(features, tokens, 16, fit, launched, rounded=rounded)
                stages = kib * 1024 // (cut.shared_bytes(numbers) // cut.stages)
                cut = replace(cut, stages=min(stages, 16))
                yield cut
                if form.encoding and tokens * features * fit <= 128 * 16 and not rounded:
                    yield replace(cut, by_warp=True)


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """The seconds of a call, in a captured graph of all of them."""
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


def normal(*shape: int) -> Tensor:
    drawn = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return drawn.mul_(shape[-1] ** -0.5)


def finish(layer: Layer, outputs: Tensor, choices: Choices) -> None:
    parts = outputs.view(*choices.ids.shape, -1)
    add_outputs(parts, choices, None, layer.residual, layer.norm, 1e-6, pdl=True)


def in_triton(layer: Layer, route: RoutingKernel) -> None:
    choices = route(layer.logits, block=0).choices
    finish(layer, expert_outputs(layer.x, layer.weights, choices), choices)


def of_few(layer: Layer, route: RoutingKernel, kernels: Sequence[ExpertGemv]) -> None:
    choices = route(layer.logits, block=0, pdl=True).choices
    of, ids, (up, down) = layer.weights, choices.ids, kernels
    assert not isinstance(of.gate_up, QuantizedWeight) and not isinstance(of.down, QuantizedWeight)
    inner = up(layer.x, of.gate_up, ids, bias=of.gate_up_bias, pdl=True)
    finish(layer, down(inner, of.down, ids, bias=of.down_bias, early=True, pdl=True), choices)


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
    held, top_k = (aligned.pairs, aligned.experts, choices.ids.numel()), choices.ids.shape[1]
    of = layer.weights
    fixed: dict[str, Any] = {"cut": cut, "pdl": True}
    assert not isinstance(of.gate_up, QuantizedWeight) and not isinstance(of.down, QuantizedWeight)
    inner = up(layer.x, of.gate_up, *held, top_k=top_k, bias=of.gate_up_bias, **fixed)
    outer = down(inner, of.down, *held, top_k=1, bias=of.down_bias, early=early, **fixed)
    finish(layer, outer, choices)


def with_many_rows(layer: Layer, route: RoutingKernel, kernels: Sequence[ManyRowsKernel]) -> None:
    routed = route(layer.logits, block=MANY.block, pdl=True)
    aligned, choices, (up, down) = routed.alignment, routed.choices, kernels
    assert aligned is not None
    held, top_k = (aligned.pairs, aligned.experts, choices.ids.numel()), choices.ids.shape[1]
    gate_up, of_down = layer.weights.gate_up, layer.weights.down
    assert not isinstance(gate_up, QuantizedWeight) and not isinstance(of_down, QuantizedWeight)
    inner = up(layer.x, gate_up, *held, top_k=top_k, pdl=True)
    finish(layer, down(inner, of_down, *held, top_k=1, pdl=True), choices)


def sweep(form: Form, sizes: Sequence[int], device: torch.device) -> None:
    blocks, held = [0, 8, 16, 24, 32, 64, 128, MANY.block], (0, form.num_experts)
    route = RoutingKernel(form.rule, held, form.hidden, device, wide=False, blocks=blocks)
    experts = [form.made(device) for _ in range(NUM_LAYERS)]
    kinds = experts[0].kinds or (None, None)

    squares = form.gate is None
    both = list(zip(form.shapes, kinds, (form.gate, None), (squares, False), strict=True))

    def made(cut: ExpertCut) -> list[GroupedKernel]:
        return [
            GroupedKernel(shape, device, codes=kind, gate=gate, squares_relu=of_relu, cuts=[cut])
            for shape, kind, gate, of_relu in both
        ]

    can_multiply = all(kind is None or kind.rounds_many_rows for kind in kinds)
    for_many: list[ManyRowsKernel] = []
    if can_multiply and not form.biases and fits_many(form.hidden, form.inner, gated=not squares):
        for of, kind, gate, of_relu in both:
            assert not isinstance(gate, ClampedGate)
            for_many.append(ManyRowsKernel(of, device, codes=kind, gate=gate, squares_relu=of_relu))

    for_few = {
        few: [
            ExpertGemv(
                shape,
                device,
                codes=kind,
                gate=gate,
                squares_relu=of_relu,
                cut=one_batch_cut(shape[2], *few),
            )
            for shape, kind, gate, of_relu in both
        ]
        for few in FEW.get(form.encoding, [])
        if all(expert_gemv_cut(shape[2], kind) is not None for shape, kind, *_ in both)
    }

    all_cuts = {cut for size in sizes for cut in cuts_for(size, form)}
    with ThreadPoolExecutor(12) as pool:
        kernels = dict(zip(all_cuts, pool.map(made, all_cuts), strict=True))
    for size in sizes:
        sweep_size(
            size,
            form,
            experts,
            route,
            kernels,
            for_many,
            for_few if are_few(size, size * form.top_k, form.encoding) else {},
        )


def sweep_size(
    size: int,
    form: Form,
    experts: Sequence[ExpertWeights],
    route: RoutingKernel,
    kernels: dict[ExpertCut, list[GroupedKernel]],
    for_many: Sequence[ManyRowsKernel],
    for_few: dict[tuple[int, int], list[ExpertGemv]],
) -> None:
    layers = [
        Layer(
            normal(size, form.hidden),
            torch.randn(size, form.num_experts, device="cuda", dtype=torch.bfloat16),
            normal(size, form.hidden),
            normal(form.hidden),
            of_layer,
        )
        for of_layer in experts
    ]
    ids = [layer.logits.topk(form.top_k).indices.flatten().tolist() for layer in layers]
    used = statistics.mean(len(set(of_layer)) for of_layer in ids)
    num_bytes = used * 3 * form.inner * form.hidden * form.bits / 8
    num_operations = 6 * size * form.top_k * form.inner * form.hidden
    repeated = layers * (4 if size <= 64 else 1)

    def show(name: str, call: Callable[[Layer], None]) -> None:
        time = seconds([partial(call, layer) for layer in repeated])
        read, computed = num_bytes / time / 1e12, num_operations / time / 1e12
        speeds = f"{read:5.2f} TB/s {computed:5.0f} TFLOP/s"
        print(f"{size:5} {name:34} {time * 1e6:8.1f} us {speeds}", flush=True)

    if form.encoding is None:
        show("Triton", partial(in_triton, route=route))
    if for_many:
        show("many rows", partial(with_many_rows, route=route, kernels=for_many))
    for (columns, warps), of_cut in for_few.items():
        name = f"few rows, {columns} columns, {warps} warps"
        show(name, partial(of_few, route=route, kernels=of_cut))
    for cut in cuts_for(size, form):
        for early in (True, False) if cut.resident < cut.per_processor else (True,):
            name = f"{cut.features} x {cut.tokens}, {cut.stages} stages, "
            name += f"{cut.resident} of {cut.per_processor}{' early' if early else ''}"
            name += " by warp" if cut.by_warp else " rounded" if cut.rounded else ""
            fixed: dict[str, Any] = {"kernels": kernels[cut], "cut": cut, "early": early}
            show(name, partial(in_groups, route=route, **fixed))


def main() -> None:
    form, sizes = sys.argv[1:]
    sweep(FORMS[form], [int(size) for size in sizes.split(",")], torch.device("cuda"))


if __name__ == "__main__":
    main()
