"""Layers of experts give with Hopper's kernels what they give without, also in a CUDA graph."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.kernel_choice import has_expert_kernels
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.weight_format import CONVERTED_FP8, Rule, WeightFormat, WeightFormats
from tests.conformance.checkpoints import CONTEXT, write_checkpoint
from tests.gpu.compare import assert_close

pytestmark = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")


@pytest.mark.parametrize(
    ("case", "hidden_size", "inner_size", "latent_size"),
    [
        ("nemotron-h-experts", 2688, 1856, None),
        ("nemotron-h-latent", 1024, 480, 512),
        ("deepseek-v3", 1024, 256, None),
        ("deepseek-v2", 1024, 256, None),
        ("llama4", 640, 384, None),
    ],
)
@pytest.mark.parametrize(
    "form", [None, CONVERTED_FP8, replace(CONVERTED_FP8, block=(1, None))], ids=str
)
def test_layers_behind_kernels(
    case: str,
    hidden_size: int,
    inner_size: int,
    latent_size: int | None,
    form: WeightFormat | None,
    device: torch.device,
    tmp_path: Path,
) -> None:
    """Without gates, with a latent, behind a router that limits groups, and with weights that scale
    inputs; DeepSeek's expert that all tokens take is one more choice of few tokens."""
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts

    write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)
    assert spec.moe is not None and spec.moe.experts.shared is not None
    is_gated = spec.moe.experts.gate is not None
    of_all = inner_size if is_gated else 2 * inner_size
    experts = replace(
        spec.moe.experts,
        intermediate_size=inner_size,
        latent_size=latent_size,
        shared=replace(spec.moe.experts.shared, intermediate_size=of_all),
        routing=replace(spec.moe.experts.routing, in_float32=True),
    )
    spec = replace(spec, hidden_size=hidden_size, moe=replace(spec.moe, experts=experts))
    if form is not None:
        rules = (Rule(re.compile(r".*experts\..*_proj"), form),)
        spec = replace(spec, weights=WeightFormats("test", rules))
    model = build_model(
        spec,
        tmp_path,
        dtype=torch.bfloat16,
        device=device,
        group=OneRank(),
        load_format="dummy",
        max_sequence_length=CONTEXT,
        kernels=KernelChoices(
            keep_quantized=True,
            fused_experts=True,
            keeps_experts=lambda form: has_expert_kernels(form, spec, 1),
        ),
    )
    modules = [module for module in model.modules() if isinstance(module, ExpertsMLP)]
    module, norm, kernels = modules[-1], RMSNorm(hidden_size, 1e-6), HopperExperts(device)
    norm.weight.data = torch.ones(hidden_size, dtype=torch.bfloat16, device=device)
    # choices count differently, and no logit is rounded, which would change choices
    module.router.weight.data = (4 * module.router.weight.data).bfloat16()

    def compute(x: Tensor, *, pdl: bool) -> Tensor:
        """The residual stream, its norm, and what is added to it."""
        residual, normed = module(2 * x, Normed(x), norm, pdl=pdl)
        return torch.stack([residual, normed.x, module.part(Normed(x), pdl=pdl)])

    all_rows = [
        torch.randn(num_tokens, hidden_size, device=device).bfloat16()
        for num_tokens in (1, 2, 4, 5, 8, 9, 64, 300, 2000)
    ]
    with torch.inference_mode():
        expected = [compute(rows, pdl=False) for rows in all_rows]
        module.use_kernels(kernels)
        assert (module.weights.kinds is None) == (form is None)
        assert module.memory.has_shared == case.startswith("deepseek")
        for rows, whole in zip(all_rows, expected, strict=True):
            for pdl in (False, True):
                found = compute(rows, pdl=pdl)
                apart = (found - whole).float().norm(dim=-1) / whole.float().norm(dim=-1)
                assert apart.median() < (0.02 if form is None else 0.08)  # tokens are rounded
                assert (apart > 0.2).float().mean() < 0.01  # those whose scores nearly tie
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                compute(rows, pdl=True)
                stream.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    replayed = compute(rows, pdl=True)
                graph.replay()
                graph.replay()
            stream.synchronize()
            assert_close(replayed, found)
