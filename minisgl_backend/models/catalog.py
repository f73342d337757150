"""The architectures that can be served, and the spec of a checkpoint folder.

An architecture is a function from its config.json to a ``ModelSpec``. Reads config.json and
generation_config.json, and by ``quantization`` how weights are stored. Code that comes with a
checkpoint is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.attention.base import KVHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ClampedGate, ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.checkpoint import has_head, is_headless
from minisgl_backend.models.config_json import ConfigReader, common_fields, read_json, read_rope
from minisgl_backend.models.quantization import modelopt_file, read_quantization
from minisgl_backend.models.spec import (
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_WIDTH,
    DeltaSpec,
    LayerInputs,
    ModelSpec,
    MoeSpec,
    RopeSpec,
)
from minisgl_backend.models.tensor_names import MULTIMODAL, TensorNames


def load_spec(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in ``folder``; ``ConfigError`` if it cannot be served."""
    spec = parse_spec(read_json(folder / "config.json"), modelopt_file(folder))
    generation = folder / "generation_config.json"
    if generation.exists():
        config = ConfigReader(read_json(generation), "generation_config.json")
        eos = spec.eos_token_ids | set(config.integers("eos_token_id"))
        spec = replace(spec, eos_token_ids=eos)
    if not spec.tie_embeddings and is_headless(folder):
        spec = replace(spec, tie_embeddings=True, generates=False)
    if spec.names.multimodal and spec.tie_embeddings and has_head(folder, spec.names):
        # config.json of these checkpoints leaves the flag out even if they have a head
        spec = replace(spec, tie_embeddings=False)
    return spec


def parse_spec(values: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec that a parsed config.json describes, with ModelOpt's own file if there is one;
    ``ConfigError`` if it cannot be served."""
    config = ConfigReader(values)
    weights = read_quantization(config, modelopt)
    names = config.values.get("architectures") or ["no architecture"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error("architectures", "a list of names", names)
    known = [name for name in names if name in ARCHITECTURES]
    if "auto_map" in config.values and not _WITH_NEEDLESS_CODE.intersection(known):
        raise ConfigError("the checkpoint brings its own code (auto_map), which is never run")
    if not known:
        raise ConfigError(
            f"{', '.join(names)} is not supported; supported are " + ", ".join(ARCHITECTURES)
        )
    return replace(ARCHITECTURES[known[0]](config), weights=weights)


def read_llama(config: ConfigReader) -> ModelSpec:
    """``LlamaForCausalLM``, Llama 2 and 3: biases are optional, and then on all projections."""
    bias = config.flag("attention_bias")
    return ModelSpec(
        architecture="LlamaForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        **common_fields(config),
    )


def read_mistral(config: ConfigReader) -> ModelSpec:
    """``MistralForCausalLM``; ``sliding_window`` null means none, as versions since 0.2 have it."""
    fields = common_fields(config)
    window = config.integer_or_null("sliding_window", 4096)
    fields["windows"] = (window,) * fields["num_layers"]
    return ModelSpec(architecture="MistralForCausalLM", **fields)


def read_qwen2(config: ConfigReader) -> ModelSpec:
    """``Qwen2ForCausalLM``, which Qwen2.5 uses too: biases on queries, keys and values, and
    possibly a sliding window on the upper layers."""
    fields = common_fields(config)
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen2ForCausalLM", qkv_bias=True, **fields)


def read_qwen3(config: ConfigReader) -> ModelSpec:
    """``Qwen3ForCausalLM``: as Qwen2, but queries and keys are normalized by head. head_dim is 128
    unless given, whatever the hidden size."""
    fields = _qwen3_fields(config, head_dim=128)
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen3ForCausalLM", **fields)


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen3MoeForCausalLM``: experts on every ``decoder_sparse_step``-th layer."""
    fields = _qwen3_fields(config)
    num_layers = fields["num_layers"]
    if config.flag("use_sliding_window"):
        fields["windows"] = (config.integer_or_null("sliding_window", 4096),) * num_layers
    experts = ExpertsSpec(
        routing=_routing(config, 128, 8, normalize=config.flag("norm_topk_prob")),
        intermediate_size=config.integer("moe_intermediate_size", 768, maximum=MOST_WIDTH),
    )
    moe = MoeSpec(experts=experts, layers=_qwen_expert_layers(config, num_layers))
    return ModelSpec(architecture="Qwen3MoeForCausalLM", moe=moe, **fields)


def read_qwen2_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen2MoeForCausalLM``, Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts beside one that
    all tokens take, which is gated."""
    config = config.with_defaults(max_position_embeddings=2**15)
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    if config.flag("use_sliding_window"):
        raise ConfigError(f"{config.where}: use_sliding_window is not supported with experts")
    inner = config.integer("shared_expert_intermediate_size", 5632, maximum=MOST_WIDTH)
    experts = ExpertsSpec(
        routing=_routing(config, 60, 4, normalize=config.flag("norm_topk_prob")),
        intermediate_size=config.integer("moe_intermediate_size", 1408, maximum=MOST_WIDTH),
        shared=SharedExpert(name="shared_expert", intermediate_size=inner, gated=True),
    )
    return ModelSpec(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=config.flag("qkv_bias", True),
        moe=MoeSpec(experts=experts, layers=_qwen_expert_layers(config, num_layers)),
        **fields,
    )


def read_glm4_moe(config: ConfigReader) -> ModelSpec:
    """``Glm4MoeForCausalLM``, GLM-4.5 and GLM-4.6: experts by DeepSeek's router above the first
    layers, heads of which a half rotates, and perhaps norms of queries and keys."""
    rotated = {"partial_rotary_factor": 0.5, "max_position_embeddings": 2**17}
    config = config.with_defaults(rms_norm_eps=1e-5, **rotated)
    fields = common_fields(config, partial=True)
    num_layers = fields["num_layers"]
    drafting = config.integer("num_nextn_predict_layers", 1, minimum=0)
    left_out = tuple(f"model.layers.{num_layers + layer}." for layer in range(drafting))
    return ModelSpec(
        architecture="Glm4MoeForCausalLM",
        qkv_bias=config.flag("attention_bias"),
        qk_norm="head" if config.flag("use_qk_norm") else None,
        moe=_deepseek_experts(config, num_layers, first=1),
        names=TensorNames(left_out=left_out),
        **fields,
    )


def read_dots1(config: ConfigReader) -> ModelSpec:
    """``Dots1ForCausalLM``, dots.llm1: Qwen3's attention, and experts by DeepSeek's router."""
    fields = _qwen3_fields(config)
    num_layers = fields["num_layers"]
    window = _window_or_none(config)
    first = config.integer("max_window_layers", 62, minimum=0)
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(num_layers)
    ]
    fields["windows"] = _windows_by_kind(kinds, window)
    moe = _deepseek_experts(config, num_layers, first=0)
    return ModelSpec(architecture="Dots1ForCausalLM", moe=moe, **fields)


def read_mixtral(config: ConfigReader) -> ModelSpec:
    """``MixtralForCausalLM``: experts in every layer, whose weights always sum to 1."""
    config = config.with_defaults(
        rms_norm_eps=1e-5, rope_theta=1e6, num_key_value_heads=8, max_position_embeddings=2**17
    )
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    fields["windows"] = (_window_or_none(config),) * num_layers
    experts = ExpertsSpec(
        routing=_routing(config, 8, 2, normalize=True),
        intermediate_size=fields["intermediate_size"],
    )
    moe = MoeSpec(experts=experts, layers=frozenset(range(num_layers)))
    names = TensorNames(
        renamed=(
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        )
    )
    return ModelSpec(architecture="MixtralForCausalLM", moe=moe, names=names, **fields)


def read_ministral(config: ConfigReader) -> ModelSpec:
    """``MinistralForCausalLM``: Mistral with a window on the layers that ``layer_types`` names, by
    default on all."""
    fields = common_fields(config.with_defaults(num_key_value_heads=8))
    window, num_layers = config.integer_or_null("sliding_window", 4096), fields["num_layers"]
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers)
    kinds = kinds or ["sliding_attention"] * num_layers
    fields["windows"] = _windows_by_kind(kinds, window)
    return ModelSpec(architecture="MinistralForCausalLM", **fields)


def read_ministral3(config: ConfigReader) -> ModelSpec:
    """``Ministral3ForCausalLM``: Mistral whose queries grow with their position."""
    config = config.with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, max_position_embeddings=2**18
    )
    rope = config.part("rope_parameters")
    fields = common_fields(config)
    fields["windows"] = (_window_or_none(config),) * fields["num_layers"]
    fields["rope"] = replace(fields["rope"], query_growth=rope.number("llama_4_scaling_beta"))
    return ModelSpec(architecture="Ministral3ForCausalLM", **fields)


def read_mistral3(config: ConfigReader) -> ModelSpec:
    """``Mistral3ForConditionalGeneration``, the text part: Mistral Small 3.1 and later, and
    Ministral 3, as ``text_config`` says."""
    text = _text_config(config, tied=True)
    readers = {"mistral": read_mistral, "ministral3": read_ministral3}
    kind = text.word("model_type", "mistral")
    if kind not in readers:
        raise text.error("model_type", "one of " + ", ".join(readers), kind)
    spec = readers[kind](text)
    return replace(spec, architecture="Mistral3ForConditionalGeneration", names=MULTIMODAL)


def read_phi3(config: ConfigReader) -> ModelSpec:
    """``Phi3ForCausalLM``, Phi-3 and Phi-4: merged projections in the file, and in Phi-4-mini heads
    of which a part rotates."""
    fields = common_fields(_longrope(config.with_defaults(rms_norm_eps=1e-5)), partial=True)
    queries = fields["num_heads"] * fields["head_dim"]
    keys = fields["num_kv_heads"] * fields["head_dim"]
    inner = fields["intermediate_size"]
    merged = {
        ".self_attn.qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        ".mlp.gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    fields["windows"] = (_window_or_none(config),) * fields["num_layers"]
    return ModelSpec(architecture="Phi3ForCausalLM", names=TensorNames(merged=merged), **fields)


def _longrope(config: ConfigReader) -> ConfigReader:
    """The same with the one name for what Phi-3's config.json calls ``su``, ``yarn`` or
    ``longrope``."""
    values = {**config.values, **dict.fromkeys(config.nulls)}
    values.setdefault("original_max_position_embeddings", 4096)
    for key in ("rope_scaling", "rope_parameters"):
        table = dict(config.table(key))
        for name in ("type", "rope_type"):
            if table.get(name) in ("su", "yarn"):
                table[name] = "longrope"
        if table:
            values[key] = table
    return ConfigReader(values, config.where)


def read_olmo2(config: ConfigReader) -> ModelSpec:
    """``Olmo2ForCausalLM``: the outputs of attention and feed-forward are normalized, not their
    inputs, and queries and keys over all heads together."""
    return ModelSpec(architecture="Olmo2ForCausalLM", **_olmo_fields(config))


def read_olmo3(config: ConfigReader) -> ModelSpec:
    """``Olmo3ForCausalLM``: OLMo 2 with windows on three of four layers, whose rotation is not
    stretched."""
    config = config.with_defaults(rope_theta=5e5)
    by_kind, fields = _ropes_by_kind(config, _olmo_fields)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
        "full_attention" if (layer + 1) % 4 == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]
    given = by_kind.get("sliding_attention", {})
    local = read_rope(config, fields["rope"].max_positions, given=given)
    _set_kinds(fields, kinds, config.integer("sliding_window", 4096), local)
    return ModelSpec(architecture="Olmo3ForCausalLM", **fields)


def _olmo_fields(config: ConfigReader) -> dict[str, Any]:
    config = config.with_defaults(rms_norm_eps=1e-5)
    bias = config.flag("attention_bias")
    return {
        **common_fields(config),
        "norms": "after",
        "qk_norm": "token",
        "qkv_bias": bias,
        "output_bias": bias,
    }


def read_gemma3_text(config: ConfigReader) -> ModelSpec:
    """``Gemma3ForCausalLM``, also the text part of Gemma 3: norms on both sides of attention and
    feed-forward, windows on five of six layers, which have a rotation of their own."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.values.get(key):
            raise ConfigError(f"{config.where}: {key} {config.values[key]!r} is not supported")
    config = _gemma(config, vocab_size=262_208, num_hidden_layers=26, rope_theta=1e6)
    by_kind, fields = _ropes_by_kind(config, common_fields)
    every, num_layers = config.integer("sliding_window_pattern", 6), fields["num_layers"]
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]
    theta = config.number("rope_local_base_freq", 10_000.0)
    given = {"rope_theta": theta, **by_kind.get("sliding_attention", {})}
    local = read_rope(config, fields["rope"].max_positions, given=given)
    if fields["rope"].scaling == "linear":
        # here max_position_embeddings is the context after stretching
        unstretched = int(fields["rope"].max_positions / fields["rope"].factor)
        fields["rope"] = replace(fields["rope"], max_positions=unstretched)
    _set_kinds(fields, kinds, config.integer("sliding_window", 4096), local)
    bias = config.flag("attention_bias")
    return ModelSpec(
        architecture="Gemma3ForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norms="around",
        norm_offset=1.0,
        gelu=True,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields["hidden_size"] ** 0.5,
        **fields,
    )


def read_gemma3(config: ConfigReader) -> ModelSpec:
    """``Gemma3ForConditionalGeneration``, the text part."""
    spec = read_gemma3_text(_text_config(config, tied=True))
    return replace(spec, architecture="Gemma3ForConditionalGeneration", names=MULTIMODAL)


def read_gemma4_text(config: ConfigReader) -> ModelSpec:
    """``Gemma4ForCausalLM``, also the text part of Gemma 4: as Gemma 3, with wider heads in the
    layers without a window, and in smaller models layers that read the keys and values of others,
    and inputs of each layer's own."""
    if config.flag("enable_moe_block"):
        raise ConfigError(f"{config.where}: enable_moe_block, Gemma 4's experts, is not supported")
    config = _gemma(config, vocab_size=262_144, num_hidden_layers=30)
    by_kind, fields = _ropes_by_kind(config, common_fields)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(num_layers)
    ]
    most, of_full = fields["rope"].max_positions, by_kind.get("full_attention")
    wide = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    fields["rope"] = read_rope(config, most, given=of_full or wide)
    local = read_rope(config, most, given=by_kind.get("sliding_attention", {}))
    _set_kinds(fields, kinds, config.integer("sliding_window", 512), local)
    are_keys = config.flag("attention_k_eq_v")
    fields["kv_heads"] = _kv_heads_by_kind(config, fields, kinds, are_keys)
    first_reader = num_layers - config.integer("num_kv_shared_layers", 0, minimum=0)
    fields["kv_sources"] = _kv_sources(config, kinds, first_reader)
    if config.flag("use_double_wide_mlp"):
        inner = fields["intermediate_size"]
        fields["intermediate_sizes"] = tuple(
            inner if layer < first_reader else 2 * inner for layer in range(num_layers)
        )
    if size := config.integer("hidden_size_per_layer_input", 256, minimum=0):
        vocab_size = config.integer("vocab_size_per_layer_input", 262_144)
        if vocab_size < fields["vocab_size"]:
            least = f"at least vocab_size ({fields['vocab_size']})"
            raise config.error("vocab_size_per_layer_input", least, vocab_size)
        fields["layer_inputs"] = LayerInputs(size=size, vocab_size=vocab_size)
    is_capped = "final_logit_softcapping" in config.values
    full = frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    bias = config.flag("attention_bias")
    needless = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")  # some checkpoints have them
    left_out = tuple(
        f"model.{inside}layers.{layer}.self_attn.{name}"
        for layer in range(first_reader, num_layers)
        for name in needless
        for inside in ("", "language_model.")
    )
    return ModelSpec(
        architecture="Gemma4ForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        value_norm=True,
        keys_are_values=full if are_keys else frozenset(),
        norms="around",
        gelu=True,
        attention_scale=1.0,
        embedding_scale=fields["hidden_size"] ** 0.5,
        logit_cap=config.number("final_logit_softcapping") if is_capped else 0.0,
        scaled_layers=True,
        names=TensorNames(left_out=left_out),
        **fields,
    )


def read_gemma4(config: ConfigReader) -> ModelSpec:
    """``Gemma4ForConditionalGeneration``, the text part."""
    spec = read_gemma4_text(_text_config(config, tied=True))
    names = replace(MULTIMODAL, left_out=spec.names.left_out)
    return replace(spec, architecture="Gemma4ForConditionalGeneration", names=names)


def _gemma(config: ConfigReader, **defaults: object) -> ConfigReader:
    """With the defaults of Gemma 3 and 4, and without what neither text part has."""
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        value = config.values["use_bidirectional_attention"]
        raise ConfigError(f"{config.where}: use_bidirectional_attention {value!r} is not supported")
    activation = config.word("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise config.error("hidden_activation", "'gelu_pytorch_tanh'", activation)
    shape = {"hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    others = {"max_position_embeddings": 2**17, "tie_word_embeddings": True, "eos_token_id": 1}
    return config.with_defaults(**shape, **heads, **others, **defaults)


def _kv_heads_by_kind(
    config: ConfigReader, fields: Mapping[str, Any], kinds: Sequence[str], are_keys: bool
) -> tuple[KVHeads, ...]:
    """The heads of each layer: those without a window have sizes of their own, in the publisher's
    words or, by layer, in those of transformers."""
    narrow = KVHeads(fields["num_kv_heads"], fields["head_dim"])
    if listed := config.table("per_layer_config"):
        found = [narrow] * len(kinds)
        for layer in listed:
            own = config.part("per_layer_config").part(layer)
            found[int(layer)] = KVHeads(
                own.integer("num_key_value_heads", narrow.num_kv_heads, maximum=MOST_HEADS),
                own.integer("head_dim", narrow.head_dim, maximum=MOST_HEADS),
            )
        return tuple(found)
    num_wide = narrow.num_kv_heads
    if are_keys:
        num_wide = config.integer("num_global_key_value_heads", num_wide, maximum=MOST_HEADS)
    wide = KVHeads(num_wide, config.integer("global_head_dim", 512, maximum=MOST_HEADS))
    return tuple(wide if kind == "full_attention" else narrow for kind in kinds)


def _kv_sources(config: ConfigReader, kinds: Sequence[str], first_reader: int) -> tuple[int, ...]:
    """From ``first_reader`` on layers read the keys and values of the last one of their kind before
    it."""
    sources = list(range(len(kinds)))
    for layer in range(max(first_reader, 0), len(kinds)):
        own = [source for source in range(first_reader) if kinds[source] == kinds[layer]]
        if not own:
            raise ConfigError(
                f"{config.where}: num_kv_shared_layers leaves no layer of {kinds[layer]} with keys "
                "and values of its own"
            )
        sources[layer] = own[-1]
    return tuple(sources)


def _ropes_by_kind(
    config: ConfigReader, read: Callable[[ConfigReader], dict[str, Any]]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The tables of ``rope_parameters`` by kinds of attention, if they are told apart, and what
    ``read`` finds with that of layers without a window in their place."""
    by_kind = {
        kind: table
        for kind, table in config.table("rope_parameters").items()
        if kind in _ATTENTION_KINDS
    }
    if not by_kind:
        return by_kind, read(config)
    values = {**config.values, "rope_parameters": by_kind.get("full_attention", {})}
    return by_kind, read(ConfigReader(values, config.where))


def _set_kinds(fields: dict[str, Any], kinds: Sequence[str], window: int, local: RopeSpec) -> None:
    """Give the layers with a window that, and the rotation ``local``."""
    rope = fields["rope"]
    fields["windows"] = _windows_by_kind(kinds, window)
    fields["ropes"] = tuple(local if kind == "sliding_attention" else rope for kind in kinds)


def read_granite(config: ConfigReader) -> ModelSpec:
    """``GraniteForCausalLM``, Granite 3: Llama with multipliers."""
    bias = config.flag("attention_bias")
    return ModelSpec(
        architecture="GraniteForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        branch_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
        **common_fields(config),
    )


def read_smollm3(config: ConfigReader) -> ModelSpec:
    """``SmolLM3ForCausalLM``: Llama, of whose layers every fourth does not rotate."""
    config = config.with_defaults(
        rope_theta=2e6,
        num_key_value_heads=4,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
    )
    fields = common_fields(config)
    num_layers, bias = fields["num_layers"], config.flag("attention_bias")
    every = config.integer("no_rope_layer_interval", 4)
    rotates = config.integers("no_rope_layers") or [
        int((layer + 1) % every != 0) for layer in range(num_layers)
    ]  # 1 for layers that do rotate
    if len(rotates) < num_layers or not set(rotates) <= {0, 1}:
        raise config.error("no_rope_layers", f"{num_layers} of 0 and 1", rotates)
    fields["ropes"] = tuple(fields["rope"] if one else None for one in rotates[:num_layers])
    if config.flag("use_sliding_window"):
        window = _window_or_none(config)
        kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
            "full_attention" if one else "sliding_attention" for one in rotates[:num_layers]
        ]
        fields["windows"] = _windows_by_kind(kinds, window)
    return ModelSpec(
        architecture="SmolLM3ForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        **fields,
    )


def read_gpt_oss(config: ConfigReader) -> ModelSpec:
    """``GptOssForCausalLM``: attention with sinks, and with windows on every other layer; experts
    with biases and a gate of their own. config.json names no dtype: tensors that are not quantized
    are bfloat16."""
    config = config.with_defaults(
        torch_dtype="bfloat16",
        rms_norm_eps=1e-5,
        head_dim=64,
        max_position_embeddings=2**17,
        rope_theta=150_000.0,
    )
    if not config.table("rope_scaling") and not config.table("rope_parameters"):
        config = config.with_defaults(rope_scaling=dict(_GPT_OSS_ROPE))
    fields = common_fields(config)
    num_layers, bias = fields["num_layers"], config.flag("attention_bias", True)
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    fields["windows"] = _windows_by_kind(kinds, config.integer_or_null("sliding_window", 128))
    gate = ClampedGate(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    experts = ExpertsSpec(
        routing=_routing(config, 128, 4, normalize=True),
        intermediate_size=fields["intermediate_size"],
        gate=gate,
        biases=True,
        router="router",
        in_turn=True,
    )
    return ModelSpec(
        architecture="GptOssForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        moe=MoeSpec(experts=experts, layers=frozenset(range(num_layers))),
        names=TensorNames(keeps_stacks=True),
        **fields,
    )


_GPT_OSS_ROPE: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


def read_qwen3_5(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5ForCausalLM``: three of four layers are Gated DeltaNet, the others attention whose
    output is gated and of whose heads a quarter rotates."""
    config = config.with_defaults(num_key_value_heads=4, hidden_size=4096)
    fields, delta = _hybrid_fields(config)
    channels = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
    merged = {
        f".linear_attn.{module}": {f"{part}_{name}": size for name, size in channels.items()}
        for module, part in (("in_proj_qkv", "in_proj"), ("conv1d", "conv"))
    }
    names = TensorNames(merged=merged, left_out=("mtp.",))
    return ModelSpec(architecture="Qwen3_5ForCausalLM", names=names, **fields)


def read_qwen3_next(config: ConfigReader) -> ModelSpec:
    """``Qwen3NextForCausalLM``: the same, with experts on every ``decoder_sparse_step``-th layer
    and projections that are ordered by key heads."""
    config = config.with_defaults(num_key_value_heads=2, hidden_size=2048, intermediate_size=5632)
    fields, delta = _hybrid_fields(config, by_key_head=True)
    channels = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
    convolution = {f"conv_{name}": size for name, size in channels.items()}
    moe = MoeSpec(
        experts=_experts_beside_one(config, 512, 10, normalize=config.flag("norm_topk_prob", True)),
        layers=_qwen_expert_layers(config, fields["num_layers"]),
    )
    names = TensorNames(merged={".linear_attn.conv1d": convolution}, left_out=("mtp.",))
    return ModelSpec(architecture="Qwen3NextForCausalLM", moe=moe, names=names, **fields)


def _hybrid_fields(
    config: ConfigReader, *, by_key_head: bool = False
) -> tuple[dict[str, Any], DeltaSpec]:
    """Gated DeltaNet by the defaults of Qwen3-Next and later, and gated attention between; and the
    shape of the first, even if no layer has it."""
    config = config.with_defaults(head_dim=256, partial_rotary_factor=0.25)
    fields = common_fields(config, partial=True)
    num_layers, bias = fields["num_layers"], config.flag("attention_bias")
    every = config.integer("full_attention_interval", 4)
    kinds = config.layer_kinds("layer_types", _HYBRID_KINDS, num_layers) or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention"
        for layer in range(num_layers)
    ]
    linear = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    delta = DeltaSpec(
        num_key_heads=config.integer("linear_num_key_heads", 16, maximum=MOST_HEADS),
        num_heads=config.integer("linear_num_value_heads", 32, maximum=MOST_HEADS),
        key_dim=config.integer("linear_key_head_dim", 128, maximum=MOST_HEADS),
        value_dim=config.integer("linear_value_head_dim", 128, maximum=MOST_HEADS),
        conv_width=config.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MOST_HEADS),
        layers=linear,
        by_key_head=by_key_head,
    )
    if delta.num_heads % delta.num_key_heads:
        raise config.error(
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads ({delta.num_key_heads})",
            delta.num_heads,
        )
    more = {
        "qk_norm": "head",
        "qkv_bias": bias,
        "output_bias": bias,
        "gated_attention": True,
        "norm_offset": 1.0,
        "delta_net": delta if linear else None,
    }
    return fields | more, delta


def _experts_beside_one(
    config: ConfigReader, num_experts: int, top_k: int, *, normalize: bool
) -> ExpertsSpec:
    """Experts of Qwen3-Next and later, beside one for all tokens, which is gated."""
    shared = config.integer("shared_expert_intermediate_size", 512, maximum=MOST_WIDTH)
    return ExpertsSpec(
        routing=_routing(config, num_experts, top_k, normalize=normalize),
        intermediate_size=config.integer("moe_intermediate_size", 512, maximum=MOST_WIDTH),
        shared=SharedExpert(name="shared_expert", intermediate_size=shared, gated=True),
    )


def read_qwen3_5_multimodal(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5ForConditionalGeneration``, the text part: Qwen3.5 and later as they are shipped."""
    spec = read_qwen3_5(_text_config(config, tied=False))
    names = replace(MULTIMODAL, merged=spec.names.merged, left_out=spec.names.left_out)
    return replace(spec, architecture="Qwen3_5ForConditionalGeneration", names=names)


def read_qwen3_5_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5MoeForCausalLM``: the same with experts in every layer, beside one for all tokens,
    which is gated."""
    experts = _experts_beside_one(config, 256, 8, normalize=True)
    # no layer has a block of that width, so config.json does not name one
    defaults = {
        "intermediate_size": experts.intermediate_size,
        "hidden_size": 2048,
        "num_key_value_heads": 2,
    }
    spec = read_qwen3_5(config.with_defaults(**defaults))
    moe = MoeSpec(experts=experts, layers=frozenset(range(spec.num_layers)))
    return replace(spec, architecture="Qwen3_5MoeForCausalLM", moe=moe)


def read_qwen3_5_moe_multimodal(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5MoeForConditionalGeneration``, the text part."""
    spec = read_qwen3_5_moe(_text_config(config, tied=False))
    names = replace(MULTIMODAL, merged=spec.names.merged, left_out=spec.names.left_out)
    return replace(spec, architecture="Qwen3_5MoeForConditionalGeneration", names=names)


def _text_config(config: ConfigReader, *, tied: bool) -> ConfigReader:
    """``text_config``, with what checkpoints of this kind say outside of it; ``tied`` is the
    default of tie_word_embeddings."""
    text = config.part("text_config")
    outer: dict[str, Any] = {
        key: config.values[key]
        for key in ("dtype", "torch_dtype", "eos_token_id")
        if key in config.values
    }
    tie = config.flag("tie_word_embeddings", tied)
    nulls = dict.fromkeys(text.nulls)
    values: dict[str, Any] = {**outer, **text.values, **nulls, "tie_word_embeddings": tie}
    return ConfigReader(values, text.where)


def _qwen3_fields(config: ConfigReader, *, head_dim: int | None = None) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    fields = common_fields(config, head_dim=head_dim)
    return {**fields, "qk_norm": "head", "qkv_bias": bias, "output_bias": bias}


def _routing(config: ConfigReader, num_experts: int, top_k: int, *, normalize: bool) -> RoutingRule:
    """A softmax router; by default it takes ``top_k`` of ``num_experts`` experts."""
    default = config.integer("num_local_experts", num_experts, maximum=MOST_EXPERTS)
    return RoutingRule(
        num_experts=config.integer("num_experts", default, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", top_k),
        normalize=normalize,
    )


def _qwen_expert_layers(config: ConfigReader, num_layers: int) -> frozenset[int]:
    """The layers that have experts: every ``decoder_sparse_step``-th one."""
    step, plain = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return frozenset(
        layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in plain
    )


def _deepseek_experts(config: ConfigReader, num_layers: int, *, first: int) -> MoeSpec:
    """The experts of DeepSeek-V3 and of those that took its router over: sigmoids, corrected, in
    groups; and experts for all tokens, which are one wide one. By default from layer ``first`` on.
    """
    inner = config.integer("moe_intermediate_size", 1408, maximum=MOST_WIDTH)
    rule = RoutingRule(
        num_experts=config.integer("n_routed_experts", 128, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 8),
        normalize=config.flag("norm_topk_prob", True),
        sigmoid=True,
        corrected=True,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1, maximum=MOST_EXPERTS),
        top_groups=config.integer("topk_group", 1, maximum=MOST_EXPERTS),
    )
    num_shared = config.integer("n_shared_experts", 1, maximum=MOST_EXPERTS)
    shared = SharedExpert(name="shared_experts", intermediate_size=num_shared * inner)
    dense = config.integer("first_k_dense_replace", first, minimum=0)
    return MoeSpec(
        experts=ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared),
        layers=frozenset(range(dense, num_layers)),
    )


def _window_or_none(config: ConfigReader) -> int | None:
    """The window of all layers, none by default."""
    return config.integer("sliding_window") if "sliding_window" in config.values else None


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by ``layer_types``, else from ``max_window_layers`` upwards."""
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    window = config.integer_or_null("sliding_window", 4096)
    first = config.integer("max_window_layers", 28, minimum=0)
    kinds = config.layer_kinds("layer_types", _ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return _windows_by_kind(kinds, window)


def _windows_by_kind(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: ``window`` of those that slide, none of the others."""
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_HYBRID_KINDS: Final = ("linear_attention", "full_attention")
_ATTENTION_KINDS: Final = ("sliding_attention", "full_attention")

ARCHITECTURES: Final[Mapping[str, Callable[[ConfigReader], ModelSpec]]] = MappingProxyType(
    {
        "LlamaForCausalLM": read_llama,
        "MistralForCausalLM": read_mistral,
        "Qwen2ForCausalLM": read_qwen2,
        "Qwen3ForCausalLM": read_qwen3,
        "Qwen2MoeForCausalLM": read_qwen2_moe,
        "Qwen3MoeForCausalLM": read_qwen3_moe,
        "Glm4MoeForCausalLM": read_glm4_moe,
        "Dots1ForCausalLM": read_dots1,
        "Qwen3NextForCausalLM": read_qwen3_next,
        "Qwen3_5ForCausalLM": read_qwen3_5,
        "Qwen3_5ForConditionalGeneration": read_qwen3_5_multimodal,
        "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
        "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_moe_multimodal,
        "MinistralForCausalLM": read_ministral,
        "Ministral3ForCausalLM": read_ministral3,
        "Mistral3ForConditionalGeneration": read_mistral3,
        "MixtralForCausalLM": read_mixtral,
        "Phi3ForCausalLM": read_phi3,
        "Olmo2ForCausalLM": read_olmo2,
        "Olmo3ForCausalLM": read_olmo3,
        "Gemma3ForCausalLM": read_gemma3_text,
        "Gemma3ForConditionalGeneration": read_gemma3,
        "Gemma4ForCausalLM": read_gemma4_text,
        "Gemma4ForConditionalGeneration": read_gemma4,
        "GraniteForCausalLM": read_granite,
        "SmolLM3ForCausalLM": read_smollm3,
        "GptOssForCausalLM": read_gpt_oss,
    }
)
"""By the names of config.json."""

_WITH_NEEDLESS_CODE: Final = frozenset({"Phi3ForCausalLM"})
"""Architectures whose checkpoints bring code that says what transformers has had since."""
