"""``python3 -m tools.gpu.sweep_linear FORMS SIZES``: the GEMMs of a layer, by how they are cut.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. FORMS are of
fp8 (blocks of 128 x 128) and int4 (groups of 128, zero points), such as fp8,int4; SIZES numbers of
tokens, such as 1,64. The shape is that of Qwen3-14B. The four GEMMs run in turn, in a captured
graph over the weights of several layers, so that none is in the L2 cache, as in a decode step
without attention. First come the cuts of ``kernels.linear_cut``; then, for one GEMM after the
other, other cuts in their place. The table has microseconds per layer, the difference that a cut
makes, and how far its results are from those of the first, relative to their size.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.linear import HeadsKernel, LinearKernel, ResidualKernel
from minisgl_backend.kernels.linear_cut import BATCHES, CODES_BLOCK, FEW_TOKENS, Cut, cut_of
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight, pack
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.quantized import quantize
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_backend.weight_format import Encoding

NUM_LAYERS: Final = 4
HIDDEN: Final = 5120
INNER: Final = 17408
NUM_HEADS: Final = 40
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 128
PAGE_SIZE: Final = 16
SHAPES: Final = {
    "qkv": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "gate, up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
FORMS: Final = {
    "fp8": (Encoding.E4M3, (128, 128), True),
    "int4": (Encoding.INT4, (1, 128), False),
}
SHARED_BYTES: Final = 227 * 1024
MOST_STAGES: Final = 8
MOST_BLOCKS: Final = 132

Kernels = Mapping[str, Any]
Layer = Mapping[str, PackedWeight]


@dataclass(frozen=True)
class Inputs:
    """What all layers read and write besides weights."""

    x: Tensor
    residual: Tensor
    squares: Tensor
    norm: Tensor
    places: TokenPlaces
    pages: Tensor

    @classmethod
    def of(cls, num_tokens: int, device: torch.device) -> Inputs:
        x = torch.randn(num_tokens, HIDDEN, device=device).bfloat16()
        angles = torch.rand(512, HEAD_DIM // 2, device=device) * 6
        tokens = torch.arange(num_tokens, device=device, dtype=torch.int32)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        return cls(
            x,
            x.clone(),
            x.float().square().sum(1)[None].contiguous(),
            torch.ones(HIDDEN, device=device, dtype=torch.bfloat16),
            TokenPlaces(tokens, tokens * PAGE_SIZE, cos_sin),
            torch.zeros(
                (num_tokens, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM),
                device=device,
                dtype=torch.bfloat16,
            ),
        )


def made(name: str, cut: Cut, kind: CodesKind, device: torch.device) -> Any:
    cuts, shape = {256: cut}, SHAPES[name]
    if name == "qkv":
        return HeadsKernel(
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            HIDDEN,
            device,
            page_size=PAGE_SIZE,
            fp8=False,
            cuts=cuts,
            codes=kind,
        )
    if name == "gate, up":
        return LinearKernel(shape, device, gate="silu", cuts=cuts, codes=kind)
    return ResidualKernel(shape, device, cuts=cuts, codes=kind)


def run(layers: Sequence[Layer], kernels: Kernels, inputs: Inputs) -> Tensor:
    """Run all layers; returns the residual stream after them."""
    fixed: dict[str, Any] = {"eps": 1e-6, "pdl": True}
    x, squares = inputs.x, inputs.squares
    residual = inputs.residual.clone()
    for layer in layers:
        queries = kernels["qkv"](
            x,
            layer["qkv"],
            inputs.places,
            PagedKV(keys=inputs.pages[:, 0], values=inputs.pages[:, 1]),
            squares=squares,
            **fixed,
        )
        x, squares = kernels["o"](queries.flatten(1), layer["o"], residual, inputs.norm, pdl=True)
        x = kernels["gate, up"](x, layer["gate, up"], squares=squares, **fixed)
        x, squares = kernels["down"](x, layer["down"], residual, inputs.norm, pdl=True)
    return residual


def results(layer: Layer, kernels: Kernels, inputs: Inputs) -> Tensor:
    """Everything that a layer writes, float32 [num_tokens, ...]."""
    inputs.pages.zero_()
    residual = run([layer], kernels, inputs)
    return torch.cat([residual, inputs.pages[:, :, 0].flatten(1)], dim=1).float()


def seconds(call: Callable[[], object], times: int) -> float:
    """The seconds of a call, in a captured graph of ``times`` calls."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    found: list[float] = []
    for _ in range(5):
        event: Any = partial(torch.cuda.Event, enable_timing=True)
        first, last = event(), event()
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / times)
    return statistics.median(found)


def with_stages(cut: Cut, in_features: int) -> Cut | None:
    """The cut with as many stages as there is room for; None if they are too few."""
    most = min(MOST_STAGES, in_features // cut.splits // cut.numbers.block)
    fitting = [
        filled
        for stages in range(2, most + 1)
        if stages * cut.numbers.block // CODES_BLOCK % cut.ways == 0
        and (filled := replace(cut, stages=stages)).shared_bytes <= SHARED_BYTES
        and (cut.even or filled.finished_bytes <= stages * cut.stage_bytes)
    ]
    return fitting[-1] if fitting else None


def cuts_for(name: str, batch: int, kind: CodesKind) -> Iterator[Cut]:
    height, width = SHAPES[name]
    numbers = kind.numbers(width)
    for features in (HEAD_DIM,) if name == "qkv" else (64, 128):
        splits = [
            splits
            for splits in (1, 2, 4, 8)
            if splits * height // features <= MOST_BLOCKS and width % (splits * numbers.block) == 0
        ]
        tiles = itertools.product(
            (64, 96, 128) if batch > 96 else (batch,), (1, 2) if batch <= FEW_TOKENS else (1,)
        )
        for tokens, ways in tiles:
            tile = Cut(features, tokens, 1, numbers=numbers, ways=ways)
            several = splits[-1:] if batch <= 96 else sorted({1, *splits[-1:]})
            cuts = [replace(tile, even=True), *(replace(tile, splits=of) for of in several)]
            yield from filter(None, (with_stages(cut, width) for cut in cuts))


def described(cut: Cut) -> str:
    how = "even" if cut.even else f"{cut.splits} splits"
    return f"{cut.features:3} x {cut.tokens:3}, {cut.ways} ways, {cut.stages} stages, {how}"


def layers_of(form: str, device: torch.device) -> Sequence[Layer]:
    """The weights of several layers, which are all equal."""
    encoding, block, symmetric = FORMS[form]
    first: dict[str, PackedWeight] = {}
    for name, (height, width) in SHAPES.items():
        plain = torch.randn(height, width, device=device, dtype=torch.bfloat16).mul_(width**-0.5)
        weight = quantize(plain, encoding, block, symmetric=symmetric)
        packed = pack(weight, gated=name == "gate, up")
        assert packed is not None
        first[name] = packed
    return [first] + [
        {name: _copy(packed) for name, packed in first.items()} for _ in range(NUM_LAYERS - 1)
    ]


def sweep(form: str, sizes: Sequence[int], device: torch.device) -> None:
    layers = layers_of(form, device)
    kinds = {name: packed.kind for name, packed in layers[0].items()}
    for size in sizes:
        sweep_size(form, size, layers, kinds, device)


def _copy(packed: PackedWeight) -> PackedWeight:
    weight = replace(packed.weight, codes=packed.weight.codes.clone())
    scales = None if packed.scales is None else packed.scales.clone()
    return replace(packed, weight=weight, scales=scales)


def sweep_size(
    form: str,
    size: int,
    layers: Sequence[Layer],
    kinds: Mapping[str, CodesKind],
    device: torch.device,
) -> None:
    batch = next(batch for batch in BATCHES if size <= batch)
    inputs = Inputs.of(size, device)
    usual = {
        name: cut_of(
            batch,
            *shape,
            head_dim=HEAD_DIM if name == "qkv" else None,
            numbers=kinds[name].numbers(shape[1]),
        )
        for name, shape in SHAPES.items()
    }
    wanted = list(usual.items())
    for name in usual:
        wanted += [(name, other) for other in cuts_for(name, batch, kinds[name])]
    wanted = list(dict.fromkeys(wanted))

    def compiled(what: tuple[str, Cut]) -> Any:
        name, cut = what
        return made(name, cut, kinds[name], device)

    with ThreadPoolExecutor(16) as pool:
        kernels = dict(zip(wanted, pool.map(compiled, wanted), strict=True))
    base = {name: kernels[name, cut] for name, cut in usual.items()}
    expected = results(layers[0], base, inputs)

    def timed(tried: Kernels) -> tuple[float, float]:
        found = results(layers[0], tried, inputs)
        error = float((found - expected).norm() / expected.norm())
        return error, seconds(partial(run, layers, tried, inputs), 3) * 1e6 / len(layers)

    _, before = timed(base)
    print(f"{form} {size:3} {before:7.1f} us a layer", flush=True)
    best = {name: (before, cut) for name, cut in usual.items()}
    for (name, cut), kernel in kernels.items():
        error, after = timed({**base, name: kernel})
        best[name] = min(best[name], (after, cut), key=lambda of: of[0])
        mark = " usual" if usual[name] == cut else ""
        text = f"{form} {size:3} {name:8} {described(cut)}"
        print(f"{text:62} {after:7.1f} {after - before:+6.1f} {error:.0e}{mark}", flush=True)
    error, after = timed({name: kernels[name, cut] for name, (_, cut) in best.items()})
    text = f"{form} {size:3} the best of each"
    print(f"{text:62} {after:7.1f} {after - before:+6.1f} {error:.0e}", flush=True)


def main() -> None:
    forms, sizes = sys.argv[1:]
    for form in forms.split(","):
        sweep(form, [int(size) for size in sizes.split(",")], torch.device("cuda"))


if __name__ == "__main__":
    main()
