"""The architectures that can be served, and the spec of a checkpoint folder.

Reads config.json and generation_config.json, nothing else. Code that comes with a checkpoint is
never run, and quantized weights are refused rather than read as if they were not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader, read_json
from minisgl_backend.models.llama import read_llama
from minisgl_backend.models.mistral import read_mistral
from minisgl_backend.models.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from minisgl_backend.models.spec import ModelSpec

ARCHITECTURES: Final[Mapping[str, Callable[[ConfigReader], ModelSpec]]] = MappingProxyType(
    {
        "LlamaForCausalLM": read_llama,
        "MistralForCausalLM": read_mistral,
        "Qwen2ForCausalLM": read_qwen2,
        "Qwen3ForCausalLM": read_qwen3,
        "Qwen3MoeForCausalLM": read_qwen3_moe,
    }
)
_METHODS: Final = ("compressed-tensors", "modelopt")
"""Quantization tools whose checkpoints may have plain weights with scales for fp8 KV pages."""


def load_spec(folder: Path) -> ModelSpec:
    """The spec of the checkpoint in ``folder``; ``ConfigError`` if it cannot be served."""
    spec = parse_spec(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.exists():
        config = ConfigReader(read_json(generation), "generation_config.json")
        eos = spec.eos_token_ids | set(config.integers("eos_token_id"))
        spec = replace(spec, eos_token_ids=eos)
    return spec


def parse_spec(values: Mapping[str, Any]) -> ModelSpec:
    """The spec that a parsed config.json describes; ``ConfigError`` if it cannot be served."""
    config = ConfigReader(values)
    _refuse_quantized_weights(config)
    if "auto_map" in config.values:
        raise ConfigError("the checkpoint brings its own code (auto_map), which is never run")
    names = config.values.get("architectures") or ["no architecture"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error("architectures", "a list of names", names)
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ConfigError(
            f"{', '.join(names)} is not supported; supported are " + ", ".join(ARCHITECTURES)
        )
    return ARCHITECTURES[known[0]](config)


def _refuse_quantized_weights(config: ConfigReader) -> None:
    """Raise ``ConfigError`` for quantized weights. Only keys and values may be quantized: to 8-bit
    floats, with one scale a layer (``kv_scales``)."""
    if "quantization_config" not in config.values:
        return
    quantization = ConfigReader(
        config.table("quantization_config"), f"{config.where}: quantization_config"
    )
    method = quantization.word("quant_method", "unknown method")
    of_weights = quantization.values.get("config_groups") or quantization.values.get("quant_algo")
    if method not in _METHODS or of_weights or "kv_cache_scheme" not in quantization.values:
        raise ConfigError(f"quantized checkpoints ({method}) are not supported")
    scheme = quantization.table("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float"}
    defaults = {"dynamic": False, "symmetric": True, "strategy": "tensor"}
    if any(scheme.get(key) != value for key, value in wanted.items()) or any(
        scheme.get(key, value) != value for key, value in defaults.items()
    ):
        raise quantization.error("kv_cache_scheme", "8-bit floats with one scale a tensor", scheme)
