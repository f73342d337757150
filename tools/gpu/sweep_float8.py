"""``python3 -m tools.gpu.sweep_float8 SIZES``: GEMMs in float8 of some hundred tokens, by cut.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. SIZES are
numbers of tokens, such as 65,128. The shape is that of Qwen3-14B, in blocks of 128 x 128. Each GEMM
runs in a captured graph over several weights, so that none is in the L2 cache; rounding of tokens,
and the activation after the gate, are counted. The table has microseconds a GEMM: of the library,
of rounding alone, and of ``cuda/float8_linear.cu`` with all cuts that fit, the GEMM alone in
parentheses; and how far the results are from the library's, relative to their size.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.kernels.cuda.float8_linear import Float8Kernel, Workspace
from minisgl_backend.kernels.float8_cut import Float8Cut, why_not
from minisgl_backend.kernels.packed_weight import PackedWeight, pack
from minisgl_backend.kernels.quantized import quantize
from minisgl_backend.kernels.quantized_linear import Float8Weight, float8_linear, float8_rows
from minisgl_backend.weight_format import Encoding

SHAPES: Final = {
    "qkv": (7168, 5120),
    "o": (5120, 5120),
    "gate, up": (34816, 5120),
    "down": (5120, 17408),
}
CYCLED_BYTES: Final = 300 * 2**20
"""Of the weights of a graph, several times the L2 cache."""


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of a call, in a captured graph of all of them, twice."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls, *calls]:
            call()
    graph.replay()
    found: list[float] = []
    for _ in range(7):
        event: Any = partial(torch.cuda.Event, enable_timing=True)
        first, last = event(), event()
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / len(calls) / 2)
    return statistics.median(found)


def cuts_for(tokens: int, height: int, width: int) -> Iterator[Float8Cut]:
    width_of_tile = 96 if tokens < 96 or tokens % 96 == 0 else 128
    for features in (256, 128):
        for shared in (1, 0, 2):
            for streamed in (False, True):
                cut = Float8Cut(features, width_of_tile, shared, streamed)
                alone = shared == 2 and tokens <= width_of_tile
                if not alone and why_not(height, width, cut) is None:
                    yield cut


def copies_of(packed: PackedWeight) -> list[PackedWeight]:
    codes, scales = packed.weight.codes, packed.scales
    found = [packed]
    while len(found) * codes.numel() < CYCLED_BYTES:
        weight = replace(packed.weight, codes=codes.clone())
        found.append(replace(packed, weight=weight, scales=scales.clone()))
    return found


def sweep(name: str, sizes: Sequence[int], device: torch.device) -> None:
    height, width = SHAPES[name]
    gated = name == "gate, up"
    plain = torch.randn(height, width, device=device, dtype=torch.bfloat16).mul_(width**-0.5)
    packed = pack(quantize(plain, Encoding.E4M3, (128, 128), symmetric=True), gated=gated)
    assert packed is not None
    layers = copies_of(packed)
    of_library = [Float8Weight.of(layer) for layer in layers]
    cuts = dict.fromkeys(cut for size in sizes for cut in cuts_for(size, height, width))

    workspace = Workspace(device)

    def compiled(cut: Float8Cut) -> Float8Kernel:
        return Float8Kernel((height, width), workspace, codes=packed.kind, gated=gated, cut=cut)

    with ThreadPoolExecutor(16) as pool:
        kernels = dict(zip(cuts, pool.map(compiled, cuts), strict=True))

    for size in sizes:
        x = torch.randn(size, width, device=device).bfloat16()
        rows, factors = float8_rows(x, width)

        def library(weight: Float8Weight | None, x: Tensor = x) -> Tensor:
            assert weight is not None
            y = float8_linear(x, weight, pdl=True)
            return silu_mul(y, pdl=True) if gated else y

        expected = library(of_library[0]).float()
        before = seconds([partial(library, weight) for weight in of_library]) * 1e6
        rounding = seconds([partial(float8_rows, x, width, pdl=True)] * 8) * 1e6
        told = f"{name:8} {size:3}  library {before:6.1f}  rounding {rounding:4.1f}"
        print(told, flush=True)
        for cut in cuts_for(size, height, width):
            kernel = kernels[cut]

            def rounding_too(
                weight: PackedWeight, x: Tensor = x, kernel: Float8Kernel = kernel
            ) -> Tensor:
                return kernel(*float8_rows(x, width, pdl=True), weight, pdl=True)

            found = kernel(rows, factors, packed).float()
            error = float((found - expected).norm() / expected.norm())
            whole = seconds([partial(rounding_too, layer) for layer in layers]) * 1e6
            alone = seconds([partial(kernel, rows, factors, layer, pdl=True) for layer in layers])
            how = f"{cut.features:3} x {cut.tokens:3} shared {cut.shared} streamed {cut.streamed:d}"
            print(f"    {how}  {whole:6.1f} ({alone * 1e6:6.1f}) {error:.0e}", flush=True)


def main() -> None:
    sizes = [int(size) for size in sys.argv[1].split(",")]
    for name in SHAPES:
        sweep(name, sizes, torch.device("cuda"))


if __name__ == "__main__":
    main()
