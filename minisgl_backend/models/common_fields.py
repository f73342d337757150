"""The keys of config.json that all architectures share -> fields of ``ModelSpec``.

Must not know any particular architecture, or tensors. Both spellings of the rotary embedding are
read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``, which transformers has written
since version 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.bounds import (
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_VOCABULARY,
    MOST_WIDTH,
)
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.norms_spec import NormsSpec
from minisgl_backend.models.rope_spec import RopeSpec

_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


def common_fields(
    config: ConfigReader, *, head_dim: int | None = None, partial: bool = False
) -> dict[str, Any]:
    """The fields of ``ModelSpec`` that every supported architecture spells the same way.

    ``head_dim`` is the default; if None, the hidden size is divided among the heads. ``partial``:
    the architecture may rotate only a part of each head.
    """
    activation = config.word("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"{config.where}: hidden_act {activation!r} is not supported, only 'silu'"
        )
    hidden_size = config.integer("hidden_size", maximum=MOST_WIDTH)
    num_heads = config.integer("num_attention_heads", maximum=MOST_HEADS)
    if head_dim is None and "head_dim" not in config.values:
        if hidden_size % num_heads:
            raise config.error(
                "hidden_size", f"a multiple of num_attention_heads ({num_heads})", hidden_size
            )
        head_dim = hidden_size // num_heads
    dtype = config.word("dtype", config.word("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        raise config.error("dtype", "one of " + ", ".join(_DTYPES), dtype)
    max_positions = config.integer("max_position_embeddings", 2048, maximum=MOST_POSITIONS)
    num_layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    return {
        "vocab_size": config.integer("vocab_size", maximum=MOST_VOCABULARY),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size", maximum=MOST_WIDTH),
        "num_layers": num_layers,
        "heads": LayerHeads(
            num_heads,
            config.integer("num_key_value_heads", num_heads, maximum=MOST_HEADS),
            config.integer("head_dim", head_dim, maximum=MOST_HEADS),
        ),
        "norms": NormsSpec(eps=config.number("rms_norm_eps", 1e-6)),
        "rope": read_rope(config, max_positions, partial=partial),
        "dtype": dtype,
        "windows": (None,) * num_layers,
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "eos_token_ids": frozenset(config.integers("eos_token_id")),
    }


def read_rope(
    config: ConfigReader,
    max_positions: int,
    *,
    partial: bool = False,
    given: Mapping[str, Any] | None = None,
    kind: str | None = None,
) -> RopeSpec:
    """The rotary embedding in either spelling, or as ``given`` for the layers of a ``kind`` of
    attention; ``ConfigError`` if it is not supported."""
    spelling = "rope_parameters" if kind is None else f"rope_parameters: {kind}"
    if given is None:
        former, given = config.table("rope_scaling"), config.table("rope_parameters")
        if former and not given:
            spelling = "rope_scaling"
        _check_same(config, former, given)
        given = {**former, **given}
    theta = config.number("rope_theta", 10_000.0)
    rope = ConfigReader({"rope_theta": theta, **given}, f"{config.where}: {spelling}")
    where = config.where if kind is None else rope.where
    for key, value in given.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{rope.where}: a table for {key} is not supported: this architecture has one "
                "rotation for all layers"
            )
    scaling = rope.word("rope_type", rope.word("type", "default"))
    beside = config.number("partial_rotary_factor", 1.0, maximum=1.0)
    rotated = rope.number("partial_rotary_factor", beside, maximum=1.0)
    if rotated != 1.0 and not partial and scaling != "proportional":
        raise ConfigError(f"{where}: partial_rotary_factor {rotated:g} is not supported")
    theta = rope.number("rope_theta")
    if theta <= 1:
        raise rope.error("rope_theta", "above 1", theta)
    common: dict[str, Any] = {
        "scaling": scaling,
        "theta": theta,
        "max_positions": max_positions,
        "rotated": rotated,
    }
    if scaling == "default":
        return RopeSpec(**common)
    if scaling == "proportional":
        return RopeSpec(**common, factor=rope.number("factor", 1.0, maximum=MOST_POSITIONS))
    if scaling in ("linear", "dynamic"):
        return RopeSpec(**common, factor=rope.number("factor", maximum=MOST_POSITIONS))
    # As in transformers, a key beside the table takes precedence over the same key inside it.
    key = "original_max_position_embeddings"
    common["original_max_positions"] = config.integer(key, rope.integer(key, max_positions))
    if scaling == "llama3":
        return _llama3_rope(rope, common)
    if scaling == "yarn":
        if "factor" not in rope.values and key not in {*config.values, *rope.values}:
            raise ConfigError(f"{rope.where}: factor is missing")
        return _yarn_rope(rope, common)
    if scaling == "longrope":
        return _longrope(rope, common)
    raise ConfigError(
        f"{where}: rope type {scaling!r} is not supported; supported are default, linear, "
        "dynamic, llama3, yarn, longrope and proportional"
    )


def _check_same(config: ConfigReader, former: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the two spellings contradict each other: a stretch that is added to
    a file of transformers 5, in the former spelling, must not be lost."""
    one, other = (
        {**table, "rope_type": table.get("rope_type") or table.get("type")}
        for table in (former, given)
    )
    for key in sorted(one.keys() & other.keys() - {"type"}):
        if None not in (one[key], other[key]) and one[key] != other[key]:
            raise ConfigError(
                f"{config.where}: {key} is {one[key]!r} in rope_scaling and {other[key]!r} in "
                "rope_parameters; leave only one of these tables"
            )


def _llama3_rope(rope: ConfigReader, common: Mapping[str, Any]) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low > high:
        raise rope.error("low_freq_factor", f"at most high_freq_factor ({high:g})", low)
    return RopeSpec(
        **common,
        factor=rope.number("factor", maximum=MOST_POSITIONS),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_rope(rope: ConfigReader, common: Mapping[str, Any]) -> RopeSpec:
    factor = _stretch(rope, common)
    return RopeSpec(
        **common,
        factor=factor,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _longrope(rope: ConfigReader, common: Mapping[str, Any]) -> RopeSpec:
    factor, original = _stretch(rope, common), common["original_max_positions"]
    if original < 2:
        raise rope.error("original_max_position_embeddings", "above 1", original)
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = rope.numbers("short_factor")
    if not factors:
        raise ConfigError(f"{rope.where}: short_factor is missing")
    return RopeSpec(
        **common,
        factor=factor,
        attention_factor=rope.number("attention_factor", stretched),
        short_factors=factors,
    )


def _stretch(rope: ConfigReader, common: Mapping[str, Any]) -> float:
    """By how much the context is stretched: ``factor``, or the ratio of the position limits."""
    by_default = common["max_positions"] / common["original_max_positions"]
    return rope.number("factor", by_default, maximum=MOST_POSITIONS)


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    if "attention_factor" in rope.values:
        return rope.number("attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale, scale_all = rope.values.get("mscale"), rope.values.get("mscale_all_dim")
    if scale and scale_all:
        return magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return magnitude(1.0)
