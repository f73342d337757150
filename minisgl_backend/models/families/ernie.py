"""ERNIE 4.5, dense and with experts: Llama whose neighbouring dimensions of a head rotate
together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_LAYERS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported
from minisgl_backend.models.spec import BiasesSpec, ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED_OF_EXPERTS: Final[Mapping[str, object]] = MappingProxyType(
    {"use_bias": False, "moe_norm_min": 1e-12}
)
"""The only supported values of these keys. The latter is the least sum of scores by which weights
are divided."""


def read_ernie4_5(config: ConfigReader) -> ModelSpec:
    """``Ernie4_5ForCausalLM``: biases are optional, and then in all projections."""
    bias = config.flag("use_bias")
    fields = _ernie_fields(config.with_defaults(num_key_value_heads=2, head_dim=128))
    return ModelSpec(
        architecture="Ernie4_5ForCausalLM",
        biases=BiasesSpec(qkv=bias, output=bias, mlp=bias),
        **fields,
    )


def read_ernie4_5_moe(config: ConfigReader) -> ModelSpec:
    """``Ernie4_5_MoeForCausalLM``: experts by a corrected softmax in all but some layers, and
    shared experts, which are merged into a single wide one."""
    check_supported(config, _SUPPORTED_OF_EXPERTS)
    fields = _ernie_fields(config.with_defaults(num_key_value_heads=4))
    correction = ".mlp.gate.e_score_correction_bias"
    names = TensorNames(
        renamed=((".mlp.moe_statics.e_score_correction_bias", correction),),
        vectors=(correction,),
        left_out=("model.mtp_",),
    )
    return ModelSpec(
        architecture="Ernie4_5_MoeForCausalLM",
        moe=_experts(config, fields["num_layers"]),
        names=names,
        **fields,
    )


def _ernie_fields(config: ConfigReader) -> dict[str, Any]:
    config = config.with_defaults(
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=2**17,
        tie_word_embeddings=True,
    )
    fields = common_fields(config)
    return {**fields, "rope": replace(fields["rope"], interleaved=True)}


def _experts(config: ConfigReader, num_layers: int) -> MoeSpec:
    inner = config.integer("moe_intermediate_size", 1536, maximum=MOST_WIDTH)
    num_experts = config.integer("num_experts", 64, maximum=MOST_EXPERTS)
    rule = RoutingRule(
        num_experts=config.integer("moe_num_experts", num_experts, maximum=MOST_EXPERTS),
        top_k=config.integer("moe_k", config.integer("num_experts_per_tok", 6)),
        normalize=True,
        corrected=True,
    )
    num_shared = config.integer("moe_num_shared_experts", 2, minimum=0, maximum=MOST_EXPERTS)
    shared = SharedExpert(name="shared_experts", intermediate_size=num_shared * inner)
    step = config.integer("moe_layer_interval", 1)
    first = config.integer("moe_layer_start_index", 1, minimum=0)
    last = config.integer("moe_layer_end_index", -1, minimum=-1, maximum=MOST_LAYERS)
    last = num_layers - 1 if last == -1 else min(last, num_layers - 1)
    return MoeSpec(
        experts=ExpertsSpec(
            routing=rule, intermediate_size=inner, shared=shared if num_shared else None
        ),
        layers=frozenset(layer for layer in range(first, last + 1) if (layer + 1) % step == 0),
    )
