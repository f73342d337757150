"""GEMMs on Hopper's tensor cores against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.linear_cut import Cut
from minisgl_backend.kernels.packed_weight import PackedWeight
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces, qk_norm_rope_store_reference
from tests.gpu.compare import assert_close

pytestmark = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")

EPS = 1e-6
BATCHES = [1, 8, 9, 17, 33, 64, 65, 128, 129, 136, 192, 200, 256]


def normal(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).bfloat16()


def half_way(x: Tensor, norm: Tensor) -> dict[str, Any]:
    """The input of a kernel that computes the second half of the norm of ``x``."""
    squares = x.float().square().view(len(x), 16, -1).sum(2).t().contiguous()
    return {"x": (x.float() * norm).bfloat16(), "squares": squares, "eps": EPS}


def normalized(x: Tensor, norm: Tensor) -> Tensor:
    return x.float() * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.float()


CUTS = [
    Cut(64, 64, 4),
    Cut(64, 128, 8),
    Cut(128, 128, 3),
    Cut(128, 64, 6),
    Cut(64, 96, 4, splits=4),
    Cut(64, 64, 4, splits=4),
    Cut(128, 128, 3, splits=2),
    Cut(64, 64, 3, splits=8),
    Cut(64, 16, 4, splits=4),
    Cut(64, 8, 6, splits=8),
    Cut(128, 8, 5, splits=4),
    Cut(128, 128, 6, splits=4),  # no memory is left for pushed sums
]
EVEN_CUTS = [
    Cut(64, 8, 8, even=True),
    Cut(128, 32, 6, even=True),
    Cut(64, 64, 5, even=True),
    Cut(128, 64, 4, even=True),
    Cut(128, 96, 5, even=True),
    Cut(128, 128, 3, even=True),
    Cut(128, 192, 4, even=True),
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("pdl", [False, True])
def test_gemms(device: torch.device, batch: int, pdl: bool) -> None:
    """Several run in a row, so that each starts while another runs."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    torch.manual_seed(batch)
    x, bias = normal(batch, 1024, device=device), normal(4096, device=device)
    weights = [normal(4096, 1024, device=device, scale=1 / 32) for _ in range(4)]
    kernel = LinearKernel((4096, 1024), device)
    actual = [kernel(x, weight, bias=bias, pdl=pdl) for weight in weights]
    for of_kernel, weight in zip(actual, weights, strict=True):
        assert_close(of_kernel, F.linear(x.float(), weight.float(), bias.float()).bfloat16())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gated_gemms_of_rows_to_be_normalized(device: torch.device, batch: int, gate: Gate) -> None:
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    x, norm = normal(batch, 1024, device=device, scale=3.0), normal(1024, device=device)
    weight = normal(6144, 1024, device=device, scale=1 / 32)
    actual = LinearKernel((6144, 1024), device, gate=gate)(**half_way(x, norm), weight=weight)
    expected = open_gates_reference(F.linear(normalized(x, norm), weight.float()), gate)
    assert_close(actual, expected.bfloat16())


@pytest.mark.parametrize("batch", BATCHES)
def test_gemms_added_to_the_residual_stream(device: torch.device, batch: int) -> None:
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    x, norm = normal(batch, 3072, device=device), normal(1024, device=device)
    weight = normal(1024, 3072, device=device, scale=3072**-0.5)
    residual = normal(batch, 1024, device=device)
    expected = (residual.float() + F.linear(x.float(), weight.float())).bfloat16()
    check_residual(ResidualKernel((1024, 3072), device), x, weight, residual, norm, expected)


@pytest.mark.parametrize("cut", CUTS + EVEN_CUTS, ids=str)
@pytest.mark.parametrize("batch", [40, 100, 192, 256])
def test_ways_to_cut_a_gemm(device: torch.device, cut: Cut, batch: int) -> None:
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    x, norm = normal(batch, 2048, device=device), normal(1024, device=device)
    weight = normal(1024, 2048, device=device, scale=2048**-0.5)
    residual = normal(batch, 1024, device=device)
    expected = (residual.float() + F.linear(x.float(), weight.float())).bfloat16()
    kernel = ResidualKernel((1024, 2048), device, cuts={batch: cut})
    check_residual(kernel, x, weight, residual, norm, expected)


@pytest.mark.parametrize(("height", "in_features"), [(7168, 5120), (34816, 5120), (5120, 17408)])
def test_gemms_of_large_weights(device: torch.device, height: int, in_features: int) -> None:
    """The weights of Qwen3-14B, cut as they are there."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    kernel = LinearKernel((height, in_features), device)
    weight = normal(height, in_features, device=device, scale=in_features**-0.5)
    for batch in BATCHES:
        x = normal(batch, in_features, device=device)
        assert_close(kernel(x, weight), F.linear(x.float(), weight.float()).bfloat16())


@pytest.mark.parametrize("cut", EVEN_CUTS, ids=str)
@pytest.mark.parametrize("batch", [5, 256])
def test_gated_gemms_in_equal_parts(device: torch.device, cut: Cut, batch: int) -> None:
    """Several are in flight at once, each with parts of tiles for other thread blocks."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    x, bias = normal(batch, 1024, device=device), normal(17408, device=device)
    weights = [normal(17408, 1024, device=device, scale=1 / 32) for _ in range(4)]
    kernel = LinearKernel((17408, 1024), device, gate="silu", cuts={batch: cut})
    actual = [kernel(x, weight, bias=bias, pdl=True) for weight in weights]
    for of_kernel, weight in zip(actual, weights, strict=True):
        gate, up = F.linear(x.float(), weight.float(), bias.float()).chunk(2, dim=1)
        assert_close(of_kernel, (F.silu(gate) * up).bfloat16())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("height", "in_features"), [(32, 2880), (2880, 4096), (528, 192)])
def test_weights_whose_rows_no_tile_divides(
    device: torch.device, batch: int, height: int, in_features: int
) -> None:
    """With a bias; NaN lies after weight, bias, norm and the results, and stays there."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel, ResidualKernel

    def with_more(tensor: Tensor) -> Tensor:
        more = torch.full((300 * tensor[..., :1].numel(),), torch.nan, device=device).bfloat16()
        memory.append(torch.cat([tensor.flatten(), more]))
        return memory[-1][: tensor.numel()].view(tensor.shape)

    memory: list[Tensor] = []
    x, norm = normal(batch, in_features, device=device), with_more(normal(height, device=device))
    weight = with_more(normal(height, in_features, device=device, scale=in_features**-0.5))
    bias = with_more(normal(height, device=device))
    out, residual = (with_more(normal(batch, height, device=device)) for _ in range(2))
    y = F.linear(x.float(), weight.float(), bias.float())
    expected = (residual.float() + y).bfloat16()
    LinearKernel((height, in_features), device)(x, weight, bias=bias, out=out)
    assert_close(out, y.bfloat16())
    for cut in (None, *(cut for cut in EVEN_CUTS if height > 1000)):
        stream = with_more(residual)
        kernel = ResidualKernel(
            (height, in_features), device, cuts=None if cut is None else {batch: cut}
        )
        check_residual(kernel, x, weight, stream, norm, expected, bias=bias)
    for held in memory:
        assert held[-300:].isnan().all()


def check_residual(
    kernel: Any,
    x: Tensor,
    weight: Tensor | PackedWeight,
    residual: Tensor,
    norm: Tensor,
    expected: Tensor,
    *,
    bias: Tensor | None = None,
) -> None:
    scaled, squares = kernel(x, weight, residual, norm, bias=bias)
    assert_close(residual, expected)
    assert_close(scaled, (residual.float() * norm).bfloat16())
    torch.testing.assert_close(squares.sum(0), residual.float().square().sum(1))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (8, 4, 64), (14, 1, 128)]
)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_heads(
    device: torch.device,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    fp8: bool,
    norms: bool,
) -> None:
    check_heads(device, batch, num_heads, num_kv_heads, head_dim, fp8, norms)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("fp8", [False, True])
def test_heads_that_are_split(device: torch.device, batch: int, fp8: bool) -> None:
    """Like those of Qwen3-30B-A3B, two thread blocks per multiprocessor."""
    check_heads(device, batch, 32, 4, 128, fp8, True, {batch: Cut(128, 8, 4, splits=4)})


@pytest.mark.parametrize("cut", EVEN_CUTS, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_heads_in_equal_parts(device: torch.device, cut: Cut, fp8: bool) -> None:
    for batch in (3, 200):
        check_heads(device, batch, 16, 4, cut.features, fp8, True, {batch: cut})


def check_heads(
    device: torch.device,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    fp8: bool,
    norms: bool,
    cuts: dict[int, Cut] | None = None,
    given: tuple[Tensor | PackedWeight, Tensor] | None = None,
) -> None:
    """``given``: a weight and its numbers, float32 [height, 1024]."""
    from minisgl_backend.kernels.cuda.linear import HeadsKernel

    torch.manual_seed(batch)
    height = (num_heads + 2 * num_kv_heads) * head_dim
    x, norm = normal(batch, 1024, device=device), normal(1024, device=device)
    numbers = normal(height, 1024, device=device, scale=1 / 32)
    weight: Tensor | PackedWeight = numbers
    if given is not None:
        weight, numbers = given
    codes = weight.kind if isinstance(weight, PackedWeight) else None
    positions = torch.randint(0, 500, (batch,), device=device, dtype=torch.int32)
    slots = torch.randperm(40 * 16, device=device)[:batch].int()
    slots[1::7] = -1
    angles = torch.rand(500, head_dim // 2, device=device) * 6
    places = TokenPlaces(positions, slots, torch.cat([angles.cos(), angles.sin()], dim=1))
    q_weight, k_weight = normal(2, head_dim, device=device)
    head_weights = torch.stack([q_weight] * num_heads + [k_weight] * num_kv_heads)
    scales = torch.tensor([[0.5], [0.25]], device=device) if fp8 else (None, None)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    pages = torch.zeros((40, 2, 16, num_kv_heads, head_dim), device=device).to(dtype)
    expected_pages = pages.clone()
    kernel = HeadsKernel(
        num_heads,
        num_kv_heads,
        head_dim,
        1024,
        device,
        page_size=16,
        fp8=fp8,
        cuts=cuts,
        codes=codes,
    )
    kv = PagedKV(keys=pages[:, 0], values=pages[:, 1], k_scale=scales[0], v_scale=scales[1])
    actual = kernel(
        weight=weight,
        places=places,
        kv=kv,
        q_weight=q_weight if norms else None,
        k_weight=k_weight if norms else None,
        **half_way(x, norm),
    )
    qkv = F.linear(normalized(x, norm), numbers.float())
    expected = qk_norm_rope_store_reference(
        qkv,
        places,
        replace(kv, keys=expected_pages[:, 0], values=expected_pages[:, 1]),
        num_heads=num_heads,
        head_weights=head_weights if norms else None,
        eps=EPS,
    )
    assert_close(actual, expected.bfloat16())
    assert_close(pages.float(), expected_pages.float(), tolerance=0.05 if fp8 else 8e-3)
