"""GEMMs on Hopper's tensor cores that add LoRA adapters, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.adapters import Adaptation, AdapterMemory
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.linear_cut import Cut
from minisgl_backend.kernels.packed_weight import PackedWeight
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces, qk_norm_rope_store_reference
from minisgl_backend.request import IntArray
from tests.gpu.adaptations import (
    MAX_RANK,
    RANKS,
    adapted_tokens,
    adapter_memory,
    mixes,
    with_adapters,
)
from tests.gpu.compare import assert_close

pytestmark = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")

EPS = 1e-6
NUM_SLOTS = len(RANKS) - 1
BATCHES = [1, 3, 8, 17, 64, 100, 256]
SIXTEEN = np.array([0] + [16] * 16, np.int32)
PAGE_SIZE = 16
CUTS = [
    Cut(128, 128, 3, splits=2),
    Cut(64, 96, 4, splits=4),
    Cut(64, 8, 6, splits=8),
    Cut(64, 8, 8, even=True),
    Cut(128, 192, 4, even=True),
]


def normal(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).bfloat16()


def squares_of(x: Tensor) -> Tensor:
    return x.float().square().view(len(x), 16, -1).sum(2).t().contiguous()


def scale_of(x: Tensor) -> Tensor:
    return (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()


def product(
    x: Tensor, weight: Tensor, adaptation: Adaptation, bias: Tensor | None = None
) -> Tensor:
    """x W^T + bias + what the adapters add, in float64."""
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return with_adapters(y, x, adaptation)


def adaptations(
    memory: AdapterMemory, batch: int, ranks: IntArray, device: torch.device
) -> list[Adaptation]:
    """One for each mix of tokens."""
    found = mixes(batch, len(ranks) - 1)
    return [Adaptation(memory, adapted_tokens(slots, ranks, device)) for slots in found]


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("batch", [1, 40, 256])
def test_inner_products(device: torch.device, batch: int, takes_turns: bool) -> None:
    """They are 0 beyond a token's rank."""
    from minisgl_backend.kernels.cuda.adapters import shrink_kernel

    turns = torch.zeros(2, dtype=torch.int32, device=device) if takes_turns else None
    launches = 0
    for size in (128, 1024, 1280, 9216):
        x = normal(batch, size, device=device)
        memory = adapter_memory((256, 256), size, RANKS, device, x.dtype)
        for slots in mixes(batch):
            tokens = adapted_tokens(slots, RANKS, device)
            inner = shrink_kernel(device)(x, Adaptation(memory, tokens), turns=turns, pdl=True)
            launches += 1
            for slot in range(1, len(RANKS)):
                rank, rows = int(RANKS[slot]), np.flatnonzero(slots == slot)
                if len(rows):
                    a = memory.a[slot - 1].view(2, MAX_RANK, size).double().clone()
                    a[:, rank:] = 0
                    expected = F.linear(x[rows].double(), a.flatten(0, 1))
                    assert_close(inner[rows], expected.bfloat16())
    if turns is not None:
        assert turns.tolist() == [launches, launches]


@pytest.mark.parametrize("ranks", [RANKS, SIXTEEN], ids=["several", "sixteen"])
@pytest.mark.parametrize("batch", BATCHES)
def test_merged_projections(device: torch.device, batch: int, ranks: IntArray) -> None:
    """Tiles have features of two projections. Several GEMMs run in a row, so that each starts while
    another runs."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    torch.manual_seed(batch)
    x, bias = normal(batch, 1024, device=device), normal(4096, device=device)
    weight = normal(4096, 1024, device=device, scale=1 / 32)
    widths = (2064, 1008, 1024)
    memory = adapter_memory(widths, 1024, ranks, device, x.dtype, max_rank=int(ranks.max()))
    kernel = LinearKernel((4096, 1024), device, adapters=memory.shape)
    asked = adaptations(memory, batch, ranks, device)
    found = [kernel(x, weight, bias=bias, adaptation=each, pdl=True) for each in asked]
    for adaptation, y in zip(asked, found, strict=True):
        assert_close(y, product(x, weight, adaptation, bias).bfloat16())
    assert_close(kernel(x, weight, bias=bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("batch", BATCHES)
def test_gated_projections_of_rows_to_be_normalized(device: torch.device, batch: int) -> None:
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    x, norm = normal(batch, 1024, device=device, scale=3.0), normal(1024, device=device)
    weight = normal(6144, 1024, device=device, scale=1 / 32)
    memory = adapter_memory((3072, 3072), 1024, RANKS, device, x.dtype)
    kernel = LinearKernel((6144, 1024), device, gate="silu", adapters=memory.shape)
    scaled, squares = (x.float() * norm).bfloat16(), squares_of(x)
    for adaptation in adaptations(memory, batch, RANKS, device):
        y = kernel(scaled, weight, squares=squares, eps=EPS, adaptation=adaptation, pdl=True)
        gate, up = (product(scaled, weight, adaptation) * scale_of(x)).chunk(2, dim=1)
        assert_close(y, (F.silu(gate) * up).bfloat16())


@pytest.mark.parametrize("size", [3072, 5120])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_residual_stream(device: torch.device, batch: int, size: int) -> None:
    """With 5,120 in_features, a warp of the preceding kernel multiplies several pieces of them."""
    check_residual(device, batch, size, None)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("batch", [40, 256])
def test_ways_to_cut_a_gemm(device: torch.device, cut: Cut, batch: int) -> None:
    check_residual(device, batch, 2048, {batch: cut})


def check_residual(
    device: torch.device, batch: int, size: int, cuts: dict[int, Cut] | None
) -> None:
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    x, norm = normal(batch, size, device=device), normal(1024, device=device)
    weight = normal(1024, size, device=device, scale=size**-0.5)
    first = normal(batch, 1024, device=device)
    memory = adapter_memory((1024,), size, RANKS, device, x.dtype)
    kernel = ResidualKernel((1024, size), device, cuts=cuts, adapters=memory.shape)
    for adaptation in adaptations(memory, batch, RANKS, device):
        residual = first.clone()
        scaled, squares = kernel(x, weight, residual, norm, adaptation=adaptation, pdl=True)
        assert_close(residual, (first.double() + product(x, weight, adaptation)).bfloat16())
        assert_close(scaled, (residual.float() * norm).bfloat16())
        torch.testing.assert_close(squares.sum(0), residual.float().square().sum(1))


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.even], ids=str)
@pytest.mark.parametrize("batch", [5, 256])
def test_gated_gemms_in_equal_parts(device: torch.device, cut: Cut, batch: int) -> None:
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    x = normal(batch, 1024, device=device)
    weight = normal(17408, 1024, device=device, scale=1 / 32)
    memory = adapter_memory((8704, 8704), 1024, RANKS, device, x.dtype)
    kernel = LinearKernel(
        (17408, 1024), device, gate="silu", cuts={batch: cut}, adapters=memory.shape
    )
    asked = adaptations(memory, batch, RANKS, device)
    found = [kernel(x, weight, adaptation=each, pdl=True) for each in asked]
    for adaptation, y in zip(asked, found, strict=True):
        gate, up = product(x, weight, adaptation).chunk(2, dim=1)
        assert_close(y, (F.silu(gate) * up).bfloat16())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "fp8"), [(16, 8, 128, False), (8, 4, 64, True)]
)
def test_heads(
    device: torch.device, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, fp8: bool
) -> None:
    check_adapted_heads(device, batch, num_heads, num_kv_heads, head_dim, fp8)


def check_adapted_heads(
    device: torch.device,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    fp8: bool,
    given: tuple[PackedWeight, Tensor] | None = None,
) -> None:
    """``given``: a weight and its numbers, [height, 1024]."""
    from minisgl_backend.kernels.cuda.linear import HeadsKernel

    torch.manual_seed(batch)
    widths = tuple(heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads))
    x, norm = normal(batch, 1024, device=device), normal(1024, device=device)
    numbers = normal(sum(widths), 1024, device=device, scale=1 / 32)
    weight: Tensor | PackedWeight = numbers
    if given is not None:
        weight, numbers = given
    positions = torch.randint(0, 500, (batch,), device=device, dtype=torch.int32)
    slots = torch.randperm(40 * PAGE_SIZE, device=device)[:batch].int()
    angles = torch.rand(500, head_dim // 2, device=device) * 6
    places = TokenPlaces(positions, slots, torch.cat([angles.cos(), angles.sin()], dim=1))
    q_weight, k_weight = normal(2, head_dim, device=device)
    scales = torch.tensor([[0.5], [0.25]], device=device) if fp8 else (None, None)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    memory = adapter_memory(widths, 1024, RANKS, device, x.dtype)
    kernel = HeadsKernel(
        num_heads,
        num_kv_heads,
        head_dim,
        1024,
        device,
        page_size=PAGE_SIZE,
        fp8=fp8,
        codes=weight.kind if isinstance(weight, PackedWeight) else None,
        adapters=memory.shape,
    )
    scaled = (x.float() * norm).bfloat16()
    for adaptation in adaptations(memory, batch, RANKS, device):
        pages = torch.zeros((40, 2, PAGE_SIZE, num_kv_heads, head_dim), device=device).to(dtype)
        expected_pages = pages.clone()
        kv = PagedKV(keys=pages[:, 0], values=pages[:, 1], k_scale=scales[0], v_scale=scales[1])
        found = kernel(
            scaled,
            weight,
            places,
            kv,
            squares=squares_of(x),
            eps=EPS,
            q_weight=q_weight,
            k_weight=k_weight,
            adaptation=adaptation,
            pdl=True,
        )
        expected = qk_norm_rope_store_reference(
            (product(scaled, numbers, adaptation) * scale_of(x)).float(),
            places,
            replace(kv, keys=expected_pages[:, 0], values=expected_pages[:, 1]),
            num_heads=num_heads,
            head_weights=torch.stack([q_weight] * num_heads + [k_weight] * num_kv_heads),
            eps=EPS,
        )
        assert_close(found, expected.bfloat16())
        tolerance = 0.05 if fp8 else 8e-3
        assert_close(pages.float(), expected_pages.float(), tolerance=tolerance)


@pytest.mark.parametrize("batch", [1, 24, 64, 200, 256])
def test_layers_in_a_graph(device: torch.device, batch: int) -> None:
    """Several layers, captured once and replayed with one mix of tokens after another."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel, ResidualKernel

    hidden, inner, num_layers = 1024, 3072, 3
    up = LinearKernel((2 * inner, hidden), device, gate="silu", adapters=(NUM_SLOTS, 2 * MAX_RANK))
    down = ResidualKernel((hidden, inner), device, adapters=(NUM_SLOTS, MAX_RANK))
    up_weight = normal(2 * inner, hidden, device=device, scale=hidden**-0.5)
    down_weight = normal(hidden, inner, device=device, scale=inner**-0.5)
    norm, first = normal(hidden, device=device), normal(batch, hidden, device=device)
    tokens = adapted_tokens(mixes(batch)[0] * 0, RANKS, device)
    of_up, of_down = (
        Adaptation(adapter_memory(widths, size, RANKS, device, norm.dtype), tokens)
        for widths, size in (((inner, inner), hidden), ((hidden,), inner))
    )
    residual = torch.empty_like(first)

    def layers(pdl: bool) -> None:
        residual.copy_(first)
        x, squares = first, None
        for _ in range(num_layers):
            y = up(x, up_weight, squares=squares, eps=EPS, adaptation=of_up, pdl=pdl)
            x, squares = down(y, down_weight, residual, norm, adaptation=of_down, pdl=pdl)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers(pdl=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            layers(pdl=True)
        for slots in mixes(batch):
            tokens.buffer.copy_(adapted_tokens(slots, RANKS, device).buffer)
            for _ in range(20):
                graph.replay()
            found = residual.clone()
            layers(pdl=False)
            stream.synchronize()
            assert torch.equal(found, residual)
            x = expected = first.double()
            for _ in range(num_layers):
                gate, value = product(x, up_weight, of_up).chunk(2, dim=1)
                expected = expected + product(F.silu(gate) * value, down_weight, of_down)
                x = expected * scale_of(expected) * norm.double()
            assert_close(found, expected.bfloat16(), tolerance=0.02)
