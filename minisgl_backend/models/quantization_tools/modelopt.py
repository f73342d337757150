"""ModelOpt of NVIDIA, whose config may be in config.json or in a file of its own."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.quantization_tools.fields import ALL, check_kv, names, only, plain
from minisgl_backend.weight_format import (
    GROUP_OF_MX,
    GROUP_OF_NVFP4,
    Encoding,
    Layout,
    Rule,
    WeightFormat,
)

_FP8_BLOCK: Final = 128
_FP8: Final = WeightFormat(
    layout=Layout.FP8, encoding=Encoding.E4M3, block=(None, None), static_inputs=True
)
_FP8_OF_ROWS: Final = WeightFormat(layout=Layout.FP8, encoding=Encoding.E4M3, block=(1, None))
_FP8_IN_BLOCKS: Final = WeightFormat(
    layout=Layout.FP8, encoding=Encoding.E4M3, block=(_FP8_BLOCK, _FP8_BLOCK)
)
_MXFP8: Final = WeightFormat(layout=Layout.MXFP8, encoding=Encoding.E4M3, block=(1, GROUP_OF_MX))
_NVFP4: Final = WeightFormat(
    layout=Layout.NV_MODELOPT, encoding=Encoding.E2M1, block=(1, GROUP_OF_NVFP4)
)
_FORMATS: Final[Mapping[str, WeightFormat]] = MappingProxyType(
    {
        "FP8": _FP8,
        "FP8_PER_CHANNEL_PER_TOKEN": _FP8_OF_ROWS,
        "FP8_PB_WO": _FP8_IN_BLOCKS,
        "MXFP8": _MXFP8,
        **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), _NVFP4),
    }
)
"""Of NVFP4, the second name says that the tool did not measure activations."""
_GROUPS: Final = MappingProxyType(
    {_FP8_IN_BLOCKS: _FP8_BLOCK, _MXFP8: GROUP_OF_MX, _NVFP4: GROUP_OF_NVFP4}
)
"""The ``group_size`` that a format has."""


def read_modelopt(config: ConfigReader) -> list[Rule]:
    """One of ModelOpt's algorithms, or several of them (MIXED_PRECISION): then each module is
    listed, or what holds it, such as all experts of a layer."""
    if inner := config.table("quantization"):  # as in the tool's own file
        config = ConfigReader(inner, f"{config.where}: quantization")
    algorithm = config.values.get("quant_algo")
    if algorithm is None:  # keys and values at most
        if config.table("config_groups"):
            raise ConfigError(f"{config.where}: config_groups without quant_algo is not supported")
        return _only_kv(config)
    check_kv(config)
    if algorithm == "MIXED_PRECISION":
        quantized = _by_module(config)
    else:
        quantized = [Rule(ALL, _format(config))]
    excluded = names(config, "exclude_modules", "ignore")
    with_wildcards = [name for name in excluded if any(map(name.__contains__, "*?["))]
    listed = Rule(frozenset(excluded).difference(with_wildcards), None)
    return [listed, *plain(config, with_wildcards, _glob), *quantized]


def _by_module(config: ConfigReader) -> list[Rule]:
    where = f"{config.where}: quantized_layers"
    layers = ConfigReader(config.table("quantized_layers"), where)
    if not layers.values:
        raise ConfigError(f"{where}: MIXED_PRECISION needs the modules that are quantized")
    held: dict[WeightFormat, set[str]] = {}
    for name in layers.values:
        layer = ConfigReader(layers.table(name), f"{where}: {name}")
        held.setdefault(_format(layer), set()).add(name)
    return [Rule(frozenset(modules), form) for form, modules in held.items()]


def _format(config: ConfigReader) -> WeightFormat:
    """The format of an algorithm, whose name may be in small letters."""
    algorithm = str(config.values.get("quant_algo"))
    form = _FORMATS.get(algorithm.upper())
    if form is None:
        raise ConfigError(
            f"{config.where}: quant_algo {algorithm} is not supported; supported are "
            f"{', '.join(_FORMATS)}, and MIXED_PRECISION of these"
        )
    if (wanted := _GROUPS.get(form)) is not None:
        only(config, "group_size", config.integer("group_size", wanted), wanted)
    return form


def _only_kv(config: ConfigReader) -> list[Rule]:
    if "kv_cache_scheme" not in config.values and "kv_cache_quant_algo" not in config.values:
        raise ConfigError(f"{config.where}: neither quant_algo nor kv_cache_scheme is given")
    check_kv(config)
    return []


def _glob(name: str) -> str:
    """A module's full name or its end, and everything below it, with the wildcards of a shell."""
    globs = name, f"*.{name}", f"{name}.*", f"*.{name}.*"
    return "|".join(map(fnmatch.translate, globs))
