"""Reads how a checkpoint's weights are quantized, from config.json or ModelOpt's own file.

Finds which tool wrote it; each one has a function in ``quantization_tools``, and a line in
``_METHODS``. All others are refused by name. Knows JSON and the names of tools. Must not know
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader, read_json
from minisgl_backend.models.quantization_tools.compressed_tensors import (
    read_compressed_tensors,
)
from minisgl_backend.models.quantization_tools.floats import read_fp8, read_mxfp4
from minisgl_backend.models.quantization_tools.integers import (
    read_auto_round,
    read_awq,
    read_gptq,
)
from minisgl_backend.models.quantization_tools.modelopt import read_modelopt
from minisgl_backend.weight_format import Rule, WeightFormats

MODELOPT_FILE: Final = "hf_quant_config.json"
_SUPPORTED: Final = (
    "fp8 (in blocks, or per tensor), compressed-tensors, modelopt (FP8, MXFP8, NVFP4), awq, gptq, "
    "auto-round, and mxfp4"
)


def read_quantization(
    config: ConfigReader, modelopt: Mapping[str, Any] | None
) -> WeightFormats | None:
    """How the weights that ``config``, a config.json, describes are stored; None: all are plain.

    ``modelopt`` is the content of ``hf_quant_config.json``, if there is one; it is used if
    config.json says nothing, or only that the tool is ModelOpt. It also counts before a
    ``text_config``, which may still say how the weights were stored that ModelOpt began with.
    Raises ``ConfigError`` for what is not supported.
    """
    given, where = _given(config)
    if modelopt is not None and (not given or _says_only_modelopt(ConfigReader(given, where))):
        where, values = MODELOPT_FILE, ConfigReader(modelopt, MODELOPT_FILE)
        # some of these files have the keys at the top
        given = {"quant_method": "modelopt", **(values.table("quantization") or values.values)}
    elif not given and config.table("text_config"):
        given, where = _given(config.part("text_config"))
    if not given:
        return None
    quantization = ConfigReader(given, where)
    method = _method(quantization) or next(
        (tool for key, tool in _TOLD_BY.items() if key in quantization.values), "no quant_method"
    )
    read = _METHODS.get(method)
    if read is None:
        raise ConfigError(
            f"{where}: weights quantized by {method} are not supported; supported are {_SUPPORTED}"
        )
    rules = read(quantization)
    return WeightFormats(method, tuple(rules)) if any(rule.format for rule in rules) else None


def _method(quantization: ConfigReader) -> str:
    return quantization.word("quant_method", "").replace("_", "-")


def _says_only_modelopt(quantization: ConfigReader) -> bool:
    """Whether the name of the tool is all that is said, and is one of ModelOpt's."""
    is_all = quantization.values.keys() == {"quant_method"}
    return is_all and _METHODS.get(_method(quantization)) is read_modelopt


def _given(config: ConfigReader) -> tuple[Mapping[str, Any], str]:
    """What config.json says, under any of the keys that tools use, and where it says so."""
    for key in ("quantization_config", "compression_config"):
        if given := config.table(key):
            return given, f"{config.where}: {key}"
    of_mlx = config.values.get("quantization")  # newer versions of MLX also use the first key
    return of_mlx if isinstance(of_mlx, dict) else {}, f"{config.where}: quantization"


def modelopt_file(folder: Path) -> Mapping[str, Any] | None:
    """The content of ModelOpt's file in a checkpoint's folder, if there is one."""
    path = folder / MODELOPT_FILE
    return read_json(path) if path.exists() else None


_TOLD_BY: Final = MappingProxyType(
    {"quant_algo": "modelopt", **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "bitsandbytes")}
    | {"group_size": "mlx"}
)
"""Keys that give the tool away in a config without ``quant_method``."""
_METHODS: Final[Mapping[str, Callable[[ConfigReader], list[Rule]]]] = MappingProxyType(
    {
        "fp8": read_fp8,
        "compressed-tensors": read_compressed_tensors,
        **dict.fromkeys(
            ("modelopt", "modelopt-fp4", "modelopt-mixed", "modelopt-mxfp8"), read_modelopt
        ),
        "awq": read_awq,
        "gptq": read_gptq,
        **dict.fromkeys(("auto-round", "intel/auto-round"), read_auto_round),
        "mxfp4": read_mxfp4,
    }
)
