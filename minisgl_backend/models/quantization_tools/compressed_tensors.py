"""compressed-tensors, as llm-compressor writes it: groups of modules, each with a scheme."""

from __future__ import annotations

import re
from collections.abc import Collection

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.quantization_tools.fields import (
    block,
    check_kv,
    names,
    only,
    plain,
    regex,
)
from minisgl_backend.weight_format import (
    GROUP_OF_MX,
    GROUP_OF_NVFP4,
    Encoding,
    Layout,
    Rule,
    WeightFormat,
)


def read_compressed_tensors(config: ConfigReader) -> list[Rule]:
    """Of several targets that match, names count before expressions, and these before classes; of
    expressions the one that is first by its text."""
    check_kv(config)
    if config.table("transform_config"):
        raise ConfigError(f"{config.where}: transform_config (rotated weights) is not supported")
    sparsity = ConfigReader(config.table("sparsity_config"), f"{config.where}: sparsity_config")
    if sparsity.word("format", "dense") != "dense":
        raise ConfigError(f"{sparsity.where}: sparse weights are not supported")
    rules = plain(config, names(config, "ignore"), _target)
    outer = config.word("format", "dense")
    schemes: list[tuple[str, Rule]] = []
    for name in config.table("config_groups"):
        groups = ConfigReader(config.table("config_groups"), f"{config.where}: config_groups")
        group = ConfigReader(groups.table(name), f"{groups.where}.{name}")
        form = _scheme(group, group.word("format", outer))
        for target in names(group, "targets"):
            schemes.append((target, Rule(regex(group, target, _target(target)), form)))
    schemes.sort(key=lambda scheme: _order(scheme[0]))
    return [*rules, *(rule for _, rule in schemes)]


def _order(target: str) -> tuple[bool, str]:
    """When a target's turn is. Names stay in the order of the file."""
    return target == "Linear", target if target.startswith("re:") else ""


def _scheme(group: ConfigReader, layout: str) -> WeightFormat | None:
    """The format of one group of modules; None if its weights are plain."""
    if not group.table("weights") or layout == "dense":
        return None
    weights = ConfigReader(group.table("weights"), f"{group.where}.weights")
    inputs = ConfigReader(group.table("input_activations"), f"{group.where}.input_activations")
    kind = weights.word("type", "int"), weights.integer("num_bits", 8)
    strategy = weights.word("strategy", _default_strategy(weights))
    if layout == "mxfp4-pack-quantized":
        _check_groups(weights, kind, strategy, 4, GROUP_OF_MX)
        return WeightFormat(layout=Layout.MX_PACKED, encoding=Encoding.E2M1, block=(1, GROUP_OF_MX))
    if layout == "mxfp8-quantized":
        _check_groups(weights, kind, strategy, 8, GROUP_OF_MX)
        return WeightFormat(layout=Layout.MXFP8, encoding=Encoding.E4M3, block=(1, GROUP_OF_MX))
    if layout == "nvfp4-pack-quantized":
        return _nvfp4_format(weights, kind, strategy)
    if layout in ("float-quantized", "naive-quantized") and kind == ("float", 8):
        return _unpacked_format(weights, inputs, strategy, Layout.FP8, Encoding.E4M3)
    if layout in ("int-quantized", "naive-quantized") and kind == ("int", 8):
        return _unpacked_format(weights, inputs, strategy, Layout.INT8, Encoding.INT8)
    if layout == "pack-quantized" and kind in (("int", 4), ("int", 8)):
        if inputs.values:
            raise ConfigError(f"{inputs.where} is not supported with {layout} weights")
        return _packed_format(weights, strategy, Encoding.INT4 if kind[1] == 4 else Encoding.INT8)
    raise ConfigError(
        f"{group.where}: {layout} weights of {kind[1]} bits ({kind[0]}) are not supported; "
        "supported are float-quantized and int-quantized of 8 bits, pack-quantized of 4 and 8, "
        "mxfp4-pack-quantized, mxfp8-quantized, nvfp4-pack-quantized"
    )


def _check_groups(
    weights: ConfigReader,
    kind: tuple[str, int],
    strategy: str,
    bits: int,
    size: int,
    strategies: Collection[str] = ("group",),
) -> None:
    """Raise ``ConfigError`` unless weights are floats of so many bits, in groups of this size."""
    only(weights, "type", kind[0], "float")
    only(weights, "num_bits", kind[1], bits)
    only(weights, "group_size", weights.integer("group_size", size), size)
    if strategy not in strategies:
        raise weights.error("strategy", " or ".join(strategies), strategy)
    only(weights, "symmetric", weights.flag("symmetric", True), True)


def _nvfp4_format(weights: ConfigReader, kind: tuple[str, int], strategy: str) -> WeightFormat:
    _check_groups(weights, kind, strategy, 4, GROUP_OF_NVFP4, ("tensor_group", "group"))
    scale_type = weights.word("scale_dtype", "float8_e4m3fn").removeprefix("torch.")
    only(weights, "scale_dtype", scale_type, "float8_e4m3fn")
    return WeightFormat(layout=Layout.NV_PACKED, encoding=Encoding.E2M1, block=(1, GROUP_OF_NVFP4))


def _unpacked_format(
    weights: ConfigReader, inputs: ConfigReader, strategy: str, layout: Layout, encoding: Encoding
) -> WeightFormat:
    """Codes of 8 bits, each an element of its tensor. Only floats may be in blocks."""
    shapes: dict[str, tuple[int | None, int | None] | None] = {
        "tensor": (None, None),
        "channel": (1, None),
    }
    if encoding is Encoding.E4M3:
        shapes["block"] = block(weights, "block_structure")
    shape = shapes.get(strategy)
    if shape is None:
        *others, last = shapes
        raise weights.error("strategy", f"{', '.join(others)} or {last}", strategy)
    only(weights, "symmetric", weights.flag("symmetric", True), True)
    return WeightFormat(
        layout=layout, encoding=encoding, block=shape, static_inputs=_has_scale(inputs)
    )


def _has_scale(inputs: ConfigReader) -> bool:
    """Whether activations have a static scale."""
    return bool(inputs.values) and inputs.values.get("dynamic") not in (True, "local")


def _packed_format(weights: ConfigReader, strategy: str, encoding: Encoding) -> WeightFormat:
    symmetric = weights.flag("symmetric", True)
    if strategy == "group":
        shape: tuple[int | None, int | None] = (1, weights.integer("group_size"))
    elif strategy == "channel":
        shape = (1, None)
    elif strategy == "tensor" and symmetric:
        shape = (None, None)
    else:
        raise weights.error("strategy", "group, channel or, if symmetric, tensor", strategy)
    order = weights.values.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.error("actorder", "group, weight, static, dynamic or null", order)
    return WeightFormat(
        layout=Layout.PACKED,
        encoding=encoding,
        block=shape,
        symmetric=symmetric,
        reorders=order in (True, "group", "dynamic") and strategy == "group",
    )


def _default_strategy(weights: ConfigReader) -> str:
    """What compressed-tensors assumes if a scheme does not say how many numbers share a scale."""
    size = weights.values.get("group_size")
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def _target(name: str) -> str:
    """A class, a module's full name, or a regular expression after ``re:``."""
    if name == "Linear":
        return ".*"
    return f"(?:{name[3:]}).*" if name.startswith("re:") else rf"{re.escape(name)}(?:\..*)?"
