"""A small Qwen3 language model for training, with the parameter names of a Hugging Face folder.

It holds what training needs and nothing else: no cache, no padding. Scoring loads the folder with
transformers' own class, so a slip here would show there. Must not know text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocabulary: int = 2048
    hidden: int = 240
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    rope_theta: float = 1_000_000.0
    epsilon: float = 1e-6
    context: int = 8192

    def hf_config(self) -> dict[str, object]:
        """The folder's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "max_window_layers": self.layers,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": 0,
            "rms_norm_eps": self.epsilon,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, -1, self._shape.head_dim).float())
        k = self.k_norm(self.k_proj(x).view(rows, length, -1, self._shape.head_dim).float())
        v = self.v_proj(x).view(rows, length, -1, self._shape.head_dim)
        repeat = self._shape.heads // self._shape.kv_heads
        q, k = _rotate(q, cos, sin).type_as(v), _rotate(k, cos, sin).type_as(v)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.repeat_interleave(repeat, 2).transpose(1, 2),
            v.repeat_interleave(repeat, 2).transpose(1, 2),
            is_causal=True,
        )
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return result


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)


class DemoModel(nn.Module):
    """Qwen3 with tied embeddings."""

    inverse_frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = shape.rope_theta**-exponents
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale /= (2 * shape.layers) ** 0.5
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Logits of the next token at every place, or at the wanted places only.

        Positions need not be consecutive; wanted holds indices into the flattened tokens.
        """
        angles = positions[..., None].float() * self.inverse_frequencies
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        if wanted is not None:
            x = x.flatten(0, 1)[wanted]
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
