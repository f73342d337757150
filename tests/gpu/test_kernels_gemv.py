"""One row times quantized weights, against plain torch on the numbers that these stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels import gemv_cut
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.gemv_cut import GemvCut
from tests.gpu.adaptations import RANKS, adapter_memory
from tests.gpu.compare import assert_close
from tests.gpu.test_kernels_adapted_gemms import (
    adaptations,
    check_adapted_heads,
    product,
    scale_of,
)
from tests.gpu.test_kernels_linear import (
    check_heads,
    check_residual,
    half_way,
    normal,
    normalized,
)
from tests.gpu.test_kernels_quantized import FORMATS, made, packed_of

pytestmark = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")

SIZES = [1024, 1152, 2048, 640]
"""In_features: whole batches, parts of one, and several per warp."""


def cut_by(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., GemvCut]) -> None:
    """Let ``choose`` cut the GEMV of every weight by height, in_features and codes, even of weights
    for which other kernels are faster."""
    monkeypatch.setattr(
        "minisgl_backend.kernels.cuda.fused_linear.gemv_cut",
        lambda *weight, is_added: choose(*weight),
    )


@pytest.fixture(autouse=True)
def all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_by(monkeypatch, gemv_cut.usual_cut)


def several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one warp have all batches."""
    monkeypatch.setattr(gemv_cut, "_MOST_WARPS", 1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_one_row(
    device: torch.device, form: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several run in a row, also so that each starts while another runs."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    if size == 2048:
        several_rounds(monkeypatch)
    pairs = [packed_of(made(form, 1280, size, device)) for _ in range(4)]
    kernel = LinearKernel((1280, size), device, codes=pairs[0][0].kind, most_tokens=8)
    x, bias = normal(1, size, device=device), normal(1280, device=device)
    for pdl in (False, True):
        actual = [kernel(x, packed, bias=bias, pdl=pdl) for packed, _ in pairs]
        for of_kernel, (_, numbers) in zip(actual, pairs, strict=True):
            assert_close(of_kernel, F.linear(x.float(), numbers, bias.float()).bfloat16())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_gated_row_to_be_normalized(device: torch.device, form: str, gate: Gate) -> None:
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    packed, numbers = packed_of(made(form, 2560, 1024, device), gated=True)
    kernel = LinearKernel((2560, 1024), device, gate=gate, codes=packed.kind, most_tokens=8)
    x, norm = normal(1, 1024, device=device, scale=3.0), normal(1024, device=device)
    bias = normal(2560, device=device)
    actual = kernel(**half_way(x, norm), weight=packed, bias=bias, pdl=True)
    expected = open_gates_reference(F.linear(normalized(x, norm), numbers, bias.float()), gate)
    assert_close(actual, expected.bfloat16())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_added_to_the_residual_stream(
    device: torch.device, form: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    if size == 2048:
        several_rounds(monkeypatch)
    packed, numbers = packed_of(made(form, 3072, size, device))
    x, norm = normal(1, size, device=device), normal(3072, device=device)
    residual = normal(1, 3072, device=device)
    expected = (residual.float() + F.linear(x.float(), numbers)).bfloat16()
    kernel = ResidualKernel((3072, size), device, codes=packed.kind, most_tokens=8)
    check_residual(kernel, x, packed, residual, norm, expected)


@pytest.mark.parametrize("form", ["fp8-blocks", "fp8-channel", "int4-128-zeros", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (8, 4, 64), (14, 1, 128)]
)
@pytest.mark.parametrize("fp8", [False, True])
def test_heads_of_a_row(
    device: torch.device, form: str, num_heads: int, num_kv_heads: int, head_dim: int, fp8: bool
) -> None:
    height = (num_heads + 2 * num_kv_heads) * head_dim
    for norms in (False, True):
        given = packed_of(made(form, height, 1024, device))
        check_heads(device, 1, num_heads, num_kv_heads, head_dim, fp8, norms, given=given)


ADAPTED = ["int4-128-zeros", "int4-channel", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("form", ADAPTED)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_with_an_adapter_added_to_the_residual_stream(
    device: torch.device, form: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    if size == 2048:
        several_rounds(monkeypatch)
    packed, numbers = packed_of(made(form, 3072, size, device))
    x, norm = normal(1, size, device=device), normal(3072, device=device)
    memory = adapter_memory((3072,), size, RANKS, device, x.dtype)
    kernel = ResidualKernel(
        (3072, size), device, codes=packed.kind, most_tokens=8, adapters=memory.shape
    )
    for adaptation in adaptations(memory, 1, RANKS, device):
        residual = normal(1, 3072, device=device)
        expected = residual.double() + product(x, numbers, adaptation)
        scaled, squares = kernel(x, packed, residual, norm, adaptation=adaptation, pdl=True)
        assert_close(residual, expected.bfloat16())
        assert_close(scaled, (residual.float() * norm).bfloat16())
        torch.testing.assert_close(squares.sum(0), residual.float().square().sum(1))


@pytest.mark.parametrize("form", ADAPTED)
def test_a_gated_row_with_an_adapter(device: torch.device, form: str) -> None:
    """Several run in a row, so that each starts while another runs."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel

    packed, numbers = packed_of(made(form, 2560, 1024, device), gated=True)
    x, norm = normal(1, 1024, device=device, scale=3.0), normal(1024, device=device)
    memory = adapter_memory((1280, 1280), 1024, RANKS, device, x.dtype)
    kernel = LinearKernel(
        (2560, 1024),
        device,
        gate="silu",
        codes=packed.kind,
        most_tokens=8,
        adapters=memory.shape,
    )
    given = half_way(x, norm)
    asked = adaptations(memory, 1, RANKS, device)
    found = [kernel(**given, weight=packed, adaptation=each, pdl=True) for each in asked]
    for adaptation, actual in zip(asked, found, strict=True):
        y = product(given["x"], numbers, adaptation) * scale_of(x)
        gate, up = y.chunk(2, dim=1)
        assert_close(actual, (F.silu(gate) * up).bfloat16())


@pytest.mark.parametrize("form", ADAPTED)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (8, 4, 64)])
def test_heads_of_a_row_with_an_adapter(
    device: torch.device, form: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    height = (num_heads + 2 * num_kv_heads) * head_dim
    given = packed_of(made(form, height, 1024, device))
    check_adapted_heads(device, 1, num_heads, num_kv_heads, head_dim, False, given=given)


CUTS = [
    GemvCut(8, 5, 3),
    GemvCut(4, 10, 2),
    GemvCut(4, 3, 4),
    GemvCut(8, 2, 4),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ways_to_cut_it(
    device: torch.device, cut: GemvCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain in which each reads what the one before has written, as in a layer."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel, ResidualKernel

    cut_by(monkeypatch, lambda *_: cut)
    up, of_up = packed_of(made("int4-128-zeros", 2 * 5120, 5120, device), gated=True)
    down, of_down = packed_of(made("int4-128-zeros", 5120, 5120, device))
    first = LinearKernel((2 * 5120, 5120), device, gate="silu", codes=up.kind, most_tokens=8)
    second = ResidualKernel((5120, 5120), device, codes=down.kind, most_tokens=8)
    norm, residual = normal(5120, device=device), normal(1, 5120, device=device)
    expected = residual.float()
    given = half_way(residual, norm)
    x, squares = given["x"], given["squares"]
    for _ in range(6):
        inner = first(x, up, squares=squares, eps=1e-6, pdl=True)
        x, squares = second(inner, down, residual, norm, pdl=True)
        expected = layer(expected, norm, of_up, of_down)
        assert_close(residual, expected.bfloat16(), tolerance=3e-2)


def layer(residual: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = F.linear(normalized(residual, norm), up).chunk(2, dim=1)
    added = F.linear((F.silu(gate) * value).bfloat16().float(), down)
    return (residual + added).bfloat16().float()


@pytest.mark.parametrize(("height", "in_features"), [(1024, 4096), (48, 1152), (528, 384)])
@pytest.mark.parametrize("biased", [False, True])
def test_plain_weights(
    device: torch.device,
    height: int,
    in_features: int,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Added to the residual stream; NaN lies next to the weight."""
    from minisgl_backend.kernels.cuda.linear import ResidualKernel

    cut = gemv_cut.plain_cut(in_features)
    cut_by(monkeypatch, lambda *_: cut)
    kernel = ResidualKernel((height, in_features), device, most_tokens=8)
    around = torch.full((height + 2, in_features), torch.nan, device=device).bfloat16()
    weight = around[1:-1].normal_().div_(in_features**0.5)
    x, norm = normal(1, in_features, device=device), normal(height, device=device)
    bias = normal(height, device=device) if biased else None
    for pdl in (False, True):
        residual = normal(1, height, device=device)
        expected = residual.float() + x.float() @ weight.float().T
        if bias is not None:
            expected += bias.float()
        scaled, squares = kernel(x, weight, residual, norm, bias=bias, pdl=pdl)
        assert len(squares) == height // gemv_cut.ROWS
        assert_close(residual, expected.bfloat16())
        assert_close(scaled, (residual.float() * norm.float()).bfloat16())
        torch.testing.assert_close(squares.sum(0), residual.float().square().sum(1))
