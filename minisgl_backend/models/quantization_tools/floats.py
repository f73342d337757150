"""Formats of 8-bit and 4-bit floats that publishers write themselves, without a tool of their own:
``fp8`` and ``mxfp4``."""

from __future__ import annotations

import re

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.quantization_tools.fields import ALL, block, module, names, only, plain
from minisgl_backend.weight_format import GROUP_OF_MX, Encoding, Layout, Rule, WeightFormat


def read_fp8(config: ConfigReader) -> list[Rule]:
    """Fine-grained FP8 of DeepSeek and Qwen, in blocks; AutoFP8, with one scale per weight."""
    scheme = config.word("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise config.error("activation_scheme", "dynamic or static", scheme)
    fmt = config.word("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{config.where}: fmt {fmt!r} is not supported, only 'e4m3'")
    for key in ("expert_dtype", "routed_experts_quant_method"):
        only(config, key, config.word(key, "fp8"), "fp8")
    form = WeightFormat(
        layout=Layout.FP8,
        encoding=Encoding.E4M3,
        block=block(config, "weight_block_size") or (None, None),
        static_inputs=scheme == "static",
    )
    listed = names(config, "modules_to_not_convert", "ignored_layers")
    return [*plain(config, listed, module), Rule(ALL, form)]


def read_mxfp4(config: ConfigReader) -> list[Rule]:
    """gpt-oss: only experts are quantized."""
    form = WeightFormat(layout=Layout.MX_STACKED, encoding=Encoding.E2M1, block=(1, GROUP_OF_MX))
    listed = plain(config, names(config, "modules_to_not_convert"), module)
    return [*listed, Rule(re.compile(r".*\.mlp\.experts\..*"), form)]
