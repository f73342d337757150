"""``python3 -m tools.gpu.sweep_float8 MODEL SIZES``: GEMMs in float8 of some hundreds of tokens, by
cut.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. MODEL is 8b,
14b, 32b or 30b-a3b, for the shapes of that Qwen3, in blocks of 128 x 128; SIZES are numbers of
tokens, such as 65,128. Each GEMM runs in a captured graph over several weights, so that none is in
the L2 cache; rounding of tokens, and the activation after the gate, are included. The table has
microseconds per GEMM: of the library, of rounding alone, and of ``cuda/float8_linear.cu`` with its
fastest cuts (tokens per tile, "s" if shared), and says if results are far from the library's, which
rounds tokens in groups.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates
from minisgl_backend.kernels.cuda.float8_linear import Float8Kernel, Workspace
from minisgl_backend.kernels.float8_cut import Float8Cut
from minisgl_backend.kernels.float8_rows import float8_rows
from minisgl_backend.kernels.packed_weight import PackedWeight, pack
from minisgl_backend.kernels.quantized import quantize
from minisgl_backend.kernels.quantized_linear import Float8Weight, float8_linear
from minisgl_backend.weight_format import Encoding

Shape = tuple[int, int]
SHAPES: Final[dict[str, dict[str, Shape]]] = {
    "8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate, up": (24576, 4096),
        "down": (4096, 12288),
    },
    "14b": {
        "qkv": (7168, 5120),
        "o": (5120, 5120),
        "gate, up": (34816, 5120),
        "down": (5120, 17408),
    },
    "32b": {
        "qkv": (10240, 5120),
        "o": (5120, 8192),
        "gate, up": (51200, 5120),
        "down": (5120, 25600),
    },
    "30b-a3b": {"qkv": (5120, 2048), "o": (2048, 4096)},
}
CUTS: Final = [Float8Cut(tokens, shared) for tokens in (64, 96, 128) for shared in (False, True)]
CYCLED_BYTES: Final = 300 * 2**20
"""The size of a graph's weights, several times the L2 cache."""
MOST_ERROR: Final = 0.06
SHOWN: Final = 4


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """The seconds of a call, in a captured graph that has all of them twice."""
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


def copies_of(packed: PackedWeight) -> list[PackedWeight]:
    codes, found = packed.weight.codes, [packed]
    while len(found) * codes.numel() < CYCLED_BYTES:
        weight = replace(packed.weight, codes=codes.clone())
        scales = None if packed.scales is None else packed.scales.clone()
        found.append(replace(packed, weight=weight, scales=scales))
    return found


def sweep(name: str, shape: Shape, sizes: Sequence[int], device: torch.device) -> None:
    height, width = shape
    gate: Gate | None = "silu" if name == "gate, up" else None
    plain = torch.randn(height, width, device=device, dtype=torch.bfloat16).mul_(width**-0.5)
    packed = pack(
        quantize(plain, Encoding.E4M3, (128, 128), symmetric=True), gated=gate is not None
    )
    assert packed is not None
    layers = copies_of(packed)
    of_library = [Float8Weight.of(layer) for layer in layers]
    workspace = Workspace(device)

    def compiled(cut: Float8Cut) -> Float8Kernel:
        return Float8Kernel((height, width), workspace, codes=packed.kind, gate=gate, cut=cut)

    with ThreadPoolExecutor(16) as pool:
        kernels = dict(zip(CUTS, pool.map(compiled, CUTS), strict=True))

    for size in sizes:
        x = torch.randn(size, width, device=device).bfloat16()
        rows = float8_rows(x, width)

        def library(weight: Float8Weight | None, x: Tensor = x) -> Tensor:
            assert weight is not None
            rows = float8_rows(x, weight.group, pdl=True)
            y = float8_linear(rows, weight, x.dtype)
            return y if gate is None else open_gates(y, gate, pdl=True)

        expected = library(of_library[0]).float()
        before = seconds([partial(library, weight) for weight in of_library]) * 1e6
        rounding = seconds([partial(float8_rows, x, width, pdl=True)] * 8) * 1e6
        found: list[tuple[float, str]] = []
        for cut, kernel in kernels.items():
            if cut.shared and size <= cut.tokens:
                continue

            def rounding_too(
                weight: PackedWeight, x: Tensor = x, kernel: Float8Kernel = kernel
            ) -> Tensor:
                return kernel(float8_rows(x, width, pdl=True), weight, pdl=True)

            y = kernel(rows, packed).float()
            error = float((y - expected).norm() / expected.norm())
            whole = seconds([partial(rounding_too, layer) for layer in layers]) * 1e6
            wrong = f" error {error:.2f}" if error > MOST_ERROR else ""
            told = f"{cut.tokens}{'s' if cut.shared else ''} {whole:.1f}{wrong}"
            found.append((whole, told))
        best = "  ".join(told for _, told in sorted(found)[:SHOWN])
        print(f"{name:8} {size:3} {before:6.1f} {rounding:4.1f}  {best}", flush=True)


def main() -> None:
    model, sizes = sys.argv[1:]
    for name, shape in SHAPES[model].items():
        sweep(name, shape, [int(size) for size in sizes.split(",")], torch.device("cuda"))


if __name__ == "__main__":
    main()
