"""`minisgl bench dummy-model`: the folder of a model, without weights, for ``load_format=dummy``.

config.json has the published shape of a model that is known here by name, or is a given one. The
tokenizer is the demo model's, with made-up words for the ids that it lacks; no merge produces them,
so they occur only in outputs. The same shape makes the same files.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any, Final

import click

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.config_json import read_json

_QWEN3: Final = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,  # the demo model's tokenizer says so
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_LATENTS: Final = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
}
_QWEN3_5: Final = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 248320,
}
"""The text part of Qwen3.5 and Qwen3.6."""
_GEMMA: Final = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_GEMMA_4: Final = {
    **_GEMMA,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "vocab_size": 262144,
}
"""The text part."""
_LARGE_GEMMA_4: Final = {
    **_GEMMA_4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
}
"""Those without inputs for each layer."""
_NEMOTRON: Final = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "pad_token_id": 0,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 131072,
}

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen3-235b-a22b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 2,  # the demo model's tokenizer says so
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": 0,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    },
    "qwen3.6-27b": {
        **_QWEN3_5,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
    },
    "qwen3.6-35b-a3b": {
        **_QWEN3_5,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    "gemma-3-27b": {
        **_GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "vocab_size": 262208,
    },
    "gemma-4-e4b": {
        **_GEMMA_4,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma-4-31b": {
        **_LARGE_GEMMA_4,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
    },
    "gemma-4-26b-a4b": {
        **_LARGE_GEMMA_4,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
    "nemotron-nano-9b": {
        **_NEMOTRON,
        "hidden_size": 4480,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "intermediate_size": 15680,
        "mamba_head_dim": 80,
        "mamba_num_heads": 128,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_hidden_layers": 56,
        "num_key_value_heads": 8,
    },
    "nemotron-3-nano-30b-a3b": {
        **_NEMOTRON,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_routed_experts": 128,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
    "granite-4-h-7b-a1b": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "logits_scaling": 6,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "pad_token_id": 0,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 100352,
    },
    "olmo-hybrid-7b": {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 96,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
        "num_attention_heads": 30,
        "num_hidden_layers": 32,
        "num_key_value_heads": 30,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 100352,
    },
    "kimi-linear-48b-a3b": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "eos_token_id": 2,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "ling-3.0-flash": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "eos_token_id": 2,
        "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
        "first_k_dense_replace": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "kv_lora_rank": 512,
        "layer_group_size": 6,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 768,
        "n_group": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 42,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "pad_token_id": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6e6,
        "routed_scaling_factor": 2.5,
        "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
        "short_conv_kernel_size": 4,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 157184,
    },
    "glm-4.7-flash": {
        **_LATENTS,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "intermediate_size": 10240,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "deepseek-v2-lite": {
        **_LATENTS,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "intermediate_size": 10944,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek-v3.2": {
        **_LATENTS,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "glm-5": {
        **_LATENTS,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 3,
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "hy4": {
        **_LATENTS,
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "hc_mult": 4,
        "hidden_size": 2816,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "index_topk": 2048,
        "intermediate_size": 6912,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 768,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 32,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "routed_scaling_factor": 2.827,
        "swiglu_limit": 10.0,
        "v_head_dim": 256,
        "vocab_size": 120832,
    },
}
"""config.json of each model."""

_EAGLE3: Final = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "draft_vocab_size": 32000,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
LAYERS: Final[dict[str, dict[str, Any]]] = {
    "eagle3-qwen3-0.6b": {
        **_EAGLE3,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "eagle3-qwen3-14b": {
        **_EAGLE3,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "eagle3-qwen3-30b-a3b": {
        **_EAGLE3,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "eagle3-gpt-oss-20b": {
        **_EAGLE3,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 17280,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "vocab_size": 201088,
    },
}
"""config.json of EAGLE-3 layers for some of these models, for ``speculative_mtp_model``."""

_PLAIN: Final = ["lm_head"]
FORMATS: Final[dict[str, dict[str, Any]]] = {
    "fp8-blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": _PLAIN,
    },
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": _PLAIN,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
            }
        },
    },
    "int8-gptq": {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True},
    "int4-gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "int4-awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _PLAIN,
    },
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": [*_PLAIN, "*gate", "*router"],
    },
}
"""The ``quantization_config`` of checkpoints in the most common formats."""

_WORD_LENGTHS: Final = (2, 8)
_COPIED: Final = ("tokenizer_config.json", "generation_config.json")


def write_dummy_model(
    shape: str | Path, folder: Path, weights: str | None = None, layers: int | None = None
) -> None:
    """Write the files of ``shape`` into ``folder``, which is made. It is one of ``SHAPES``, or a
    config.json. ``weights`` is one of ``FORMATS``, or None for those that config.json names.
    ``layers``: the model has only its first layers.

    Raises ``ConfigError`` for a model that cannot be served or has fewer tokens than the tokenizer,
    and ``OSError`` if a file cannot be read or written.
    """
    demo = Path(DEMO_MODEL)
    tokenizer = json.loads((demo / "tokenizer.json").read_bytes())
    vocab = tokenizer["model"]["vocab"]
    config = read_json(shape) if isinstance(shape, Path) else dict(SHAPES[shape])
    if weights is not None:
        config["quantization_config"] = FORMATS[weights]
    if layers is not None:
        config["num_hidden_layers"] = layers
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    vocab_size = load_spec(folder).vocab_size
    if vocab_size < len(vocab):
        raise ConfigError(f"vocab_size is {vocab_size}, and the tokenizer has {len(vocab)} tokens")
    for name in _COPIED:
        (folder / name).write_bytes((demo / name).read_bytes())
    fill_vocabulary(vocab, vocab_size)
    _write_json(folder / "tokenizer.json", tokenizer)


def write_dummy_layer(name: str, folder: Path) -> None:
    """Write config.json of one of ``LAYERS`` into ``folder``, which is made. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", LAYERS[name])


def fill_vocabulary(vocab: dict[str, int], size: int) -> None:
    """Add words of lowercase letters, half of them after a space, until there are ``size``."""
    draw = random.Random(size)
    while len(vocab) < size:
        letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(*_WORD_LENGTHS)))
        vocab.setdefault(draw.choice(("", "Ġ")) + letters, len(vocab))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _name_or_file(_context: click.Context, argument: click.Parameter, value: str) -> str | Path:
    """One of ``SHAPES`` or ``LAYERS``, or a file."""
    if value in SHAPES or value in LAYERS:
        return value
    if not Path(value).is_file():
        names = ", ".join(sorted([*SHAPES, *LAYERS]))
        raise click.BadParameter(f"{value!r} is no file, and none of {names}", param=argument)
    return Path(value)


@click.command(
    "dummy-model",
    help="Write all but the weights of a model of SHAPE into FOLDER, for --load-format dummy. "
    f"SHAPE is a config.json, or one of {', '.join(sorted(SHAPES))}. "
    f"{', '.join(sorted(LAYERS))} are EAGLE-3 layers for --speculative-mtp-model.",
)
@click.argument("shape", callback=_name_or_file)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(sorted(FORMATS)),
    help="quantized so  [default: as config.json says]",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    help="only the first layers of a model that is too large  [default: all]",
)
def dummy_model(shape: str | Path, folder: Path, weights: str | None, layers: int | None) -> None:
    is_layer = isinstance(shape, str) and shape in LAYERS
    if is_layer and (weights, layers) != (None, None):
        raise click.UsageError("--weights and --layers are for whole models, not EAGLE-3 layers")
    try:
        if isinstance(shape, str) and is_layer:
            write_dummy_layer(shape, folder)
        else:
            write_dummy_model(shape, folder, weights, layers)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {folder}: {error.strerror}") from None
    option = "--speculative-mtp-model" if is_layer else "--model"
    click.echo(f"wrote {folder}: serve it with {option} {folder} --load-format dummy")


if __name__ == "__main__":
    dummy_model()
