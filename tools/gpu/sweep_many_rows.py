"""``python3 -m tools.gpu.sweep_many_rows SIZES [FORMS]``: experts with many rows.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. Each variant
of ``cuda/experts_many.cu`` is compared with float32 products of some rows, and then timed beside
the kernels for few rows: each launch of a layer by itself, in a captured graph over the weights of
several layers. Tokens choose experts evenly, or some experts much more often than others. FORMS are
bf16 and fp8 by default, with the shape of Qwen3-30B-A3B. The tables have microseconds, and TFLOP/s
of both products.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels import expert_cut, moe
from minisgl_backend.kernels.cuda.experts import GroupedKernel, RoutingKernel
from minisgl_backend.kernels.cuda.experts_many import ManyRowsKernel
from minisgl_backend.kernels.expert_cut import ExpertCut, ManyCut
from minisgl_backend.kernels.packed_weight import PackedWeight, dequantize_weight
from minisgl_backend.kernels.quantized_linear import float8_rows
from minisgl_bench.kernel_experts import FORMS, Form
from tools.gpu.sweep_experts import seconds

NUM_LAYERS: Final = 4
NUM_SAMPLES: Final = 64
"""Rows that are compared."""

VARIANTS: Final = ManyCut(), ManyCut(skew=0), ManyCut(grain=16), ManyCut(cluster=1)


@dataclass(frozen=True)
class Routing:
    """Which experts tokens choose; ``unevenness`` spreads the experts' logits."""

    name: str
    unevenness: float


ROUTINGS: Final = (Routing("even", 0.0), Routing("uneven", 1.0))


def name_of(cut: ManyCut | ExpertCut) -> str:
    if isinstance(cut, ManyCut):
        return f"many, {cut.cluster} x {cut.stages} stages, grain {cut.grain}, skew {cut.skew}"
    return f"few, {cut.features} x {cut.tokens}, {cut.stages} stages"


def numbers_of(weight: object, expert: int) -> Tensor:
    if isinstance(weight, PackedWeight):
        return dequantize_weight(weight.expert(expert).weight, torch.float32, packed=True)
    assert isinstance(weight, Tensor)
    return weight[expert].float()


def error(out: Tensor, x: Tensor, weight: object, ids: Tensor, top_k: int, *, gated: bool) -> float:
    """Of some rows, relative to the norm of what they should be."""
    pairs = torch.randint(ids.numel(), (NUM_SAMPLES,), device=out.device)
    expected = []
    for pair in pairs.tolist():
        y = numbers_of(weight, int(ids.flatten()[pair])) @ x[pair // top_k].float()
        if gated:
            gate, up = y.chunk(2)
            y = F.silu(gate) * up
        expected.append(y)
    right = torch.stack(expected)
    return float((out[pairs].float() - right).norm() / right.norm())


def time_of(call: Callable[[int], object]) -> float:
    return 1e6 * seconds([partial(call, layer) for layer in range(NUM_LAYERS)] * 2)


def sweep(name: str, sizes: Sequence[int], device: torch.device) -> None:
    form: Form = FORMS[name]
    layers = [form.made(device)]
    layers += [copy.deepcopy(layers[0]) for _ in range(NUM_LAYERS - 1)]
    kinds = layers[0].kinds or (None, None)
    few = expert_cut.cuts(form.bits)[-2:]
    blocks = {0, *(cut.tokens for cut in few), *(cut.block for cut in VARIANTS)}
    route = RoutingKernel(
        form.rule, (0, form.num_experts), form.hidden, device, wide=False, blocks=sorted(blocks)
    )

    def made(cut: ManyCut | ExpertCut) -> list[Any]:
        both = list(zip(form.shapes, kinds, (True, False), strict=True))
        if isinstance(cut, ManyCut):
            return [ManyRowsKernel(s, device, codes=k, gated=g, cut=cut) for s, k, g in both]
        return [
            partial(GroupedKernel(s, device, codes=k, gated=g, cuts=[cut]), cut=cut)
            for s, k, g in both
        ]

    cuts: list[ManyCut | ExpertCut] = [*few, *VARIANTS]
    with ThreadPoolExecutor(12) as pool:
        kernels = dict(zip(cuts, pool.map(made, cuts), strict=True))
    for size in sizes:
        for routing in ROUTINGS:
            sweep_size(name, form, size, routing, layers, route, kernels)


def sweep_size(
    name: str,
    form: Form,
    size: int,
    routing: Routing,
    layers: Sequence[moe.ExpertWeights],
    route: RoutingKernel,
    kernels: dict[ManyCut | ExpertCut, list[Any]],
) -> None:
    torch.manual_seed(size)
    x = torch.randn(size, form.hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(size, form.num_experts, device="cuda")
    logits += routing.unevenness * torch.randn(form.num_experts, device="cuda")
    logits = logits.bfloat16()
    ids = route(logits, block=0).choices.ids
    counts = ids.flatten().bincount(minlength=form.num_experts)
    inner = torch.randn(ids.numel(), form.inner, device="cuda", dtype=torch.bfloat16)
    outer = torch.randn(size, form.top_k, form.hidden, device="cuda", dtype=torch.bfloat16)
    choices = route(logits, block=0).choices
    residual, norm = torch.zeros_like(x), torch.ones_like(x[0])

    def add_up(_: int) -> None:
        moe.add_outputs(outer, choices, None, residual, norm, 1e-6, pdl=True)

    def round_x(_: int) -> None:
        float8_rows(x, form.hidden, pdl=True)

    def round_inner(_: int) -> None:
        float8_rows(inner, form.inner, pdl=True)

    sums = time_of(add_up)
    rounding = ""
    if form.encoding is not None:
        of_x, of_inner = time_of(round_x), time_of(round_inner)
        rounding = f", of which rounding takes {of_x:.0f} for gate-up and {of_inner:.0f} for down"
    print(
        f"== {name}, {size} tokens, {routing.name}: "
        f"{int(counts.min())} to {int(counts.max())} rows an expert; sum {sums:.0f} us{rounding}"
    )
    flops = 6 * ids.numel() * form.hidden * form.inner
    for cut, (up, down) in kernels.items():
        block = cut.block if isinstance(cut, ManyCut) else cut.tokens
        aligned = route(logits, block=block).alignment
        assert aligned is not None
        held = aligned.pairs, aligned.experts, ids.numel()
        first = layers[0]
        up_part = partial(up, x, pairs=held[0], experts=held[1], num_pairs=held[2])
        down_part = partial(down, inner, pairs=held[0], experts=held[1], num_pairs=held[2])
        errors = (
            error(
                up_part(weight=first.gate_up, top_k=form.top_k),
                x,
                first.gate_up,
                ids,
                form.top_k,
                gated=True,
            ),
            error(down_part(weight=first.down, top_k=1), inner, first.down, ids, 1, gated=False),
        )

        def choose(_: int, block: int = block) -> None:
            route(logits, block=block, pdl=True)

        def open_gates(layer: int, part: Any = up_part) -> None:
            part(weight=layers[layer].gate_up, top_k=form.top_k, pdl=True)

        def go_down(layer: int, part: Any = down_part) -> None:
            part(weight=layers[layer].down, top_k=1, pdl=True)

        times = time_of(choose), time_of(open_gates), time_of(go_down)
        speed = flops / (times[1] + times[2]) / 1e6
        print(
            f"{name_of(cut):42} errors {errors[0]:.4f} {errors[1]:.4f}  routing {times[0]:5.1f}  "
            f"gate-up {times[1]:6.1f}  down {times[2]:6.1f} us  {speed:5.0f} TFLOP/s",
            flush=True,
        )


def main() -> None:
    sizes = [int(size) for size in sys.argv[1].split(",")]
    for name in sys.argv[2].split(",") if len(sys.argv) > 2 else ("bf16", "fp8"):
        sweep(name, sizes, torch.device("cuda"))


if __name__ == "__main__":
    main()
