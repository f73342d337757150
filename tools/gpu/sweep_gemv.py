"""``python3 -m tools.gpu.sweep_gemv FORMS``: one row by the weights of a layer, by how it is cut.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. FORMS, the
layers and how they are timed are those of ``tools.gpu.sweep_linear``. First come the GEMMs on
tensor cores with a ring (``cuda/linear.cu``), then in their place the GEMVs of ``cuda/gemv.cu``,
one after the other with each cut, and the best of each together. The table has microseconds per
layer, the difference from the first line, and how far the results are from its results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import torch

from minisgl_backend.kernels.cuda.gemv import Gemv
from minisgl_backend.kernels.gemv_cut import GemvCut, usual_cut
from minisgl_backend.kernels.linear_cut import cut_of
from minisgl_backend.kernels.packed_weight import CodesKind
from tools.gpu.sweep_linear import (
    HEAD_DIM,
    PAGE_SIZE,
    SHAPES,
    Inputs,
    Layer,
    layers_of,
    made,
    results,
    run,
    seconds,
)

RESULTS: Final = {"GATED": 0, "RESIDUAL": 0, "HEADS": 0, "FP8": 0, "PAGE_SIZE": PAGE_SIZE}
OF_SHAPES: Final = {
    "qkv": {"HEADS": HEAD_DIM},
    "o": {"RESIDUAL": 1},
    "gate, up": {"GATED": 1},
    "down": {"RESIDUAL": 1},
}
WARPS: Final = (4, 5, 6, 8, 9, 10, 12, 17)
WARPS_OF_PROCESSOR: Final = (12, 15, 16, 18, 20, 24, 28)
"""Fewer warps have more registers each."""


def kernel_of(name: str, kind: CodesKind, cut: GemvCut | None, device: torch.device) -> Any:
    """The kernel of a GEMM: with a ring if ``cut`` is None."""
    shape = SHAPES[name]
    head_dim = HEAD_DIM if name == "qkv" else None
    of_ring = cut_of(8, *shape, head_dim=head_dim, numbers=kind.numbers(shape[1]))
    kernel = made(name, of_ring, kind, device)
    if cut is not None:
        macros = {**RESULTS, **OF_SHAPES[name]}
        kernel._gemv = Gemv(shape, device, codes=kind, cut=cut, macros=macros)
    return kernel


def usual_of(name: str, kind: CodesKind) -> GemvCut:
    return usual_cut(*SHAPES[name], kind)


def cuts_for(name: str, kind: CodesKind) -> Iterator[GemvCut]:
    in_features = SHAPES[name][1]
    most = usual_of(name, kind).columns
    for columns in (8, 4) if most == 8 else (most,):
        batches = in_features // (columns * (kind.group or 128))
        for warps in WARPS:
            rounds = -(-batches // warps)
            if warps > batches or rounds * warps > 1.25 * batches:
                continue
            fitting = {of // warps for of in WARPS_OF_PROCESSOR if of % warps <= of // 6}
            yield from (GemvCut(columns, warps, of) for of in sorted(fitting) if of)


def sweep(form: str, device: torch.device) -> None:
    layers = layers_of(form, device)
    kinds = {name: packed.kind for name, packed in layers[0].items()}
    wanted: list[tuple[str, GemvCut | None]] = [(name, None) for name in SHAPES]
    wanted += [(name, usual_of(name, kinds[name])) for name in SHAPES]
    wanted += [(name, cut) for name in SHAPES for cut in cuts_for(name, kinds[name])]
    wanted = list(dict.fromkeys(wanted))
    with ThreadPoolExecutor(16) as pool:
        made_of = [pool.submit(kernel_of, name, kinds[name], cut, device) for name, cut in wanted]
        kernels = dict(zip(wanted, (of.result() for of in made_of), strict=True))
    table(form, layers, kernels, device)


def table(
    form: str,
    layers: Sequence[Layer],
    kernels: Mapping[tuple[str, GemvCut | None], Any],
    device: torch.device,
) -> None:
    inputs = Inputs.of(1, device)
    base = {name: kernels[name, None] for name in SHAPES}
    expected = results(layers[0], base, inputs)

    def timed(tried: Mapping[str, Any]) -> tuple[float, float]:
        found = results(layers[0], tried, inputs)
        error = float((found - expected).norm() / expected.norm())
        return error, seconds(partial(run, layers, tried, inputs), 3) * 1e6 / len(layers)

    def show(text: str, tried: Mapping[str, Any], before: float) -> float:
        error, after = timed(tried)
        print(f"{form} {text:44} {after:7.1f} {after - before:+6.1f} {error:.0e}", flush=True)
        return after

    _, before = timed(base)
    show("with a ring", base, before)
    best: dict[str, tuple[float, GemvCut]] = {}
    for (name, cut), kernel in kernels.items():
        if cut is None:
            continue
        text = f"{name:8} {cut.columns} columns, {cut.warps:2} warps, {cut.per_processor} blocks"
        after = show(text, {**base, name: kernel}, before)
        if name not in best or after < best[name][0]:
            best[name] = after, cut
    usual = {name: usual_of(name, packed.kind) for name, packed in layers[0].items()}
    show("the usual of each", {name: kernels[name, cut] for name, cut in usual.items()}, before)
    chosen = {name: cut for name, (_, cut) in best.items()}
    show("the best of each", {name: kernels[name, cut] for name, cut in chosen.items()}, before)


def main() -> None:
    for form in sys.argv[1].split(","):
        sweep(form, torch.device("cuda"))


if __name__ == "__main__":
    main()
