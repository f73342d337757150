"""The config.json of EAGLE-3 layers (arXiv 2503.01840), which are checkpoints of their own.

There are two forms: with the layer's keys at the top, as EAGLE's authors, SpecForge, AngelSlim and
ModelOpt publish it, and that of speculators, with the layer in ``transformer_layer_config``. They
also differ in how they say where the model's residual stream is read: the first names the layers
whose outputs are read, the second those before which it is. Must not know the model, or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.bounds import MOST_LAYERS, MOST_WIDTH
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported
from minisgl_backend.models.families.llama import read_llama
from minisgl_backend.models.families.qwen import read_qwen3
from minisgl_backend.models.spec import EagleSpec, ModelSpec

_ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"}
)
"""Of the first form. EAGLE's authors name Llama itself, with a ``draft_vocab_size``."""
_LAYERS: Final[Mapping[str, Callable[[ConfigReader], ModelSpec]]] = MappingProxyType(
    {"llama": read_llama, "qwen3": read_qwen3}
)
_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "llama": {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
        },
        "qwen3": {
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 151_936,
        },
    }
)
"""Values that transformers leaves out, by ``model_type``."""
_ONLY: Final[Mapping[str, object]] = MappingProxyType(
    {
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
)
"""Keys of ``eagle_config``, with the only value that is supported."""
_ONLY_ANYWHERE: Final[Mapping[str, object]] = MappingProxyType(
    {"use_aux_hidden_state": True, "swap_h_and_emb": False}
)
"""The same, of all parts of config.json. Attention takes the embedding first, and then the state:
the other order has the same shapes."""
_IDS: Final = "eagle_aux_hidden_state_layer_ids"


def read_eagle(config: ConfigReader) -> EagleSpec:
    """The layer that a config.json describes; ``ConfigError`` if it is not supported."""
    if "speculators_model_type" in config.values or "speculators_config" in config.values:
        check_supported(config, {"speculators_model_type": "eagle3"})
        if "norm_before_residual" not in config.values:
            raise ConfigError(f"{config.where}: norm_before_residual is missing")
        layer = config.part("transformer_layer_config")
        kind = layer.word("model_type", "llama")
        layer = layer.with_defaults(**_DEFAULTS.get(kind, {}))
    else:
        layer = config
        _check_architecture(config)
    for part in (config, layer):
        if "quantization_config" in part.values:
            raise ConfigError(
                f"{part.where}: quantized weights of EAGLE-3 layers are not supported"
            )
        check_supported(part, _ONLY_ANYWHERE)
    inner = ConfigReader(config.table("eagle_config"), f"{config.where}: eagle_config")
    check_supported(inner, {**_ONLY, **_ONLY_ANYWHERE})
    spec = _layer(layer)
    return EagleSpec(
        layer=spec,
        target_size=config.integer("target_hidden_size", spec.hidden_size, maximum=MOST_WIDTH),
        num_drafted=config.integer("draft_vocab_size", spec.vocab_size, maximum=spec.vocab_size),
        read_layers=_read_layers(config, inner),
        norm_before_fc=inner.flag("norm_before_fc", config.flag("norm_before_fc")),
        fc_norm=config.flag("fc_norm"),
        norm_before_residual=config.flag("norm_before_residual"),
        norm_output=config.flag("norm_output"),
    )


def _check_architecture(config: ConfigReader) -> None:
    """Raise ``ConfigError`` unless a config.json of the first form is that of an EAGLE-3 layer."""
    named: Any = config.values.get("architectures")
    names = named if isinstance(named, list) else [named]
    is_model = "LlamaForCausalLM" in names and "draft_vocab_size" not in config.values
    if is_model or not _ARCHITECTURES.intersection(name for name in names if type(name) is str):
        known = ", ".join(sorted(_ARCHITECTURES - {"LlamaForCausalLM"}))
        raise ConfigError(
            f"{config.where}: architectures {named!r} is no EAGLE-3 layer that is supported; "
            f"supported are {known} and the format of speculators (speculators_model_type eagle3)"
        )


def _layer(config: ConfigReader) -> ModelSpec:
    kind = config.word("model_type", "llama")
    if kind not in _LAYERS:
        raise ConfigError(
            f"{config.where}: model_type {kind!r} is not supported for EAGLE-3 layers, only "
            f"{' and '.join(_LAYERS)}"
        )
    check_supported(config, {"num_hidden_layers": 1})
    # the output head is one of its own, whatever the model's is
    spec = _LAYERS[kind](config.with_values(tie_word_embeddings=False))
    is_given = "sliding_window" in config.values and config.flag(
        "use_sliding_window", kind == "llama"
    )
    if is_given or spec.windows != (None,):
        raise ConfigError(
            f"{config.where}: sliding_window is not supported in EAGLE-3 layers, only null"
        )
    return spec


def _read_layers(config: ConfigReader, inner: ConfigReader) -> tuple[int, ...] | None:
    """``EagleSpec.read_layers``, if they are given; ``inner`` is ``eagle_config``."""
    if found := config.integers(_IDS):
        return _within_models(config, found)
    # these are the layers whose outputs are read
    return _within_models(inner, [layer + 1 for layer in inner.integers(_IDS)]) or None


def _within_models(config: ConfigReader, layers: list[int]) -> tuple[int, ...]:
    if any(layer > MOST_LAYERS for layer in layers):
        raise config.error(_IDS, f"at most {MOST_LAYERS} each", config.values[_IDS])
    return tuple(layers)
