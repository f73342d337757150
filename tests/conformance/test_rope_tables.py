"""The tables of cosines and sines equal those of transformers, bit for bit."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces, qk_norm_rope_store
from minisgl_backend.models.catalog import parse_spec
from minisgl_backend.models.rope import rotary_table
from minisgl_backend.models.spec import ModelSpec

_BASE: Final = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}

# As in the checkpoints' config.json, in the older spelling and in that of transformers 5.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "llama-2": {"max_position_embeddings": 4096},
    "llama-3": {"rope_theta": 500000.0, "max_position_embeddings": 8192},
    "llama-3.1": {
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "llama-4": {  # no frequency lies between those that are kept and those that are divided
        "rope_theta": 500000.0,
        "max_position_embeddings": 10485760,
        "rope_scaling": {
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "llama-3.2": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "vicuna-16k": {
        "max_position_embeddings": 4096,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
    "linear": {
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5},
    },
    "yarn-llama-2": {
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "qwen2.5-yarn": {
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "rope_type": "yarn",
        },
    },
    "yarn-mscale": {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn-untruncated": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "truncate": False,
            "attention_factor": 1.1,
            "original_max_position_embeddings": 4096,
        },
    },
    "dynamic": {
        "max_position_embeddings": 2048,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_are_equal(name: str, head_dim: int) -> None:
    values = {**_BASE, "head_dim": head_dim, **VARIANTS[name]}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**values))
    spec = _spec(values)
    num_positions = min(spec.rope.max_positions, 20000)
    table = rotary_table(spec.rope, head_dim, num_positions, torch.device("cpu"))
    cos, sin = table.chunk(2, dim=1)  # [num_positions, head_dim / 2]
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
    # theirs are there twice, once for each half of a head
    assert torch.equal(torch.cat([cos, cos], dim=1), their_cos.squeeze(0))
    assert torch.equal(torch.cat([sin, sin], dim=1), their_sin.squeeze(0))


def test_dynamic_rotates_each_position_as_the_last_of_its_sequence() -> None:
    values = {**_BASE, "head_dim": 128, **VARIANTS["dynamic"]}
    spec, context = _spec(values), 2048
    table = rotary_table(spec.rope, 128, 3 * context, torch.device("cpu"))
    for position in (0, context - 1, context, context + 1, 3 * context - 1):
        theirs = Qwen3RotaryEmbedding(Qwen3Config(**values))
        cos, sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        assert torch.equal(table[position, :64].repeat(2), cos.flatten())
        assert torch.equal(table[position, 64:].repeat(2), sin.flatten())


def test_both_spellings_mean_the_same() -> None:
    old = {**_BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**_BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert _spec(old) == _spec(new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotation_turns_pairs_by_the_angle(dtype: torch.dtype) -> None:
    spec = _spec({**_BASE, "head_dim": 8})
    table = rotary_table(spec.rope, 8, 50, torch.device("cpu"))
    x = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(0))
    pages = torch.zeros(1, 50, 1, 8, dtype=dtype)
    turned = qk_norm_rope_store(
        torch.cat([x.flatten(1), torch.zeros(50, 16)], dim=1).to(dtype),  # one head of k, one of v
        TokenPlaces(torch.arange(50), torch.arange(50), table),
        PagedKV(keys=pages, values=pages.clone()),
        num_heads=3,
    )
    # A pair (i, i + 4) is a complex number; rotation multiplies it by exp(i * angle).
    angles = torch.atan2(table[:, 4:], table[:, :4]).unsqueeze(1)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert turned.dtype == dtype
    torch.testing.assert_close(turned[..., :4].float(), expected.real, atol=tolerance, rtol=0)
    torch.testing.assert_close(turned[..., 4:].float(), expected.imag, atol=tolerance, rtol=0)


def _spec(values: dict[str, Any]) -> ModelSpec:
    architecture = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "intermediate_size": 8}
    return parse_spec({**architecture, **values})
