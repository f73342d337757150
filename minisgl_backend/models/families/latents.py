"""Fields of a ``ModelSpec`` with multi-head latent attention (arXiv 2405.04434).

Must not know any particular architecture.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.attention_spec import ScoresSpec
from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported
from minisgl_backend.models.latent_spec import IndexerSpec, LatentSpec
from minisgl_backend.models.rope_spec import RopeSpec


def latent_fields(config: ConfigReader) -> dict[str, Any]:
    """The common fields of a model with multi-head latent attention. The caller gives defaults for
    the sizes of queries and values."""
    check_supported(config, {"attention_bias": False})
    num_heads = config.integer("num_attention_heads", maximum=MOST_HEADS)
    check_supported(config, {"num_key_value_heads": num_heads})
    latent = LatentSpec(
        latent_dim=_size(config, "kv_lora_rank", 512),
        rope_dim=_size(config, "qk_rope_head_dim", 64),
        nope_dim=_size(config, "qk_nope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
        query_rank=config.integer_or_null("q_lora_rank", 1536),
    )
    # pages have the latents as their only head
    fields = common_fields(config.with_values(num_key_value_heads=1, head_dim=latent.key_dim))
    rope: RopeSpec = fields["rope"]
    if rope.scaling == "proportional":
        raise ConfigError(f"{config.where}: rope type 'proportional' is not supported for latents")
    return {
        **fields,
        "latent": latent,
        "rope": replace(rope, interleaved=config.flag("rope_interleave", True)),
        "scores": ScoresSpec(
            scale=latent.query_dim**-0.5 * _stretched_magnitude(config, rope) ** 2
        ),
    }


def read_indexer(
    config: ConfigReader, latent: LatentSpec, layers: Set[int], *, interleaved: bool
) -> IndexerSpec:
    """The indexer of these ``layers``, which reads the latents of queries. The caller gives the
    default of ``index_n_heads``."""
    if latent.query_rank is None:
        raise config.error("q_lora_rank", "an integer, since the indexer reads latents", None)
    key_dim = config.integer("index_head_dim", 128, maximum=MOST_HEADS)
    if key_dim < latent.rope_dim:
        rotated = f"at least {latent.rope_dim}, which is qk_rope_head_dim"
        raise config.error("index_head_dim", rotated, key_dim)
    return IndexerSpec(
        num_heads=config.integer("index_n_heads", maximum=MOST_HEADS),
        key_dim=key_dim,
        top_k=config.integer("index_topk", 2048),
        layers=frozenset(layers),
        interleaved=interleaved,
    )


def layers_that_choose(config: ConfigReader, key: str, num_layers: int) -> list[int] | None:
    """The layers that are ``full`` by the list under ``key``, of which the first layer is one;
    ``shared`` layers take the positions that the last such layer chose. None without a list."""
    listed = config.layer_kinds(("full", "shared"), num_layers, key)
    if listed is None:
        return None
    if listed[0] != "full":
        raise config.error(key, "full for the first layer", listed[0])
    return [layer for layer, kind in enumerate(listed) if kind == "full"]


def _size(config: ConfigReader, key: str, default: int | None = None) -> int:
    return config.integer(key, default, maximum=MOST_HEADS // 2)


def _stretched_magnitude(config: ConfigReader, rope: RopeSpec) -> float:
    """By what queries and keys are multiplied in full, not only their rotated parts, if positions
    are stretched: ``mscale_all_dim`` of the table of the rotation."""
    tables = {**config.table("rope_scaling"), **config.table("rope_parameters")}
    of_all = ConfigReader(tables, config.where).number("mscale_all_dim", 0.0, or_zero=True)
    if rope.scaling == "default" or rope.factor <= 1:
        return 1.0
    return 0.1 * of_all * math.log(rope.factor) + 1.0
