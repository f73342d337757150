"""Gemma, Gemma 2, VaultGemma, and Gemma 3 and 4, text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.attention_spec import KVSpec, ScoresSpec
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_HEADS, MOST_POSITIONS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields, read_rope
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    check_supported,
    kinds_by_pattern,
    read_local_rope,
    read_ropes_by_kind,
    set_kinds,
    text_config,
    text_part,
    windows_by_kind,
)
from minisgl_backend.models.spec import LayerInputs, ModelSpec, MoeSpec, ScalesSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_gemma(config: ConfigReader) -> ModelSpec:
    """``GemmaForCausalLM``, the first Gemma: Llama with gates of GELU, also if config.json calls
    the exact one."""
    check_supported(config, {"use_bidirectional_attention": False})
    for key in ("hidden_act", "hidden_activation"):
        if (given := config.word(key, "gelu")) not in ("gelu", "gelu_pytorch_tanh"):
            raise config.error(key, "'gelu' or 'gelu_pytorch_tanh'", given)
    config = config.with_values(hidden_act="silu").with_defaults(
        head_dim=256,
        max_position_embeddings=8192,
        num_key_value_heads=16,
        tie_word_embeddings=True,
    )
    fields = common_fields(config)
    fields["norms"] = replace(fields["norms"], offset=1.0)
    return ModelSpec(
        architecture="GemmaForCausalLM",
        gate="gelu",
        scales=ScalesSpec(embedding=fields["hidden_size"] ** 0.5),
        biases=attention_biases(config),
        **fields,
    )


def read_gemma2(config: ConfigReader) -> ModelSpec:
    """``Gemma2ForCausalLM``: norms on both sides of attention and feed-forward, windows in every
    other layer, and bounded scores and logits."""
    config = _gemma(config.with_defaults(max_position_embeddings=8192), query_pre_attn_scalar=256)
    fields = common_fields(config.with_values(hidden_act="silu"))  # the other key counts
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or kinds_by_pattern(num_layers, 2)
    fields["windows"] = windows_by_kind(kinds, config.integer_or_null("sliding_window", 4096))
    fields["norms"] = replace(fields["norms"], place="around", offset=1.0)
    return ModelSpec(
        architecture="Gemma2ForCausalLM",
        gate="gelu",
        scores=ScoresSpec(
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            cap=_cap(config, "attn_logit_softcapping", 50.0),
        ),
        scales=ScalesSpec(
            embedding=fields["hidden_size"] ** 0.5,
            logit_cap=_cap(config, "final_logit_softcapping", 30.0),
        ),
        biases=attention_biases(config),
        **fields,
    )


def read_vaultgemma(config: ConfigReader) -> ModelSpec:
    """``VaultGemmaForCausalLM``: Gemma 2 with norms of inputs alone."""
    names = TensorNames(renamed=((".pre_feedforward_layernorm.", ".post_attention_layernorm."),))
    spec = read_gemma2(config)
    norms = replace(spec.norms, place="before")
    return replace(spec, architecture="VaultGemmaForCausalLM", norms=norms, names=names)


def _cap(config: ConfigReader, key: str, default: float) -> float:
    """A bound of scores or logits; 0 if it is null."""
    return 0.0 if key in config.nulls else config.number(key, default)


def read_gemma3_text(config: ConfigReader) -> ModelSpec:
    """``Gemma3ForCausalLM``, also the text part of Gemma 3: norms on both sides of attention and
    feed-forward, and windows in five of six layers, which have their own rotation."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.values.get(key):
            raise ConfigError(f"{config.where}: {key} {config.values[key]!r} is not supported")
    config = _gemma(config, vocab_size=262_208, num_hidden_layers=26, rope_theta=1e6)
    by_kind, fields = read_ropes_by_kind(config, common_fields)
    every, num_layers = config.integer("sliding_window_pattern", 6), fields["num_layers"]
    listed = config.layer_kinds(ATTENTION_KINDS, num_layers)
    kinds = listed or kinds_by_pattern(num_layers, every)
    theta = config.number("rope_local_base_freq", 10_000.0)
    given = {"rope_theta": theta, **by_kind.get("sliding_attention", {})}
    local = read_local_rope(config, fields["rope"].max_positions, given)
    if fields["rope"].scaling == "linear":
        # here max_position_embeddings is the context after stretching
        rope = fields["rope"]
        unstretched = rope.max_positions / rope.factor
        if not 1 <= unstretched <= MOST_POSITIONS:
            raise config.error("rope_scaling", f"a stretch of {rope.max_positions}", rope.factor)
        fields["rope"] = replace(rope, max_positions=int(unstretched))
    set_kinds(fields, kinds, config.integer("sliding_window", 4096), local)
    fields["norms"] = replace(fields["norms"], place="around", offset=1.0)
    return ModelSpec(
        architecture="Gemma3ForCausalLM",
        qk_norm="head",
        gate="gelu",
        scores=ScoresSpec(scale=config.number("query_pre_attn_scalar", 256) ** -0.5),
        scales=ScalesSpec(embedding=fields["hidden_size"] ** 0.5),
        biases=attention_biases(config),
        **fields,
    )


def read_gemma3(config: ConfigReader) -> ModelSpec:
    """``Gemma3ForConditionalGeneration``, the text part."""
    spec = read_gemma3_text(text_config(config, tied=True))
    return text_part(spec, "Gemma3ForConditionalGeneration")


def read_gemma4_text(config: ConfigReader) -> ModelSpec:
    """``Gemma4ForCausalLM``, also the text part of Gemma 4: like Gemma 3, with wider heads in the
    layers without a window. Smaller models have layers that read the keys and values of others, and
    inputs for each layer; another model has experts beside each feed-forward block."""
    config = _gemma(config, vocab_size=262_144, num_hidden_layers=30)
    by_kind, fields = read_ropes_by_kind(config, common_fields)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or kinds_by_pattern(num_layers, 6)
    kinds = [*kinds[:-1], "full_attention"]  # whatever config.json says, as in transformers
    most, of_full = fields["rope"].max_positions, by_kind.get("full_attention")
    wide = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    fields["rope"] = read_rope(config, most, given=of_full or wide)
    local = read_local_rope(config, most, by_kind.get("sliding_attention", {}))
    set_kinds(fields, kinds, config.integer("sliding_window", 512), local)
    are_keys = config.flag("attention_k_eq_v")
    fields["heads_by_layer"] = _heads_by_kind(config, fields["heads"], kinds, are_keys)
    first_reader = num_layers - config.integer("num_kv_shared_layers", 0, minimum=0)
    if config.flag("use_double_wide_mlp"):
        inner = fields["intermediate_size"]
        fields["intermediate_sizes"] = tuple(
            inner if layer < first_reader else 2 * inner for layer in range(num_layers)
        )
    fields["layer_inputs"] = _layer_inputs(config, fields["vocab_size"])
    if config.flag("enable_moe_block"):
        fields["moe"] = _experts_beside(config, num_layers)
    fields["norms"] = replace(fields["norms"], place="around")
    is_capped = "final_logit_softcapping" in config.values
    full = frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return ModelSpec(
        architecture="Gemma4ForCausalLM",
        qk_norm="head",
        kv=KVSpec(
            sources=_kv_sources(config, kinds, first_reader),
            value_norm=True,
            keys_are_values=full if are_keys else frozenset(),
        ),
        gate="gelu",
        scores=ScoresSpec(scale=1.0),
        scales=ScalesSpec(
            embedding=fields["hidden_size"] ** 0.5,
            logit_cap=config.number("final_logit_softcapping") if is_capped else 0.0,
        ),
        scaled_layers=True,
        names=TensorNames(left_out=_unused_kv_names(range(first_reader, num_layers))),
        biases=attention_biases(config),
        **fields,
    )


def read_gemma4(config: ConfigReader) -> ModelSpec:
    """``Gemma4ForConditionalGeneration``, the text part."""
    spec = read_gemma4_text(text_config(config, tied=True))
    return text_part(spec, "Gemma4ForConditionalGeneration")


def read_gemma4_unified_text(config: ConfigReader) -> ModelSpec:
    """``Gemma4UnifiedForCausalLM``: Gemma 4 without inputs for each layer, and by default with
    wider windows and a longer context."""
    defaults = {"sliding_window": 1024, "max_position_embeddings": 2**18}
    config = config.with_defaults(hidden_size_per_layer_input=0, **defaults)
    return replace(read_gemma4_text(config), architecture="Gemma4UnifiedForCausalLM")


def read_gemma4_unified(config: ConfigReader) -> ModelSpec:
    """``Gemma4UnifiedForConditionalGeneration``, the text part: Gemma 4 12B, which takes images and
    audio without an encoder."""
    spec = read_gemma4_unified_text(text_config(config, tied=True))
    return text_part(spec, "Gemma4UnifiedForConditionalGeneration")


def _gemma(config: ConfigReader, **defaults: object) -> ConfigReader:
    """The config with the defaults of Gemma 2, 3 and 4, checked for what no text part has."""
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


def _layer_inputs(config: ConfigReader, vocab_size: int) -> LayerInputs | None:
    size = config.integer("hidden_size_per_layer_input", 256, minimum=0)
    if not size:
        return None
    own_vocab_size = config.integer("vocab_size_per_layer_input", 262_144)
    if own_vocab_size < vocab_size:
        least = f"at least vocab_size ({vocab_size})"
        raise config.error("vocab_size_per_layer_input", least, own_vocab_size)
    return LayerInputs(size=size, vocab_size=own_vocab_size)


def _experts_beside(config: ConfigReader, num_layers: int) -> MoeSpec:
    """Gemma 4's experts, beside the feed-forward block of every layer."""
    routing = RoutingRule(
        num_experts=config.integer("num_experts", maximum=MOST_EXPERTS),
        top_k=config.integer("top_k_experts"),
        normalize=True,
        scaled=True,
    )
    experts = ExpertsSpec(
        routing=routing,
        intermediate_size=config.integer("moe_intermediate_size", maximum=MOST_WIDTH),
        gate="gelu",
        router="router.proj",
    )
    return MoeSpec(experts=experts, layers=frozenset(range(num_layers)), beside=True)


def _unused_kv_names(readers: Iterable[int]) -> tuple[str, ...]:
    """The tensors for keys and values of layers that read those of other layers; some checkpoints
    have them."""
    return tuple(
        f"model.layers.{layer}.self_attn.{name}"
        for layer in readers
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )


def _heads_by_kind(
    config: ConfigReader, narrow: LayerHeads, kinds: Sequence[str], are_keys: bool
) -> tuple[LayerHeads, ...]:
    """The heads of each layer, which are ``narrow`` by default. Layers without a window have their
    own sizes, in the publisher's spelling or, by layer, in that of transformers."""
    if listed := config.table("per_layer_config"):
        found = [narrow] * len(kinds)
        for layer in listed:  # transformers pads all to the number of digits of the last: "05"
            if not re.fullmatch("[0-9]{1,9}", layer) or int(layer) >= len(kinds):
                raise config.error(
                    "per_layer_config", f"by layers, from 0 to {len(kinds) - 1}", layer
                )
            own = config.part("per_layer_config").part(layer)
            if others := sorted(own.values.keys() - {"num_key_value_heads", "head_dim"}):
                raise ConfigError(f"{own.where}: {others[0]} is not supported for single layers")
            found[int(layer)] = LayerHeads(
                narrow.num_heads,
                own.integer("num_key_value_heads", narrow.num_kv_heads, maximum=MOST_HEADS),
                own.integer("head_dim", narrow.head_dim, maximum=MOST_HEADS),
            )
        return tuple(found)
    num_wide = narrow.num_kv_heads
    if are_keys:
        num_wide = config.integer("num_global_key_value_heads", num_wide, maximum=MOST_HEADS)
    of_wide = config.integer("global_head_dim", 512, maximum=MOST_HEADS)
    wide = LayerHeads(narrow.num_heads, num_wide, of_wide)
    return tuple(wide if kind == "full_attention" else narrow for kind in kinds)


def _kv_sources(config: ConfigReader, kinds: Sequence[str], first_reader: int) -> tuple[int, ...]:
    """From ``first_reader`` on, layers read the keys and values of the last layer of their kind
    before it."""
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
