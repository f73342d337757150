"""The experts' block equals that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from minisgl_backend.layers.feed_forward import ExpertsMLP
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.parallel.group import OneRank


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize("fused", [True, False])
def test_equal_to_transformers(normalize: bool, top_k: int, num_tokens: int, fused: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalize,
    )
    theirs: Any = Qwen3MoeSparseMoeBlock(config)
    ours = ExpertsMLP(
        "mlp",
        32,
        24,
        num_experts=8,
        top_k=top_k,
        normalize=normalize,
        fused=fused,
        group=OneRank(),
        matrices=Matrices(lambda name: None, lambda form: False, lambda form: False, fused=fused),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, other in (
            ("gate", theirs.gate.weight),
            ("gate_up", theirs.experts.gate_up_proj),
            ("down", theirs.experts.down_proj),
        ):
            mine = ours.get_parameter(name)
            mine.normal_(std=0.3, generator=generator)
            other.copy_(mine)
        x = torch.randn(num_tokens, 32, generator=generator)
        expected = theirs(x.unsqueeze(0)).squeeze(0)
        torch.testing.assert_close(ours.part(x), expected, atol=1e-5, rtol=1e-5)
