"""The experts' block equals that of transformers, on one rank and as the sum of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Dots1Config,
    GptOssConfig,
    Llama4TextConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.dots1.modeling_dots1 import Dots1MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, GateLimits, RoutingRule, SharedExpert
from minisgl_backend.gates import ClampedGate, Gate
from minisgl_backend.kernels.routing import choose
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import collect_places
from minisgl_backend.parallel.group import Group, OneRank
from tests.conformance.checkpoints import limit_gates

HIDDEN_SIZE, INNER_SIZE, NUM_EXPERTS = 32, 24, 8


class RankAlone(OneRank):
    """One of several ranks; the test adds up their parts itself."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def block(
    spec: ExpertsSpec, group: Group, *, fused: bool = False, whole_experts: bool = False
) -> ExpertsMLP:
    return ExpertsMLP(
        "mlp",
        HIDDEN_SIZE,
        spec,
        fused=fused,
        whole_experts=whole_experts,
        group=group,
        matrices=Matrices(
            lambda name: None,
            keep_quantized=False,
            keeps_experts=lambda form: False,
            fused=fused,
            takes=lambda form, out_features, in_features: True,
        ),
    )


def spec_of(top_k: int = 3, **changes: Any) -> ExpertsSpec:
    rule = {"num_experts": NUM_EXPERTS, "top_k": top_k, "normalize": True, **changes}
    return ExpertsSpec(routing=RoutingRule(**rule), intermediate_size=INNER_SIZE)


def drawn(kind: Any, config: Any) -> nn.Module:
    """A transformers block with random weights."""
    module: nn.Module = kind(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.detach().normal_(std=0.3, generator=generator)
    return module


def fill(ours: ExpertsMLP, theirs: Any) -> None:
    """Give ours the weights of a transformers block, by the names of checkpoints."""
    state = theirs.state_dict()
    inner = ("up",) if ours.spec.gate is None else ("gate", "up")
    gate_up = state.pop(f"experts.{'_'.join(inner)}_proj")
    down = state.pop("experts.down_proj")
    if "shared_expert.up_proj.weight" in state and "router.weight" in state:  # Llama 4
        gate_up, down = gate_up.mT, down.mT
    if "router.bias" in state:  # gpt-oss: transposed, gates and ups alternate
        gate_up = torch.cat([gate_up[:, :, ::2], gate_up[:, :, 1::2]], dim=2).mT
        down = down.mT
    for expert in range(NUM_EXPERTS):
        parts = dict(zip(inner, gate_up[expert].chunk(len(inner)), strict=True))
        for part, weight in {**parts, "down": down[expert]}.items():
            state[f"experts.{expert}.{part}_proj.weight"] = weight
    places = collect_places(ours)
    for name, place in places.items():
        place.draw(state[name])
    left = state.keys() - places.keys()
    assert all(any(name.startswith(f"{e[4:]}.") for e in ours.memory.elsewhere()) for name in left)


def check(theirs: Any, spec: ExpertsSpec, x: Tensor, *, fused: bool = False) -> None:
    with torch.no_grad():
        expected = theirs(x.unsqueeze(0))
        expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(x.shape)
        ours = block(spec, OneRank(), fused=fused)
        fill(ours, theirs)
        torch.testing.assert_close(ours.part(Normed(x), pdl=False), expected, atol=1e-5, rtol=1e-5)
        for whole_experts in (False, True):
            total = torch.zeros_like(x)
            for rank in range(4):
                part = block(spec, RankAlone(rank, 4), fused=fused, whole_experts=whole_experts)
                fill(part, theirs)
                total += part.part(Normed(x), pdl=False)
            torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[1, 2, 50], ids="{} tokens".format)
def x(request: pytest.FixtureRequest) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(request.param, HIDDEN_SIZE, generator=generator)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("fused", [True, False])
def test_softmax_router(normalize: bool, top_k: int, x: Tensor, fused: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INNER_SIZE,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalize,
    )
    theirs = drawn(Qwen3MoeSparseMoeBlock, config)
    check(theirs, spec_of(top_k, normalize=normalize), x, fused=fused)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_shared_expert_with_a_gate(x: Tensor, gate: Gate) -> None:
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INNER_SIZE,
        shared_expert_intermediate_size=40,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        hidden_act="silu" if gate == "silu" else "gelu_pytorch_tanh",
    )
    theirs = drawn(Qwen2MoeSparseMoeBlock, config)
    shared = SharedExpert(name="shared_expert", intermediate_size=40, gated=True)
    spec = replace(spec_of(normalize=False), shared=shared, gate=gate)
    for fused in (False, True):
        check(theirs, spec, x, fused=fused)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)], ids="{0[1]} of {0[0]}".format)
def test_sigmoid_router_with_groups(normalize: bool, groups: tuple[int, int], x: Tensor) -> None:
    config = Dots1Config(
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INNER_SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    theirs = drawn(Dots1MoE, config)
    rule = RoutingRule(
        num_experts=NUM_EXPERTS,
        top_k=3,
        normalize=normalize,
        sigmoid=True,
        corrected=True,
        scale=2.5,
        num_groups=groups[0],
        top_groups=groups[1],
    )
    shared = SharedExpert(name="shared_experts", intermediate_size=2 * INNER_SIZE)
    check(theirs, ExpertsSpec(routing=rule, intermediate_size=INNER_SIZE, shared=shared), x)


@pytest.mark.parametrize("latent_size", [None, 20])
@pytest.mark.parametrize("fused", [True, False])
def test_experts_without_gates(x: Tensor, fused: bool, latent_size: int | None) -> None:
    config = NemotronHConfig(
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INNER_SIZE,
        moe_shared_expert_intermediate_size=2 * INNER_SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        moe_latent_size=latent_size,
    )
    theirs = drawn(NemotronHMoE, config)
    rule = RoutingRule(
        num_experts=NUM_EXPERTS, top_k=3, normalize=True, sigmoid=True, corrected=True
    )
    spec = ExpertsSpec(
        routing=rule,
        intermediate_size=INNER_SIZE,
        shared=SharedExpert(name="shared_experts", intermediate_size=2 * INNER_SIZE),
        gate=None,
        latent_size=latent_size,
    )
    check(theirs, spec, x, fused=fused)
    assert spec.num_weights(HIDDEN_SIZE) == sum(each.numel() for each in theirs.parameters())


def test_biases_and_a_clamped_gate(x: Tensor) -> None:
    config = GptOssConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INNER_SIZE,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        swiglu_limit=1.5,
    )
    theirs = drawn(GptOssMLP, config)
    spec = ExpertsSpec(
        routing=spec_of().routing,
        intermediate_size=INNER_SIZE,
        gate=ClampedGate(alpha=1.702, limit=1.5),
        biases=True,
        router="router",
    )
    check(theirs, spec, 3 * x)


@pytest.mark.parametrize(
    "limits",
    [
        GateLimits(of_experts=0.5, of_shared=0.25),
        GateLimits(of_experts=0.5),
        GateLimits(of_shared=0.25),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [True, False])
def test_limits_of_gates(x: Tensor, limits: GateLimits, fused: bool) -> None:
    """Of experts, of the one that all tokens take, or of both."""
    config = Dots1Config(
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INNER_SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    theirs = drawn(Dots1MoE, config)
    limit_gates(theirs, limits.of_experts, limits.of_shared)
    shared = SharedExpert(name="shared_experts", intermediate_size=INNER_SIZE)
    spec = replace(spec_of(sigmoid=True, corrected=True), shared=shared)
    check(theirs, spec.limited(limits), 3 * x, fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_multiply_inputs(x: Tensor, fused: bool) -> None:
    config = Llama4TextConfig(
        hidden_size=HIDDEN_SIZE, intermediate_size=INNER_SIZE, num_local_experts=NUM_EXPERTS
    )
    theirs = drawn(Llama4TextMoe, config)
    shared = SharedExpert(name="shared_expert", intermediate_size=INNER_SIZE)
    rule = RoutingRule(num_experts=NUM_EXPERTS, top_k=1, normalize=False, sigmoid=True)
    spec = ExpertsSpec(
        routing=rule,
        intermediate_size=INNER_SIZE,
        shared=shared,
        router="router",
        scales_inputs=True,
    )
    check(theirs, spec, 3 * x, fused=fused)
    with pytest.raises(ConfigError, match="num_experts_per_tok must be 1, got 2"):
        replace(spec, routing=replace(rule, top_k=2))


def test_logits_tell_apart_what_sigmoids_do_not() -> None:
    rule = RoutingRule(num_experts=3, top_k=1, normalize=False, sigmoid=True)
    found = choose(torch.tensor([[30.0, 40.0, 35.0]]), rule)
    assert (found.ids.tolist(), found.weights.tolist()) == ([[1]], [[1.0]])


def test_corrections_choose_among_scores_of_a_softmax() -> None:
    rule = RoutingRule(num_experts=3, top_k=2, normalize=True, corrected=True)
    logits, correction = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([-2.0, 0.0, 0.5])
    found = choose(logits, rule, correction)
    assert found.ids.tolist() == [[2, 1]]
    expected = logits[:, [2, 1]].softmax(dim=-1)
    torch.testing.assert_close(found.weights, expected)
    rare = choose(torch.tensor([[30.0, 1.0, 0.0]]), rule, correction)
    scores = torch.tensor([[-30.0, -29.0]]).exp()  # their sum is below the least one
    torch.testing.assert_close(rare.weights, scores / 1e-12)
    far = choose(torch.tensor([[200.0, 0.0, 0.0]]), rule, correction)
    assert far.weights.tolist() == [[0.0, 0.0]]  # not 0 / 0


def test_corrections_of_logits() -> None:
    """Sigmoids are far closer to each other than the logits that they are made of."""
    rule = RoutingRule(num_experts=3, top_k=1, normalize=False, sigmoid=True, corrected=True)
    logits, correction = torch.tensor([[9.0, 6.0, 5.0]]), torch.tensor([-1.0, 0.0, 0.5])
    assert choose(logits, rule, correction).ids.tolist() == [[2]]
    found = choose(logits, replace(rule, corrects_logits=True), correction)
    assert found.ids.tolist() == [[0]]
    torch.testing.assert_close(found.weights, logits[:, :1].sigmoid())


@pytest.mark.parametrize("sigmoid", [False, True])
def test_corrections_keep_the_precision_of_float32(sigmoid: bool) -> None:
    spec = spec_of(sigmoid=sigmoid, corrected=True)
    router = block(spec, OneRank()).router
    router.cast(torch.bfloat16)
    assert router.correction is not None
    assert router.correction.dtype == router.weight.dtype == torch.float32
    plain = block(spec_of(), OneRank()).router
    plain.cast(torch.bfloat16)
    assert plain.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "rule",
    [
        {"sigmoid": True},
        {"corrected": True},
        {"sigmoid": True, "corrected": True},
        {"in_float32": True},
    ],
    ids=" ".join,
)
def test_logits_are_wide_though_a_weight_that_allows_it_is_kept_in_16_bits(
    rule: dict[str, bool],
) -> None:
    router = block(spec_of(**rule), OneRank()).router
    router.cast(torch.bfloat16)
    weight, x = torch.randn(NUM_EXPERTS, HIDDEN_SIZE), torch.randn(5, HIDDEN_SIZE).bfloat16()
    for stored, dtype in ((weight, torch.float32), (weight.bfloat16(), torch.bfloat16)):
        router.weight.data = stored.float()
        expected = x.float() @ stored.float().T
        router.narrow(torch.bfloat16)
        assert router.weight.dtype == dtype
        assert torch.equal(router.weight.data, stored)
        logits = router.logits(x)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "a token cannot take 9 of 8 experts"),
        ({"num_groups": 3}, "1 of 3 groups of 8 experts"),
        ({"num_groups": 2, "top_groups": 3}, "3 of 2 groups of 8 experts"),
        ({"num_groups": 8}, "groups of a single expert"),
        ({"num_groups": 4, "top_k": 3}, "a token cannot take 3 of 2 experts"),
    ],
)
def test_rules_that_choose_nothing_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(**changes)


def test_experts_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the number of experts \(8\) .* 3 tensor-parallel"):
        block(spec_of(), RankAlone(0, 3), whole_experts=True)
