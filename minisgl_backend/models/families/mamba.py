"""What families with Mamba 2 layers have in common: how config.json spells these layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.recurrent_spec import MambaSpec

_INFINITY: Final = {"__float__": "Infinity"}
"""As transformers writes it."""
_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}
"""Former names of kinds of layers, with those that transformers has written since version 5."""
RENAMED: Final = (
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)
"""Names in the checkpoints of Bamba and Falcon-H1, each with the decoder's."""


def read_kinds(value: Sequence[Any]) -> list[str]:
    """Kinds of layers by their present names."""
    return [_KINDS.get(kind, kind) for kind in map(str, value)]


def read_time_steps(config: ConfigReader) -> tuple[float, float]:
    """The least and the largest step: ``time_step_limit``, by default without limits."""
    value = config.values.get("time_step_limit", [0.0, math.inf])
    given = value if isinstance(value, (list, tuple)) else []
    found = [math.inf if limit == _INFINITY else limit for limit in given]
    are_numbers = all(type(limit) in (int, float) for limit in found)
    if len(found) != 2 or not are_numbers or not 0 <= found[0] < found[1]:
        raise config.error("time_step_limit", "two numbers >= 0 in ascending order", value)
    return float(found[0]), float(found[1])


def read_mamba(
    config: ConfigReader,
    hidden_size: int,
    layers: frozenset[int],
    *,
    inner: int | None = None,
    normed: bool = True,
) -> MambaSpec:
    """The layers in the keys that Granite, Bamba and Falcon have for them. ``inner``: the values of
    all heads, if it is not ``mamba_expand`` that gives them."""
    num_heads = config.integer("mamba_n_heads", 128, maximum=MOST_HEADS)
    if inner is None:
        inner = config.integer("mamba_expand", 2, maximum=MOST_HEADS) * hidden_size
    head_dim = inner // num_heads
    if config.values.get("mamba_d_head", "auto") != "auto":
        head_dim = config.integer("mamba_d_head", maximum=MOST_HEADS)
    if head_dim * num_heads != inner:
        raise config.error(
            "mamba_n_heads", f"so many that heads of {head_dim} have {inner} values", num_heads
        )
    return MambaSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state", 256, maximum=MOST_HEADS),
        num_groups=config.integer("mamba_n_groups", 1, maximum=MOST_HEADS),
        conv_width=config.integer("mamba_d_conv", 4, minimum=2, maximum=MOST_HEADS),
        layers=layers,
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias"),
        normed=normed,
        time_steps=read_time_steps(config),
    )


def merged_parts(module: str, shape: MambaSpec) -> dict[str, dict[str, int]]:
    """The projections that the tensors of a Mamba 2 layer hold, with their numbers of outputs, by
    the end of a module's name; ``module`` is that of the layer's."""
    channels = {"x": shape.inner_size, "b": shape.groups_size, "c": shape.groups_size}
    parts = {"z": shape.inner_size, **channels, "dt": shape.num_heads}
    return {
        f"{module}.in_proj": {f"in_proj_{part}": size for part, size in parts.items()},
        f"{module}.conv1d": {f"conv_{part}": size for part, size in channels.items()},
    }
