"""Hunyuan, dense and with experts: Llama whose queries and keys are normalized by head after they
were rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.bounds import MOST_POSITIONS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, check_supported
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {"use_qk_norm": True, "use_cla": False, "use_mla": False, "mlp_bias": False}
)
_SUPPORTED_OF_EXPERTS: Final[Mapping[str, object]] = MappingProxyType(
    {"use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "group_limited_greedy": False}
)
"""The only supported values of these keys."""
_NORMS: Final = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))


def read_hunyuan_dense(config: ConfigReader) -> ModelSpec:
    """``HunYuanDenseV1ForCausalLM``: Hunyuan 0.5B to 7B, Hunyuan-MT."""
    return ModelSpec(
        architecture="HunYuanDenseV1ForCausalLM",
        names=TensorNames(renamed=_NORMS),
        **_hunyuan_fields(config),
    )


def read_hunyuan_moe(config: ConfigReader) -> ModelSpec:
    """``HunYuanMoEV1ForCausalLM``, Hunyuan-A13B: experts in every layer, whose weights always sum
    to 1, and one that all tokens take. Numbers may be listed by layer, but are the same in all."""
    check_supported(config, _SUPPORTED_OF_EXPERTS)
    fields = _hunyuan_fields(config)
    inner = fields["intermediate_size"]
    supported = {"num_shared_expert": 1, "moe_intermediate_size": inner}
    given = {key: _in_all_layers(config, key, default=only) for key, only in supported.items()}
    check_supported(config.with_values(**given), supported)
    rule = RoutingRule(
        num_experts=_in_all_layers(config, "num_experts", "num_local_experts"),
        top_k=_in_all_layers(config, "moe_topk", "num_experts_per_tok"),
        normalize=True,
        in_float32=True,
    )
    shared = SharedExpert(name="shared_mlp", intermediate_size=inner)
    experts = ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
    return ModelSpec(
        architecture="HunYuanMoEV1ForCausalLM",
        moe=MoeSpec(experts=experts, layers=frozenset(range(fields["num_layers"]))),
        names=TensorNames(renamed=(*_NORMS, (".mlp.gate.wg.", ".mlp.gate."))),
        **fields,
    )


def _hunyuan_fields(config: ConfigReader) -> dict[str, Any]:
    check_supported(config, _SUPPORTED)
    if (norm := config.word("norm_type", "rms")) not in ("rms", "hf_rms"):
        raise ConfigError(f"{config.where}: norm_type {norm!r} is not supported, only 'rms'")
    config = config.with_defaults(rms_norm_eps=1e-5)
    if "attention_head_dim" in config.values:
        config = config.with_defaults(head_dim=config.values["attention_head_dim"])
    return {
        **_stretched_fields(config),
        "qk_norm": "rotated",
        "biases": attention_biases(config),
    }


def _in_all_layers(config: ConfigReader, *keys: str, default: int = 1) -> int:
    """A number, or a list of the same number for each layer, under the first of ``keys`` that is
    there."""
    key = next((key for key in keys if key in config.values), keys[0])
    found = sorted(set(config.integers(key))) or [default]
    if len(found) > 1:
        raise config.error(key, "the same number in all layers", found)
    return ConfigReader({key: found[0]}, config.where).integer(key, maximum=MOST_WIDTH)


def _stretched_fields(config: ConfigReader) -> dict[str, Any]:
    """The common fields with the base of rotation that ``alpha`` stretches, for sequences of any
    length. The publisher calls this ``dynamic``."""
    alpha, where = None, config.where
    for key in ("rope_scaling", "rope_parameters"):
        rope = ConfigReader(config.table(key), f"{config.where}: {key}")
        kind = rope.word("rope_type", rope.word("type", "default"))
        if kind == "dynamic" and "alpha" in rope.values:
            alpha, where = rope.number("alpha", maximum=MOST_POSITIONS), rope.where
            kinds = dict.fromkeys({"rope_type", "type"} & rope.values.keys(), "default")
            config = config.with_values(**{key: {**rope.values, **kinds}})
    fields = common_fields(config)
    if alpha is None:
        return fields
    head_dim, rope_spec = fields["heads"].head_dim, fields["rope"]
    if head_dim < 4:
        raise ConfigError(f"{where}: alpha needs heads of 4 dimensions or more")
    theta = rope_spec.theta * alpha ** (head_dim / (head_dim - 2))
    return {**fields, "rope": replace(rope_spec, theta=theta)}
