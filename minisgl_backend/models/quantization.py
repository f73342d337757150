"""Reads how a checkpoint's weights are quantized, from config.json or ModelOpt's own file.

Each quantization tool has a function from its ``quantization_config`` to rules about projections,
and a line in ``_METHODS``. What cannot be computed is refused by name: a format that is misread
would give wrong text without an error. Knows JSON and the names of projections. Must not know
tensors.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader, read_json
from minisgl_backend.weight_format import (
    GROUP_OF_NVFP4,
    Encoding,
    Layout,
    Rule,
    WeightFormat,
    WeightFormats,
)

MODELOPT_FILE: Final = "hf_quant_config.json"
_SUPPORTED: Final = (
    "fp8 (in blocks, or per tensor), compressed-tensors, modelopt (FP8, NVFP4), awq, gptq, and "
    "mxfp4"
)
_ALL: Final = re.compile(".*")
_LARGEST_GROUP: Final = 2**20


def read_quantization(
    config: ConfigReader, modelopt: Mapping[str, Any] | None
) -> WeightFormats | None:
    """How the weights that ``config``, a config.json, describes are stored; None: all are plain.

    ``modelopt`` is the content of ``hf_quant_config.json``, if there is one; it is used if
    config.json says nothing. It also counts before a ``text_config``, which may still say how the
    weights were stored that ModelOpt began with. Raises ``ConfigError`` for what is not supported.
    """
    given, where = _given(config)
    if not given and modelopt is not None:
        where, values = MODELOPT_FILE, ConfigReader(modelopt, MODELOPT_FILE)
        given = {"quant_method": "modelopt", **values.table("quantization")}
    elif not given and config.table("text_config"):
        given, where = _given(config.part("text_config"))
    if not given:
        return None
    quantization = ConfigReader(given, where)
    method = quantization.word("quant_method", "").replace("_", "-") or next(
        (tool for key, tool in _TOLD_BY.items() if key in quantization.values), "no quant_method"
    )
    read = _METHODS.get(method)
    if read is None:
        raise ConfigError(
            f"{where}: weights quantized by {method} are not supported; supported are {_SUPPORTED}"
        )
    rules = read(quantization)
    return WeightFormats(method, tuple(rules)) if any(rule.format for rule in rules) else None


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


def _fp8(config: ConfigReader) -> list[Rule]:
    """Fine-grained FP8 of DeepSeek and Qwen, in blocks; AutoFP8, with one scale per weight."""
    scheme = config.word("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise config.error("activation_scheme", "dynamic or static", scheme)
    fmt = config.word("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{config.where}: fmt {fmt!r} is not supported, only 'e4m3'")
    _only(config, "expert_dtype", config.word("expert_dtype", "fp8"), "fp8")
    block = _block(config, "weight_block_size")
    form = WeightFormat(
        layout=Layout.FP8,
        encoding=Encoding.E4M3,
        block=block or (None, None),
        static_inputs=scheme == "static",
    )
    plain = _names(config, "modules_to_not_convert", "ignored_layers")
    return [*_plain(config, plain, _module), Rule(_ALL, form)]


def _awq(config: ConfigReader) -> list[Rule]:
    """AutoAWQ's AWQ; newer tools say ``format`` or ``checkpoint_format`` for ``version``."""
    for key in ("version", "format", "checkpoint_format"):
        _only(config, key, config.word(key, "gemm").lower(), "gemm")
    _only(config, "bits", config.integer("bits", config.integer("w_bit", 4)), 4)
    _only(config, "zero_point", config.flag("zero_point", True), True)
    form = WeightFormat(
        layout=Layout.AWQ,
        encoding=Encoding.INT4,
        block=(1, _group_size(config, "group_size", "q_group_size")),
        symmetric=False,
    )
    return [*_plain(config, _names(config, "modules_to_not_convert"), _module), Rule(_ALL, form)]


def _gptq(config: ConfigReader) -> list[Rule]:
    """GPTQ of AutoGPTQ and GPTQModel; ``dynamic`` lists modules that are treated differently."""
    version = config.word("checkpoint_format", config.word("format", "gptq"))
    layouts = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
    if version not in layouts or config.flag("is_marlin_format"):
        raise ConfigError(
            f"{config.where}: checkpoint_format {version!r}"
            + (" (marlin)" if config.flag("is_marlin_format") else "")
            + " is not supported, only 'gptq' and 'gptq_v2'"
        )
    _only(config, "pack_dtype", config.word("pack_dtype", "int32"), "int32")
    for key in ("rotation", "adapter"):  # GPTQModel's: they change what is computed
        if config.values.get(key):
            raise ConfigError(f"{config.where}: {key} {config.values[key]!r} is not supported")
    rules = [] if config.flag("lm_head") else [Rule(re.compile("lm_head"), None)]
    dynamic = ConfigReader(config.table("dynamic"), f"{config.where}: dynamic")
    for pattern in config.table("dynamic"):
        modules = _regex(config, f"(?:{pattern.removeprefix('-:').removeprefix('+:')}).*")
        own = ConfigReader(
            {**config.values, **dynamic.table(pattern)}, f"{dynamic.where}: {pattern}"
        )
        form = None if pattern.startswith("-:") else _gptq_format(own, layouts[version])
        rules.append(Rule(modules, form))
    return [*rules, Rule(_ALL, _gptq_format(config, layouts[version]))]


def _gptq_format(config: ConfigReader, layout: Layout) -> WeightFormat:
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise ConfigError(f"{config.where}: bits {bits} is not supported, only 4 and 8")
    group_size = _group_size(config, "group_size")
    return WeightFormat(
        layout=layout,
        encoding=Encoding.INT4 if bits == 4 else Encoding.INT8,
        block=(1, group_size),
        symmetric=config.flag("sym", True),
        reorders=config.flag("desc_act") and group_size is not None,
    )


def _modelopt(config: ConfigReader) -> list[Rule]:
    """ModelOpt's FP8, FP8 per channel and NVFP4, or several of them (MIXED_PRECISION): then each
    module is listed, or what holds it, such as all experts of a layer."""
    algorithm = config.values.get("quant_algo")
    if algorithm is None:  # keys and values at most
        if config.table("config_groups"):
            raise ConfigError(f"{config.where}: config_groups without quant_algo is not supported")
        return _only_kv(config)
    _check_kv(config)
    if algorithm == "MIXED_PRECISION":
        quantized = _modelopt_layers(config)
    else:
        quantized = [Rule(_ALL, _modelopt_format(config))]
    excluded = _names(config, "exclude_modules", "ignore")
    with_wildcards = [name for name in excluded if any(map(name.__contains__, "*?["))]
    listed = Rule(frozenset(excluded).difference(with_wildcards), None)
    return [listed, *_plain(config, with_wildcards, _glob), *quantized]


def _modelopt_layers(config: ConfigReader) -> list[Rule]:
    where = f"{config.where}: quantized_layers"
    layers = ConfigReader(config.table("quantized_layers"), where)
    if not layers.values:
        raise ConfigError(f"{where}: MIXED_PRECISION needs the modules that are quantized")
    names: dict[WeightFormat, set[str]] = {}
    for name in layers.values:
        layer = ConfigReader(layers.table(name), f"{where}: {name}")
        names.setdefault(_modelopt_format(layer), set()).add(name)
    return [Rule(frozenset(held), form) for form, held in names.items()]


def _modelopt_format(config: ConfigReader) -> WeightFormat:
    algorithm = str(config.values.get("quant_algo"))
    form = _MODELOPT.get(algorithm)
    if form is None:
        raise ConfigError(
            f"{config.where}: quant_algo {algorithm} is not supported; supported are "
            f"{', '.join(_MODELOPT)}, and MIXED_PRECISION of these"
        )
    if form.has_row_scales:
        size = config.integer("group_size", GROUP_OF_NVFP4)
        _only(config, "group_size", size, GROUP_OF_NVFP4)
    return form


def _mxfp4(config: ConfigReader) -> list[Rule]:
    """gpt-oss: only experts are quantized."""
    plain = _plain(config, _names(config, "modules_to_not_convert"), _module)
    form = WeightFormat(layout=Layout.MX_STACKED, encoding=Encoding.E2M1, block=(1, 32))
    return [*plain, Rule(re.compile(r".*\.mlp\.experts\..*"), form)]


def _compressed_tensors(config: ConfigReader) -> list[Rule]:
    """compressed-tensors, as llm-compressor writes it: groups of modules, each with a scheme. Of
    several targets that match, a name counts before an expression, and that before a class."""
    _check_kv(config)
    if config.table("transform_config"):
        raise ConfigError(f"{config.where}: transform_config (rotated weights) is not supported")
    sparsity = ConfigReader(config.table("sparsity_config"), f"{config.where}: sparsity_config")
    if sparsity.word("format", "dense") != "dense":
        raise ConfigError(f"{sparsity.where}: sparse weights are not supported")
    rules = _plain(config, _names(config, "ignore"), _target)
    outer = config.word("format", "dense")
    schemes: list[tuple[str, Rule]] = []
    for name in config.table("config_groups"):
        groups = ConfigReader(config.table("config_groups"), f"{config.where}: config_groups")
        group = ConfigReader(groups.table(name), f"{groups.where}.{name}")
        form = _scheme(group, group.word("format", outer))
        for target in _names(group, "targets"):
            schemes.append((target, Rule(_regex(group, _target(target)), form)))
    schemes.sort(key=lambda scheme: (scheme[0] == "Linear", scheme[0].startswith("re:")))
    return [*rules, *(rule for _, rule in schemes)]


def _scheme(group: ConfigReader, layout: str) -> WeightFormat | None:
    """The format of one group of modules; None if its weights are plain."""
    if not group.table("weights") or layout == "dense":
        return None
    weights = ConfigReader(group.table("weights"), f"{group.where}.weights")
    inputs = ConfigReader(group.table("input_activations"), f"{group.where}.input_activations")
    kind = weights.word("type", "int"), weights.integer("num_bits", 8)
    strategy = weights.word("strategy", _default_strategy(weights))
    if layout == "mxfp4-pack-quantized":
        _only(weights, "num_bits", kind[1], 4)
        _only(weights, "group_size", weights.integer("group_size", 32), 32)
        return WeightFormat(layout=Layout.MX_PACKED, encoding=Encoding.E2M1, block=(1, 32))
    if layout == "nvfp4-pack-quantized":
        return _nvfp4_format(weights, kind, strategy)
    if layout in ("float-quantized", "naive-quantized") and kind == ("float", 8):
        return _float8_format(weights, inputs, strategy)
    if layout == "pack-quantized" and kind in (("int", 4), ("int", 8)):
        if inputs.values:
            raise ConfigError(f"{inputs.where}: is not supported with {layout} weights")
        return _packed_format(weights, strategy, Encoding.INT4 if kind[1] == 4 else Encoding.INT8)
    raise ConfigError(
        f"{group.where}: {layout} weights of {kind[1]} bits ({kind[0]}) are not supported; "
        "supported are float-quantized of 8 bits, pack-quantized of 4 and 8, mxfp4-pack-quantized, "
        "nvfp4-pack-quantized"
    )


def _nvfp4_format(weights: ConfigReader, kind: tuple[str, int], strategy: str) -> WeightFormat:
    _only(weights, "type", kind[0], "float")
    _only(weights, "num_bits", kind[1], 4)
    _only(weights, "group_size", weights.integer("group_size", GROUP_OF_NVFP4), GROUP_OF_NVFP4)
    if strategy not in ("tensor_group", "group"):
        raise weights.error("strategy", "tensor_group or group", strategy)
    _only(weights, "symmetric", weights.flag("symmetric", True), True)
    scale_type = weights.word("scale_dtype", "float8_e4m3fn").removeprefix("torch.")
    _only(weights, "scale_dtype", scale_type, "float8_e4m3fn")
    return _NVFP4_PACKED


def _float8_format(weights: ConfigReader, inputs: ConfigReader, strategy: str) -> WeightFormat:
    shapes: dict[str, tuple[int | None, int | None] | None] = {
        "tensor": (None, None),
        "channel": (1, None),
        "block": _block(weights, "block_structure"),
    }
    shape = shapes.get(strategy)
    if shape is None:
        raise weights.error("strategy", "tensor, channel or block", strategy)
    _only(weights, "symmetric", weights.flag("symmetric", True), True)
    return WeightFormat(
        layout=Layout.FP8,
        encoding=Encoding.E4M3,
        block=shape,
        static_inputs=bool(inputs.values)
        and inputs.values.get("dynamic") is not True
        and inputs.values.get("dynamic") != "local",
    )


def _packed_format(weights: ConfigReader, strategy: str, encoding: Encoding) -> WeightFormat:
    symmetric = weights.flag("symmetric", True)
    if strategy == "group":
        block: tuple[int | None, int | None] = (1, weights.integer("group_size"))
    elif strategy == "channel":
        block = (1, None)
    elif strategy == "tensor" and symmetric:
        block = (None, None)
    else:
        raise weights.error("strategy", "group, channel or, if symmetric, tensor", strategy)
    order = weights.values.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise weights.error("actorder", "group, weight, static, dynamic or null", order)
    return WeightFormat(
        layout=Layout.PACKED,
        encoding=encoding,
        block=block,
        symmetric=symmetric,
        reorders=order in (True, "group", "dynamic") and strategy == "group",
    )


def _default_strategy(weights: ConfigReader) -> str:
    """What compressed-tensors assumes if a scheme does not say how many numbers share a scale."""
    size = weights.values.get("group_size")
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def _check_kv(config: ConfigReader) -> None:
    """Raise ``ConfigError`` unless keys and values are plain, or 8-bit floats with one scale per
    layer (``kv_scales``)."""
    algorithm = config.word("kv_cache_quant_algo", "FP8")
    _only(config, "kv_cache_quant_algo", algorithm, "FP8")
    if isinstance(named := config.values.get("kv_cache_scheme"), str):  # ModelOpt may write a name
        _only(config, "kv_cache_scheme", named, "FP8")
        return
    scheme = config.table("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float"} if scheme else {}
    defaults = {"dynamic": False, "symmetric": True, "strategy": "tensor"}
    if any(scheme.get(key) != value for key, value in wanted.items()) or any(
        scheme.get(key, value) != value for key, value in defaults.items()
    ):
        raise config.error("kv_cache_scheme", "8-bit floats with one scale a tensor", scheme)


def _only_kv(config: ConfigReader) -> list[Rule]:
    if "kv_cache_scheme" not in config.values and "kv_cache_quant_algo" not in config.values:
        raise ConfigError(f"{config.where}: neither quant_algo nor kv_cache_scheme is given")
    _check_kv(config)
    return []


def _block(config: ConfigReader, key: str) -> tuple[int, int] | None:
    """A block of outputs and inputs, or None."""
    value = config.values.get(key)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise config.error(key, "two integers >= 1", value)
    return sizes[0], sizes[1]


def _group_size(config: ConfigReader, *keys: str) -> int | None:
    """The number of inputs in a group; None, which is -1 in the file, for all."""
    key = next((key for key in keys if key in config.values), keys[0])
    size = config.values.get(key, 128)
    if size == -1:
        return None
    size = config.integer(key, 128, maximum=_LARGEST_GROUP)
    if size % 8:
        raise config.error(key, "-1 or a multiple of 8", size)
    return size


def _only(config: ConfigReader, key: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise ConfigError(f"{config.where}: {key} {value!r} is not supported, only {wanted!r}")


def _names(config: ConfigReader, *keys: str) -> list[str]:
    """The strings that these keys list."""
    found: list[str] = []
    for key in keys:
        names = config.values.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise config.error(key, "a list of names", names)
        found += names
    return found


def _plain(config: ConfigReader, names: Iterable[str], pattern: Callable[[str], str]) -> list[Rule]:
    return [Rule(_regex(config, pattern(name)), None) for name in names]


def _module(name: str) -> str:
    """A module's full name or its end, and everything below it."""
    return rf"(?:.*\.)?(?:{name})(?:\..*)?"


def _glob(name: str) -> str:
    """The same, with the wildcards of a shell."""
    globs = name, f"*.{name}", f"{name}.*", f"*.{name}.*"
    return "|".join(map(fnmatch.translate, globs))


def _target(name: str) -> str:
    """compressed-tensors: a class, a module's full name, or a regular expression after ``re:``."""
    if name == "Linear":
        return ".*"
    return f"(?:{name[3:]}).*" if name.startswith("re:") else rf"{re.escape(name)}(?:\..*)?"


def _regex(config: ConfigReader, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{config.where}: {pattern!r} is no regular expression: {error}"
        ) from None


_TOLD_BY: Final = MappingProxyType(
    {"quant_algo": "modelopt", **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "bitsandbytes")}
    | {"group_size": "mlx"}
)
"""Keys that give the tool away in a config without ``quant_method``."""
_METHODS: Final[Mapping[str, Callable[[ConfigReader], list[Rule]]]] = MappingProxyType(
    {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        **dict.fromkeys(("modelopt", "modelopt-fp4", "modelopt-mixed"), _modelopt),
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
)
_NVFP4: Final = WeightFormat(
    layout=Layout.NV_MODELOPT, encoding=Encoding.E2M1, block=(1, GROUP_OF_NVFP4)
)
_NVFP4_PACKED: Final = replace(_NVFP4, layout=Layout.NV_PACKED)
_MODELOPT: Final = MappingProxyType(
    {
        "FP8": WeightFormat(
            layout=Layout.FP8, encoding=Encoding.E4M3, block=(None, None), static_inputs=True
        ),
        "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(
            layout=Layout.FP8, encoding=Encoding.E4M3, block=(1, None)
        ),
        **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), _NVFP4),
    }
)
"""Of NVFP4, the second name says that the tool did not measure activations."""
