"""Meta's Muse Glimmer: Llama with gates of attention, norms on both sides of a layer's parts and
windows in most layers. Read is the text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.models.attention_spec import AttentionGates, ScoresSpec
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    text_config,
    text_part,
    windows_by_kind,
)
from minisgl_backend.models.rope_spec import RopeSpec
from minisgl_backend.models.spec import ModelSpec, ScalesSpec

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": 202_048,
        "hidden_size": 6656,
        "intermediate_size": 19_968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 2**17,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 200_001,
    }
)


def read_muse_glimmer(config: ConfigReader) -> ModelSpec:
    """``MuseGlimmerForConditionalGeneration``: queries and keys are normalized without weights, as
    are the embeddings. Every fourth layer, counted from the last, has neither a window nor a
    rotation."""
    text = text_config(config, tied=False).with_defaults(**_DEFAULTS)
    check_supported(text, {"attention_bias": False, "hidden_activation": "silu"})
    fields = common_fields(text.with_values(hidden_act="silu"))  # the other key counts
    num_layers, head_dim = fields["num_layers"], fields["heads"].head_dim
    kinds = text.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if (num_layers - 1 - layer) % 4 else "full_attention"
        for layer in range(num_layers)
    ]
    fields["windows"] = windows_by_kind(kinds, text.integer_or_null("sliding_window", 2048))
    fields["norms"] = replace(
        fields["norms"],
        place="around",
        output_eps=text.number("post_norm_eps", 1e-8),
        offset=1.0,
        final_offset=0.0,
        of_embedding=True,
    )
    spec = ModelSpec(
        architecture="MuseGlimmerForConditionalGeneration",
        qk_norm="unweighted everywhere",
        scores=ScoresSpec(scale=text.number("qk_scale_factor", 3.87) * head_dim**-0.5),
        attention_gates=AttentionGates(apart=True),
        scales=ScalesSpec(
            logits=text.number("output_multiplier", 0.19611613513818404),
            logit_cap=text.number("final_logit_softcapping", 20.0),
        ),
        ropes=_ropes(text, num_layers, fields["rope"]),
        **fields,
    )
    return text_part(spec, spec.architecture)


def _ropes(text: ConfigReader, num_layers: int, rope: RopeSpec) -> tuple[RopeSpec | None, ...]:
    """The rotation of each layer: none where ``layer_rope_theta`` is 0. Transformers reads no other
    base from it."""
    thetas = text.numbers("layer_rope_theta", or_zero=True) or tuple(
        rope.theta if (num_layers - 1 - layer) % 4 else 0.0 for layer in range(num_layers)
    )
    if len(thetas) != num_layers or not set(thetas) <= {0.0, rope.theta}:
        wanted = f"{num_layers} of 0 and {rope.theta:g}, the rope_theta of all layers"
        raise text.error("layer_rope_theta", wanted, list(thetas))
    return tuple(rope if theta else None for theta in thetas)
