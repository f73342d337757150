"""Grouped GEMMs and routing on Hopper, and the kernels for few rows, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.gates import ClampedGate, ExpertsGate, Gate, LimitedGate
from minisgl_backend.kernels import expert_cut
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.expert_cut import MANY, ExpertCut
from minisgl_backend.kernels.experts import (
    ExpertWeights,
    SharedOutput,
    add_outputs,
    fused_experts_reference,
    sum_outputs,
)
from minisgl_backend.kernels.gemv_cut import expert_gemv_cut
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight, pack_experts
from minisgl_backend.kernels.quantized import FP8_MAX, dequantized, quantize, stacked
from minisgl_backend.kernels.routing import Choices, RouterExtras, align, choose
from minisgl_backend.weight_format import Encoding
from tests.gpu.compare import assert_close

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.routing import Routed

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INNER_SIZE = 16, 4, 512, 384
GEMMA_4 = 2816, 704
"""Hidden and inner size of Gemma 4 26B-A4B."""
NEMOTRON_3 = 2688, 1856
"""Those of Nemotron 3 Nano 30B-A3B."""
needs_hopper = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")


def chosen(num_tokens: int, device: torch.device, *, all_to_one: bool = False) -> Tensor:
    scores = torch.randn(num_tokens, NUM_EXPERTS, device=device)
    if all_to_one:
        scores[:, :TOP_K] += 100
    return scores.topk(TOP_K, dim=-1).indices.int()


def expected_rows(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    top_k: int,
    *,
    gate: ExpertsGate | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Row p is x[p // top_k] through the expert of pair p, in float32."""
    num_experts, height, _ = weight.shape
    out = torch.empty(ids.numel(), height if gate is None else height // 2, device=x.device)
    for expert in range(num_experts):
        pairs = (ids.flatten() == expert).nonzero()[:, 0]
        y = x[pairs // top_k].float() @ weight[expert].float().T
        if bias is not None:
            y += bias[expert].float()
        if isinstance(gate, ClampedGate):
            one, up = y.chunk(2, dim=1)
            one, up = one.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
            y = (up + 1) * one * (gate.alpha * one).sigmoid()
        elif gate is not None:
            y = open_gates_reference(y, gate)
        out[pairs] = y
    return out.to(x.dtype)


Made = tuple[Tensor | PackedWeight, Tensor]
"""A weight as kernels take it, and in plain numbers."""


def weights(
    form: str,
    device: torch.device,
    sizes: tuple[int, int] = (HIDDEN_SIZE, INNER_SIZE),
    *,
    gated: bool = True,
) -> tuple[Made, Made]:
    """Gate and up, or only up, then down, in one of ``FORMS`` or ``MORE_FORMS``."""
    outer_size, inner_size = sizes
    found: list[Made] = []
    for shape in (((2 if gated else 1) * inner_size, outer_size), (outer_size, inner_size)):
        plain = torch.randn(NUM_EXPERTS, *shape, device=device) * shape[1] ** -0.5
        if form == "bf16":
            found.append((plain.bfloat16(), plain.bfloat16()))
            continue
        encoding, block, symmetric = (FORMS | MORE_FORMS)[form]
        size = min(block[0], shape[0]), min(block[1], shape[1])
        parts = [quantize(one, encoding, size, symmetric=symmetric) for one in plain]
        whole = stacked(parts)
        numbers = dequantized(whole, torch.float32)
        found.append((pack_experts(whole, gated=gated and not found), numbers))
    return found[0], found[1]


def kind_of(weight: Tensor | PackedWeight) -> CodesKind | None:
    return weight.kind if isinstance(weight, PackedWeight) else None


FORMS: dict[str, tuple[Encoding, tuple[int, int], bool]] = {
    "fp8": (Encoding.E4M3, (128, 128), True),
    "fp8 rows": (Encoding.E4M3, (1, 10**6), True),
    "mxfp8": (Encoding.E4M3, (1, 32), True),
    "int8": (Encoding.INT8, (1, 128), False),
    "int4": (Encoding.INT4, (1, 128), False),
    "int4 in 32": (Encoding.INT4, (1, 32), True),
    "mxfp4": (Encoding.E2M1, (1, 32), True),
    "nvfp4": (Encoding.E2M1, (1, 16), True),
}
MORE_FORMS = {"int4 without zeros": (Encoding.INT4, (1, 128), True)}


@needs_hopper
@pytest.mark.parametrize("form", ["bf16", *FORMS])
@pytest.mark.parametrize(
    "cut",
    [
        ExpertCut(64, 8, 10),
        ExpertCut(64, 8, 8, by_warp=True),
        ExpertCut(64, 16, 8),
        ExpertCut(128, 16, 6, by_warp=True),
        ExpertCut(64, 32, 4),
        ExpertCut(128, 32, 5),
        ExpertCut(64, 64, 4),
        ExpertCut(128, 128, 4),
        ExpertCut(64, 16, 8, rounded=True),
        ExpertCut(128, 24, 5, rounded=True),
        ExpertCut(128, 64, 6, rounded=True),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_grouped_gemms(device: torch.device, form: str, cut: ExpertCut, num_tokens: int) -> None:
    """One after the other, the second also starting early; also with all tokens at the same
    experts."""
    from minisgl_backend.kernels.cuda.experts import GroupedKernel

    if form != "bf16" and cut.tokens == 128:
        pytest.skip("too many registers")
    if cut.rounded and not form.startswith("fp8"):
        pytest.skip("not float8")
    read = rounded if cut.rounded else Tensor.float
    (gate_up, plain_up), (down, plain_down) = weights(form, device)
    in_first = GroupedKernel(
        plain_up.shape, device, codes=kind_of(gate_up), gate="silu", cuts=[cut]
    )
    in_second = GroupedKernel(plain_down.shape, device, codes=kind_of(down), gate=None, cuts=[cut])
    for all_to_one in (False, True):
        ids = chosen(num_tokens, device, all_to_one=all_to_one)
        x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).bfloat16()
        aligned = align(ids, NUM_EXPERTS, cut.tokens)
        held, rest = (aligned.pairs, aligned.experts, ids.numel()), {"cut": cut}
        for pdl in (False, True):
            fixed: dict[str, Any] = {**rest, "pdl": pdl}
            inner = in_first(x, gate_up, *held, top_k=TOP_K, **fixed)
            outer = in_second(inner, down, *held, top_k=1, early=pdl, **fixed)
            expected = expected_rows(read(x), plain_up, ids, TOP_K, gate="silu")
            assert_close(inner, expected.bfloat16())
            expected = expected_rows(read(inner), plain_down, ids, 1, gate=None)
            assert_close(outer, expected.bfloat16())


@needs_hopper
@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8 rows"])
@pytest.mark.parametrize("num_tokens", [1, 70, 300, 1500])
@pytest.mark.parametrize(
    "gate", ["silu", "gelu", LimitedGate(0.5), LimitedGate(0.5, on_input=True)], ids=str
)
def test_grouped_gemms_of_many_rows(
    device: torch.device, form: str, num_tokens: int, gate: Gate | LimitedGate
) -> None:
    """Weights in float8 multiply rows that are rounded to 8 bits; also with all tokens at the same
    experts, and with rows that are multiplied by factors."""
    from minisgl_backend.kernels.cuda.experts_many import ManyRowsKernel

    (gate_up, plain_up), (down, plain_down) = weights(form, device)
    in_first = ManyRowsKernel(plain_up.shape, device, codes=kind_of(gate_up), gate=gate)
    in_second = ManyRowsKernel(plain_down.shape, device, codes=kind_of(down), gate=None)
    for all_to_one in (False, True):
        ids = chosen(num_tokens, device, all_to_one=all_to_one)
        x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).bfloat16()
        factors = torch.rand(num_tokens, device=device)
        aligned = align(ids, NUM_EXPERTS, MANY.block)
        held = aligned.pairs, aligned.experts, ids.numel()
        inner = in_first(x, gate_up, *held, top_k=TOP_K, factors=factors)
        outer = in_second(inner, down, *held, top_k=1)
        rows, of_inner = (x, inner) if form == "bf16" else (rounded(x), rounded(inner))
        scaled = rows.float() * factors[:, None]
        expected = expected_rows(scaled, plain_up, ids, TOP_K, gate=gate)
        assert_close(inner, expected.bfloat16())
        expected = expected_rows(of_inner.float(), plain_down, ids, 1, gate=None)
        assert_close(outer, expected.bfloat16())
        again = in_first(x, gate_up, *held, top_k=TOP_K, factors=factors, pdl=True)
        assert torch.equal(again, inner)
        assert torch.equal(in_second(again, down, *held, top_k=1, pdl=True), outer)


def rounded(x: Tensor) -> Tensor:
    """Each row as multiples of its scale in float8."""
    scales = x.float().abs().amax(dim=1, keepdim=True) / FP8_MAX
    return (x.float() / scales).to(torch.float8_e4m3fn).float() * scales


@needs_hopper
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        *((form, sizes) for form in FORMS for sizes in ((288, 288), (64, 32), (2880, 1440))),
        *(("bf16", sizes) for sizes in ((288, 288), (64, 32), (368, 184))),
    ],
)
@pytest.mark.parametrize("num_tokens", [9, 100])
def test_sizes_that_no_tile_divides(
    device: torch.device, form: str, sizes: tuple[int, int], num_tokens: int
) -> None:
    """With biases and gpt-oss's gate; NaN lies next to the weights and after the rows of x."""
    from minisgl_backend.kernels.cuda.experts import GroupedKernel

    (gate_up, plain_up), (down, plain_down) = weights(form, device, sizes)
    gate = ClampedGate(alpha=1.702, limit=1.5)
    ids = chosen(num_tokens, device)
    x = torch.randn(num_tokens, sizes[0], device=device).bfloat16()
    biases = [
        torch.randn(NUM_EXPERTS, plain.shape[1], device=device).bfloat16()
        for plain in (plain_up, plain_down)
    ]
    encoding = None if form == "bf16" else FORMS[form][0]
    for cut in expert_cut.cuts(encoding, rounds=form.startswith("fp8")):
        read = rounded if cut.rounded else Tensor.float
        in_first = GroupedKernel(
            plain_up.shape, device, codes=kind_of(gate_up), gate=gate, cuts=[cut]
        )
        in_second = GroupedKernel(
            plain_down.shape, device, codes=kind_of(down), gate=None, cuts=[cut]
        )
        aligned = align(ids, NUM_EXPERTS, cut.tokens)
        held = aligned.pairs, aligned.experts, ids.numel()
        poisoned = torch.full((2, *x.shape), torch.nan, device=device, dtype=x.dtype)
        poisoned[0] = x  # NaN follows its last row
        inner = in_first(poisoned[0], gate_up, *held, cut=cut, top_k=TOP_K, bias=biases[0])
        outer = in_second(inner, down, *held, cut=cut, top_k=1, bias=biases[1])
        expected = expected_rows(read(x), plain_up, ids, TOP_K, gate=gate, bias=biases[0])
        assert_close(inner, expected.bfloat16())
        expected = expected_rows(read(inner), plain_down, ids, 1, gate=None, bias=biases[1])
        assert_close(outer, expected.bfloat16())


@needs_hopper
@pytest.mark.parametrize(
    "gate", ["silu", LimitedGate(0.5), LimitedGate(0.5, on_input=True)], ids=str
)
def test_grouped_gemms_of_rows_whose_norm_is_half_done(
    device: torch.device, gate: Gate | LimitedGate
) -> None:
    from minisgl_backend.kernels.cuda.experts import GroupedKernel

    (gate_up, plain), _ = weights("bf16", device)
    cut = ExpertCut(64, 8, 8)
    kernel = GroupedKernel(plain.shape, device, codes=None, gate=gate, cuts=[cut])
    ids, x = chosen(9, device), torch.randn(9, HIDDEN_SIZE, device=device).bfloat16()
    factors = torch.rand(9, device=device)
    aligned = align(ids, NUM_EXPERTS, 8)
    actual = kernel(
        x,
        gate_up,
        aligned.pairs,
        aligned.experts,
        ids.numel(),
        cut=cut,
        top_k=TOP_K,
        factors=factors,
    )
    expected = expected_rows(x.float() * factors[:, None], plain, ids, TOP_K, gate=gate)
    assert_close(actual, expected.bfloat16())


@needs_hopper
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        *(
            (form, sizes)
            for form in ("mxfp4", "nvfp4")
            for sizes in ((512, 384), (288, 288), (64, 32), (2880, 1440))
        ),
        *(("fp8", sizes) for sizes in ((512, 384), (320, 288), (2048, 768), (4096, 192))),
        *(("int4", sizes) for sizes in ((512, 384), (320, 288), (2048, 768), (4096, 192))),
        ("int4 without zeros", (512, 384)),
        *((form, GEMMA_4) for form in ("mxfp4", "nvfp4", "int4", "fp8", "fp8 rows")),
        *(("fp8 rows", sizes) for sizes in ((512, 384), (176, 80))),
        *(("bf16", sizes) for sizes in ((512, 384), (2048, 640), (320, 176), (256, 4608), GEMMA_4)),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(
    "gate",
    [
        *("silu", "gelu", ClampedGate(alpha=1.702, limit=1.5)),
        *(LimitedGate(0.5), LimitedGate(0.5, on_input=True)),
    ],
    ids=["silu", "gelu", "clamped", "limited", "bounded"],
)
def test_few_tokens(
    device: torch.device,
    form: str,
    sizes: tuple[int, int],
    num_tokens: int,
    gate: ExpertsGate,
) -> None:
    """Behind gpt-oss's gate with a factor, biases, an expert that is not here and one that all
    tokens take; NaN lies next to the rows of x."""
    from minisgl_backend.kernels.cuda.expert_gemv import ExpertGemv

    both = weights(form, device, sizes)
    kernels = []
    for (packed, plain), of in zip(both, (gate, None), strict=True):
        kind = packed.kind if isinstance(packed, PackedWeight) else None
        cut = expert_gemv_cut(plain.shape[2], kind)
        assert cut is not None
        kernels.append(ExpertGemv(plain.shape, device, codes=kind, gate=of, cut=cut))
    (gate_up, plain_up), (down, plain_down) = both
    ids = chosen(num_tokens, device)
    biases: list[Tensor | None] = [None, None]
    factors = of_all = None
    if isinstance(gate, ClampedGate):
        of_all = int(ids[0, -1])
        ids[:, -1] = of_all
        biases = [
            torch.randn(NUM_EXPERTS, plain.shape[1], device=device).bfloat16()
            for plain in (plain_up, plain_down)
        ]
        factors, ids[-1, 1] = torch.rand(num_tokens, device=device), -1
    here = ids.flatten() >= 0
    around = torch.full((num_tokens + 2, sizes[0]), torch.nan, device=device).bfloat16()
    x = around[1:-1].normal_()
    up, of_inner = kernels
    scaled = x.float() if factors is None else x.float() * factors[:, None]
    for pdl in (False, True):
        inner = up(x, gate_up, ids, factors=factors, bias=biases[0], of_all=of_all, pdl=pdl)
        outer = of_inner(inner, down, ids, bias=biases[1], early=pdl, pdl=pdl)
        expected = expected_rows(scaled, plain_up, ids, TOP_K, gate=gate, bias=biases[0])
        assert_close(inner[here], expected[here].bfloat16())
        expected = expected_rows(inner, plain_down, ids, 1, gate=None, bias=biases[1])
        assert_close(outer[here], expected[here])


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 3, 32, 33, 256, 1000])
@pytest.mark.parametrize(
    ("sigmoid", "corrected", "normalize", "scaled"),
    [
        (False, False, True, False),
        (True, True, True, False),
        (False, True, True, False),
        (False, False, False, False),
        (False, False, True, True),
    ],
)
@pytest.mark.parametrize("block", [0, 8, 64, 256])
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("held", [(0, 128), (32, 64)])
def test_routing(
    device: torch.device,
    num_tokens: int,
    sigmoid: bool,
    corrected: bool,
    normalize: bool,
    scaled: bool,
    block: int,
    half_done: bool,
    held: tuple[int, int],
) -> None:
    from minisgl_backend.kernels.cuda.routing import RoutingKernel

    num_experts, top_k, size = 128, 8, 2048
    rule = RoutingRule(
        num_experts=num_experts,
        top_k=top_k,
        normalize=normalize,
        sigmoid=sigmoid,
        corrected=corrected,
        scale=1.5,
        scaled=scaled,
    )
    kernel = RoutingKernel(rule, held, size, device, wide=rule.wide, blocks=[block])
    logits = torch.randn(num_tokens, num_experts, device=device)
    logits = logits if rule.wide else logits.bfloat16()
    bias = torch.randn(num_experts, device=device) / 10 if corrected else None
    squares = torch.rand(16, num_tokens, device=device) * size / 8 if half_done else None
    addends = torch.randn(num_experts, device=device) if half_done else None
    of_experts = torch.rand(num_experts, device=device) + 0.5 if scaled else None
    extras = RouterExtras(bias=addends, correction=bias, factors=of_experts)
    for _ in range(2):  # the second launch finds the counter as the first one left it
        routed = kernel(logits, extras, block=block, squares=squares, eps=1e-6)
    scores = logits.float()
    if squares is not None:
        assert routed.factors is not None
        expected = (squares.sum(0) / size + 1e-6).rsqrt()
        assert_close(routed.factors, expected)
        scores = scores * expected[:, None]
    if addends is not None:
        scores = scores + addends
    scores = scores.sigmoid() if sigmoid else scores.softmax(dim=-1)
    compared = scores if bias is None else scores + bias
    best, of_best = compared.topk(top_k, dim=-1)
    begin, end = held
    ids, is_held = routed.choices.ids, (of_best >= begin) & (of_best < end)
    assert routed.choices.elsewhere == (held != (0, num_experts))
    assert ((ids >= 0) == is_held).all() or (ids >= 0).sum() == is_held.sum()  # two may tie
    found = torch.where(ids >= 0, ids.long() + begin, 0)
    here = ids >= 0
    assert torch.equal(compared.gather(1, found)[here], best[here])
    weight = scores.gather(1, of_best)
    weight = 1.5 * (weight / weight.sum(-1, keepdim=True) if normalize else weight)
    if of_experts is None:
        assert_close(routed.choices.weights, weight)
    else:  # of experts that tie, the others have other factors
        assert_close(routed.choices.weights[here], (weight * of_experts[found])[here])
    check_alignment(routed, block)


def check_alignment(routed: Routed, block: int) -> None:
    """Each pair of an expert that is here is in a block of this expert."""
    ids, aligned = routed.choices.ids, routed.alignment
    if not block:
        assert aligned is None
        return
    assert aligned is not None
    used = int((aligned.experts >= 0).sum())
    assert (aligned.experts[:used] >= 0).all() and (aligned.experts[used:] == -1).all()
    pairs = aligned.pairs.view(-1, block)[:used]
    is_pair = pairs < ids.numel()
    here = (ids >= 0).flatten().nonzero().flatten()
    assert sorted(pairs[is_pair].tolist()) == here.tolist()
    owner = aligned.experts[:used, None].expand(-1, block)[is_pair]
    assert torch.equal(ids.flatten()[pairs[is_pair].long()], owner)


LIMITING: list[tuple[int, dict[str, Any]]] = [
    (256, {"num_groups": 8, "top_groups": 4, "sigmoid": True, "corrected": True}),
    (256, {"num_groups": 32, "top_groups": 3, "sigmoid": True, "corrected": True}),
    (160, {"num_groups": 8, "top_groups": 3, "best_of_group": 1, "scale": 16.0}),
    (64, {"num_groups": 4, "top_groups": 2, "best_of_group": 3}),
    (20, {"num_groups": 5, "top_groups": 2, "corrected": True}),
]
"""Numbers of experts, and what else a rule has; the first and the third are DeepSeek's."""


@needs_hopper
@pytest.mark.parametrize(
    "rule",
    [
        RoutingRule(num_experts=num_experts, top_k=6, normalize=True, **rest)
        for num_experts, rest in LIMITING
    ],
    ids=lambda rule: f"{rule.num_groups}x{rule.num_experts // rule.num_groups}",
)
@pytest.mark.parametrize("block", [0, 8, 128])
@pytest.mark.parametrize("is_whole", [True, False])
def test_routing_that_limits_groups(
    device: torch.device, rule: RoutingRule, block: int, is_whole: bool
) -> None:
    """By the router's logits, and few tokens also by its weight; with scores that all tie, and with
    NaN, which all experts have then. Where rounding decides, tokens are not compared."""
    from minisgl_backend.kernels.cuda.routing import RoutingKernel

    num_experts, size = rule.num_experts, 512
    held = (0, num_experts) if is_whole else (num_experts // 4, num_experts // 2)
    few = [] if block == 128 else [block]
    kernel = RoutingKernel(rule, held, size, device, wide=True, blocks=[block], few=few)
    weight = torch.randn(num_experts, size, device=device).bfloat16() / 16
    correction = torch.randn(num_experts, device=device) / 8 if rule.corrected else None
    extras = RouterExtras(correction=correction)
    wide = None if correction is None else correction.double()
    for num_tokens in (1, 3, 8, 9, 33, 300):
        x = torch.randn(num_tokens, size, device=device).bfloat16()
        exact = F.linear(x.double(), weight.double())
        expected = choose(exact, rule, wide)
        others = [choose(exact + 1e-5 * torch.randn_like(exact), rule, wide) for _ in range(12)]
        same = torch.stack([(other.ids == expected.ids).all(dim=1) for other in others])
        is_clear = same.all(dim=0)  # [num_tokens]
        assert is_clear.sum() >= 0.9 * num_tokens - 1
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        ways = [kernel(logits, extras, block=block)]
        if kernel.takes_rows(num_tokens, weight, block=block):
            ways.append(kernel.of_rows(x, weight, extras, block=block))
        assert len(ways) == (2 if num_tokens <= 8 and few else 1)
        is_here = (expected.ids >= held[0]) & (expected.ids < held[1])
        ids = torch.where(is_here, expected.ids - held[0], -1)
        for routed in ways:
            assert torch.equal(routed.choices.ids[is_clear].long(), ids[is_clear])
            if is_clear.any():
                found = routed.choices.weights[is_clear]
                assert_close(found, expected.weights[is_clear].float())
            check_alignment(routed, block)
    logits = torch.zeros(2, num_experts, device=device)
    logits[1] = torch.nan
    no_extras = RouterExtras(correction=logits[0] if rule.corrected else None)
    first = torch.arange(rule.top_k, device=device)
    first = torch.where((first >= held[0]) & (first < held[1]), first - held[0], -1)
    for _ in range(2):  # the second launch finds the counters as the first one left them
        routed = kernel(logits, no_extras, block=block)
        assert (routed.choices.ids == first).all()
        check_alignment(routed, block)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 257, 1100, 3000])
@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8 rows", "int4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("held", [(0, NUM_EXPERTS), (4, 8)])
def test_whole_layers(
    device: torch.device, num_tokens: int, form: str, held: tuple[int, int]
) -> None:
    """With the cut for every number of tokens, also on one rank of several."""
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts

    begin, end = held
    (gate_up, plain_up), (down, plain_down) = (
        (_slice(weight, begin, end), plain[begin:end].float())
        for weight, plain in weights(form, device)
    )
    rule = RoutingRule(num_experts=NUM_EXPERTS, top_k=TOP_K, normalize=True)
    experts, make = ExpertWeights(gate_up, down), HopperExperts(device)
    kernels = make.kernels(
        rule,
        held,
        *experts.shapes,
        kinds=experts.kinds,
        gate="silu",
        hidden_size=HIDDEN_SIZE,
        wide=False,
    )
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).bfloat16()
    router = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, device=device).bfloat16() / 16
    logits = F.linear(x.float(), router.float())
    if num_tokens > 8:
        logits = logits.bfloat16().float()  # as they are given; the kernel for rows rounds none
    norm = torch.randn(HIDDEN_SIZE, device=device).bfloat16()
    residual = torch.randn_like(x)
    # 8-bit tokens: each of two GEMMs is off by 2.5 % (rms)
    held_rows = num_tokens * TOP_K, NUM_EXPERTS, Encoding.E4M3
    is_rounded = "fp8" in form and (
        expert_cut.are_many(*held_rows) or expert_cut.cut_of(*held_rows, rounds=True).rounded
    )
    tolerance = 0.04 if is_rounded else 1e-2
    plain = ExpertWeights(plain_up, plain_down)
    choices = choose(logits, rule)
    is_here = (choices.ids >= begin) & (choices.ids < end)
    here = Choices(torch.where(is_here, choices.ids - begin, -1), choices.weights)
    expected = residual.float() + fused_experts_reference(x.float(), plain, here)
    for pdl in (False, True):
        outputs, found = kernels(x, router, lambda _: logits.bfloat16(), experts, pdl=pdl)
        summed = sum_outputs(outputs, found, pdl=pdl)
        assert_close(residual.float() + summed.float(), expected, tolerance=tolerance)
        total = residual.clone()
        normed, _ = add_outputs(outputs, found, None, total, norm, 1e-6, pdl=pdl)
        assert_close(total.float(), expected, tolerance=tolerance)
        wide = total.float()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        assert_close(normed, (wide * scale * norm.float()).bfloat16())


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 16, 64, 200, 600, 2000])
@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8 rows", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [GEMMA_4, (HIDDEN_SIZE, INNER_SIZE)])
@pytest.mark.parametrize("held", [(0, NUM_EXPERTS), (2, 14)])
def test_whole_layers_of_gemma_4(
    device: torch.device,
    num_tokens: int,
    form: str,
    sizes: tuple[int, int],
    held: tuple[int, int],
) -> None:
    """GELU; the router reads other rows, and its weights are multiplied by factors of experts. The
    smaller sizes also have a kernel for many rows."""
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts

    (begin, end), (hidden_size, inner_size) = held, sizes
    (gate_up, plain_up), (down, plain_down) = (
        (_slice(weight, begin, end), plain[begin:end].float())
        for weight, plain in weights(form, device, sizes)
    )
    rule = RoutingRule(num_experts=NUM_EXPERTS, top_k=TOP_K, normalize=True, scaled=True)
    gate: Gate = "gelu"
    experts = ExpertWeights(gate_up, down, gate=gate)
    kernels = HopperExperts(device).kernels(
        rule,
        held,
        *experts.shapes,
        kinds=experts.kinds,
        gate=gate,
        hidden_size=hidden_size,
        wide=False,
    )
    x, routed = torch.randn(2, num_tokens, hidden_size, device=device).bfloat16()
    router = torch.randn(NUM_EXPERTS, hidden_size, device=device).bfloat16() * hidden_size**-0.5
    factors = torch.rand(NUM_EXPERTS, device=device) + 0.5
    logits = F.linear(routed.float(), router.float())

    def of_router(_: bool) -> Tensor:
        assert num_tokens > 8, "the kernel computes the logits"
        return logits.bfloat16()

    scores = (logits.bfloat16().float() if num_tokens > 8 else logits).softmax(dim=-1)
    best = scores.topk(TOP_K, dim=-1).values
    held_rows = num_tokens * TOP_K, NUM_EXPERTS, Encoding.E4M3
    is_many = expert_cut.are_many(*held_rows) and expert_cut.fits_many(hidden_size, inner_size)
    is_rounded = "fp8" in form and (is_many or expert_cut.cut_of(*held_rows, rounds=True).rounded)
    # 8-bit tokens: gates, ups and inputs of the second GEMM are off by 2.6 % each (rms)
    tolerance = 0.055 if is_rounded else 1e-2
    plain = ExpertWeights(plain_up, plain_down, gate=gate)
    for pdl in (False, True):
        outputs, found = kernels(
            x,
            router,
            of_router,
            experts,
            routed=routed,
            extras=RouterExtras(factors=factors),
            pdl=pdl,
        )
        here = found.ids >= 0
        ids = torch.where(here, found.ids.long() + begin, 0)
        chosen_scores = scores.gather(1, ids)
        # the best ones that are here; of several that tie, any
        assert (chosen_scores >= best[:, -1:])[here].all()
        assert held != (0, NUM_EXPERTS) or here.all()
        expected_weights = chosen_scores / best.sum(-1, keepdim=True) * factors[ids]
        assert_close(found.weights[here], expected_weights[here], tolerance=1e-4)
        expected = fused_experts_reference(x.float(), plain, found)
        summed = sum_outputs(outputs, found, pdl=pdl)
        assert_close(summed.float(), expected, tolerance=tolerance)


@needs_hopper
@pytest.mark.parametrize("form", ["bf16", *FORMS])
@pytest.mark.parametrize("sizes", [NEMOTRON_3, (512, 512)])
@pytest.mark.parametrize("held", [(0, NUM_EXPERTS), (2, 14)])
def test_whole_layers_without_gates(
    device: torch.device, form: str, sizes: tuple[int, int], held: tuple[int, int]
) -> None:
    """They read latents, and their router other rows. The smaller sizes also have a kernel for many
    rows."""
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts

    (begin, end), (outer_size, inner_size), hidden_size = held, sizes, 640
    (up, plain_up), (down, plain_down) = (
        (_slice(weight, begin, end), plain[begin:end].float())
        for weight, plain in weights(form, device, sizes, gated=False)
    )
    rule = RoutingRule(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        normalize=True,
        sigmoid=True,
        corrected=True,
        scale=2.5,
        num_groups=4,
        top_groups=2,
    )
    experts = ExpertWeights(up, down, gate=None)
    plain = ExpertWeights(plain_up, plain_down, gate=None)
    kernels = HopperExperts(device).kernels(
        rule,
        held,
        *experts.shapes,
        kinds=experts.kinds,
        gate=None,
        hidden_size=hidden_size,
        wide=True,
    )
    router = torch.randn(NUM_EXPERTS, hidden_size, device=device).bfloat16() * hidden_size**-0.5
    correction = torch.randn(NUM_EXPERTS, device=device) / 8

    def of_router(rows: Tensor, _: bool) -> Tensor:
        return F.linear(rows.float(), router.float())

    for num_tokens in (1, 2, 4, 5, 16, 64, 200, 600, 2000):
        x = torch.randn(num_tokens, outer_size, device=device).bfloat16()
        routed = torch.randn(num_tokens, hidden_size, device=device).bfloat16()
        held_rows = num_tokens * TOP_K, NUM_EXPERTS, Encoding.E4M3
        is_many = expert_cut.are_many(*held_rows)
        is_many = is_many and expert_cut.fits_many(outer_size, inner_size, gated=False)
        rounded_cut = expert_cut.cut_of(*held_rows, rounds=True).rounded
        is_rounded = "fp8" in form and (is_many or rounded_cut)
        # 8-bit tokens: ups are off by 2.6 % (rms), their squares by twice as much
        tolerance = 0.08 if is_rounded else 1e-2
        for pdl in (False, True):
            outputs, found = kernels(
                x,
                router,
                partial(of_router, routed),
                experts,
                routed=routed,
                extras=RouterExtras(correction=correction),
                pdl=pdl,
            )
            assert outputs.shape == (num_tokens, TOP_K, outer_size)
            expected = fused_experts_reference(x.float(), plain, found)
            summed = sum_outputs(outputs, found, pdl=pdl)
            assert_close(summed.float(), expected, tolerance=tolerance)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("form", ["bf16", "int4", "fp8", "fp8 rows"])
@pytest.mark.parametrize("has_gate", [False, True])
def test_whole_layers_with_an_expert_that_all_tokens_take(
    device: torch.device, num_tokens: int, half_done: bool, form: str, has_gate: bool
) -> None:
    """It is the last of the weights, and the last choice of each token."""
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts

    (gate_up, plain_up), (down, plain_down) = weights(form, device)
    num_chosen_from = NUM_EXPERTS - 1
    rule = RoutingRule(num_experts=num_chosen_from, top_k=TOP_K, normalize=True)
    experts, make, held = ExpertWeights(gate_up, down), HopperExperts(device), (0, num_chosen_from)
    kernels = make.kernels(
        rule,
        held,
        *experts.shapes,
        kinds=experts.kinds,
        gate="silu",
        hidden_size=HIDDEN_SIZE,
        wide=False,
        shared=True,
    )
    router = torch.randn(num_chosen_from, HIDDEN_SIZE, device=device).bfloat16() / 16
    gate = torch.randn(HIDDEN_SIZE, device=device).bfloat16() / 16
    assert kernels.takes_shared(num_tokens, router)
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).bfloat16()
    wide, squares = x.float(), None
    if half_done:
        squares = torch.rand(16, num_tokens, device=device) * HIDDEN_SIZE / 8
        wide = wide * (squares.sum(0) / HIDDEN_SIZE + 1e-6).rsqrt()[:, None]
    chosen_ones = choose(F.linear(wide, router.float()), rule)
    opening = F.linear(wide, gate.float()[None]).sigmoid()
    opening = opening if has_gate else torch.ones_like(opening)
    last = torch.full((num_tokens, 1), num_chosen_from, device=device)
    all_ones = Choices(
        torch.cat([chosen_ones.ids, last], dim=1), torch.cat([chosen_ones.weights, opening], dim=1)
    )
    plain = ExpertWeights(plain_up.float(), plain_down.float())
    expected = fused_experts_reference(wide, plain, all_ones)
    for pdl in (False, True):
        outputs, found = kernels(
            x,
            router,
            lambda _: pytest.fail("the kernel computes the logits"),
            experts,
            with_shared=True,
            shared_gate=gate if has_gate else None,
            squares=squares,
            eps=1e-6,
            pdl=pdl,
        )
        assert outputs.shape == (num_tokens, TOP_K + 1, HIDDEN_SIZE)
        assert_close(sum_outputs(outputs, found, pdl=pdl).float(), expected, tolerance=1e-2)


def _slice(weight: Tensor | PackedWeight, begin: int, end: int) -> Tensor | PackedWeight:
    if isinstance(weight, Tensor):
        return weight[begin:end]
    codes = replace(weight.weight, codes=weight.weight.codes[begin:end])
    scales, row_scales = (
        None if tensor is None else tensor[begin:end]
        for tensor in (weight.scales, weight.row_scales)
    )
    return replace(weight, weight=codes, scales=scales, row_scales=row_scales)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("num_experts", [12, 128])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("size", [512, 360, 2816])
def test_routing_with_the_routers_gemm(
    device: torch.device,
    num_tokens: int,
    half_done: bool,
    num_experts: int,
    has_gate: bool,
    has_rest: bool,
    size: int,
) -> None:
    """With a gate, all tokens also take the expert after the others; the rest are biases and
    factors of experts."""
    from minisgl_backend.kernels.cuda.routing import RoutingKernel

    rule = RoutingRule(num_experts=num_experts, top_k=6, normalize=True, scaled=has_rest)
    held = 0, num_experts
    kernel = RoutingKernel(rule, held, size, device, wide=False, blocks=[0], shared=has_gate)
    # NaN lies before x and after the weight
    around = torch.full((num_tokens + num_experts + 2, size), torch.nan, device=device).bfloat16()
    x, weight = around[1 : num_tokens + 1], around[num_tokens + 1 : -1]
    x.normal_()
    weight.normal_().div_(16)
    squares = torch.rand(16, num_tokens, device=device) * size / 8 if half_done else None
    assert kernel.takes_rows(num_tokens, weight, block=0)
    gate = torch.randn(size, device=device).bfloat16() / 16 if has_gate else None
    bias, factors = torch.randn(2, num_experts, device=device) if has_rest else (None, None)
    rows = weight if gate is None else torch.cat([weight, gate[None]])
    logits = F.linear(x.float(), rows.float())
    if squares is not None:
        logits *= (squares.sum(0) / size + 1e-6).rsqrt()[:, None]
    if bias is not None:
        logits[:, :num_experts] += bias
    expected = choose(logits[:, :num_experts], rule, factors=factors)
    extras = RouterExtras(bias=bias, factors=factors)
    rest: dict[str, Any] = {"squares": squares, "eps": 1e-6}
    for _ in range(2):
        found = kernel.of_rows(
            x, weight, extras, with_shared=has_gate, shared_gate=gate, **rest
        ).choices
        assert torch.equal(found.ids[:, :6].long(), expected.ids)
        assert_close(found.weights[:, :6].contiguous(), expected.weights)
        if has_gate:
            assert (found.ids[:, 6] == num_experts).all()
            assert_close(found.weights[:, 6].contiguous(), logits[:, num_experts].sigmoid())


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 300])
@pytest.mark.parametrize("block", [0, 8])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_routing_by_corrected_scores(
    device: torch.device, num_tokens: int, block: int, sigmoid: bool
) -> None:
    """By the logits of a router whose weight has 16 bits, which few tokens have in one kernel."""
    from minisgl_backend.kernels.cuda.routing import RoutingKernel

    rule = RoutingRule(
        num_experts=128, top_k=8, normalize=True, sigmoid=sigmoid, corrected=True, scale=2.5
    )
    size = 4096
    kernel = RoutingKernel(rule, (0, 128), size, device, wide=True, blocks=[0, 8], few=[0, 8])
    x = torch.randn(num_tokens, size, device=device).bfloat16()
    weight = torch.randn(128, size, device=device).bfloat16() / 64
    correction = torch.randn(128, device=device) / (8 if sigmoid else 128)
    expected = choose(F.linear(x.double(), weight.double()), rule, correction.double())
    logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    extras = RouterExtras(correction=correction)
    ways = [kernel(logits, extras, block=block)]
    if kernel.takes_rows(num_tokens, weight, block=block):
        ways.append(kernel.of_rows(x, weight, extras, block=block))
    assert len(ways) == (2 if num_tokens <= 8 else 1)
    for routed in ways:
        assert torch.equal(routed.choices.ids.long(), expected.ids)
        assert_close(routed.choices.weights, expected.weights.float())


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 300])
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("block", [0, 8, 128])
def test_routing_whose_weights_scale_inputs(
    device: torch.device, num_tokens: int, half_done: bool, block: int
) -> None:
    """Weights are factors of rows, beside those that complete a norm. Logits are compared, as many
    sigmoids round to 1."""
    from minisgl_backend.kernels.cuda.routing import RoutingKernel

    rule, size = RoutingRule(num_experts=16, top_k=1, normalize=False, sigmoid=True), 512
    few = [] if block == 128 else [block]
    kernel = RoutingKernel(
        rule, (0, 16), size, device, wide=True, blocks=[block], few=few, scales_inputs=True
    )
    x = torch.randn(num_tokens, size, device=device).bfloat16()
    weight = torch.randn(16, size, device=device).bfloat16()
    squares, factors = None, torch.ones(num_tokens, device=device)
    if half_done:
        squares = torch.rand(16, num_tokens, device=device) * size / 8
        factors = (squares.sum(0) / size + 1e-6).rsqrt()
    exact = F.linear(x.double(), weight.double()) * factors[:, None]
    expected = choose(exact, rule)
    logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    ways = [kernel(logits, block=block, squares=squares, eps=1e-6)]
    if kernel.takes_rows(num_tokens, weight, block=block):
        ways.append(kernel.of_rows(x, weight, block=block, squares=squares, eps=1e-6))
    assert len(ways) == (2 if num_tokens <= 8 and few else 1)
    for routed in ways:
        assert torch.equal(routed.choices.ids.long(), expected.ids)
        assert (routed.choices.weights == 1).all() and routed.factors is not None
        assert_close(routed.factors, factors * expected.weights[:, 0].float())
        check_alignment(routed, block)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("num_experts", [16, 32, 256])
@pytest.mark.parametrize("held", [(0, 16), (4, 8)])
def test_routing_with_the_routers_gemm_sorts(
    device: torch.device, num_tokens: int, num_experts: int, held: tuple[int, int]
) -> None:
    """Pairs are sorted into blocks of the experts that the rank holds; also with all tokens at the
    same experts."""
    from minisgl_backend.kernels.cuda.routing import RoutingKernel

    begin, end = (0, num_experts) if held[1] == 16 else held
    rule, block = RoutingRule(num_experts=num_experts, top_k=TOP_K, normalize=True), 4
    kernel = RoutingKernel(rule, (begin, end), 512, device, wide=False, blocks=[block], few=[block])
    weight = torch.randn(num_experts, 512, device=device).bfloat16() / 16
    assert kernel.takes_rows(num_tokens, weight, block=block)
    for bias in (None, torch.arange(num_experts, device=device) * 100.0):
        x = torch.randn(num_tokens, 512, device=device).bfloat16()
        for _ in range(2):
            routed = kernel.of_rows(x, weight, RouterExtras(bias=bias), block=block)
        check_alignment(routed, block)


@pytest.mark.parametrize("kind", ["none", "plain", "gated", "half normed"])
def test_sums_with_the_norm(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """With and without an expert that all tokens take, which may be gated."""
    parts = torch.randn(3, TOP_K, 300, device=device).to(dtype)
    weight, norm = torch.rand(3, TOP_K, device=device), torch.randn(300, device=device).to(dtype)
    choices = Choices(chosen(3, device), weight, elsewhere=True)
    choices.ids[1, 2] = -1
    rows, x = torch.randn(2, 3, 300, device=device).to(dtype)
    gate, squares = torch.randn(300, device=device).to(dtype), torch.rand(5, 3, device=device)
    shared = {
        "plain": SharedOutput(rows),
        "gated": SharedOutput(rows, gate, x),
        "half normed": SharedOutput(rows, gate, x, squares, 0.5),
    }.get(kind)
    logits = x.float() @ gate.float()[:, None]
    if kind == "half normed":
        logits /= (squares.sum(0)[:, None] / 300 + 0.5).sqrt()
    opening = torch.ones_like(logits) if kind == "plain" else logits.sigmoid()
    residual = torch.randn(3, 300, device=device).to(dtype)
    held = torch.where(choices.ids >= 0, weight, 0)
    added = (parts.float() * held[:, :, None]).sum(1)
    added = added if shared is None else added + opening * rows.float()
    total = residual.float() + added
    parts[1, 2] = torch.nan  # memory that no kernel has written may hold anything
    assert_close(sum_outputs(parts, choices, shared), added.to(dtype))
    before = residual.clone()
    out, _ = add_outputs(parts, choices, shared, residual, norm, 1e-6)
    assert_close(residual, total.to(dtype))
    kept = residual.float()
    expected = kept * (kept.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.float()
    assert_close(out, expected.to(dtype))
    out, of_tiles = add_outputs(parts, choices, shared, before, norm, 1e-6, half=True)
    assert of_tiles is not None
    assert_close(before, residual)
    assert_close(out, (kept * norm.float()).to(dtype))
    assert_close(of_tiles.sum(0), before.float().square().sum(1))
