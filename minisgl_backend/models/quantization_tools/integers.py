"""Integers with a scale for a group of inputs: AWQ, GPTQ, and AutoRound, which packs as they do."""

from __future__ import annotations

import re
from typing import Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.quantization_tools.fields import (
    ALL,
    HEAD,
    group_size,
    module,
    names,
    only,
    plain,
    refuse,
    regex,
)
from minisgl_backend.weight_format import Encoding, Layout, Rule, WeightFormat

_PACKING: Final = re.compile(r"(?:auto_round:)?(?:auto_)?(gptq|awq)(?::\w+)?")
"""What AutoRound calls the other tools' layouts. Files of old versions also name a kernel."""
_IN_PATTERNS: Final = re.compile(r"[*+?^$()\[\]{}|\\]")
"""Characters that tell expressions from names of modules, which have none of them."""


def read_awq(config: ConfigReader) -> list[Rule]:
    """AutoAWQ's AWQ; newer tools say ``format`` or ``checkpoint_format`` for ``version``.

    The files that AutoRound writes with ``zero_point`` false have zero points, too, all the same.
    """
    for key in ("version", "format", "checkpoint_format"):
        only(config, key, config.word(key, "gemm").lower(), "gemm")
    listed = names(config, "modules_to_not_convert")
    return [*plain(config, listed, module), Rule(ALL, _awq_format(config))]


def _awq_format(config: ConfigReader) -> WeightFormat:
    only(config, "bits", config.integer("bits", config.integer("w_bit", 4)), 4)
    return WeightFormat(
        layout=Layout.AWQ,
        encoding=Encoding.INT4,
        block=(1, group_size(config, "group_size", "q_group_size")),
        symmetric=False,
    )


def read_gptq(config: ConfigReader) -> list[Rule]:
    """GPTQ of AutoGPTQ and GPTQModel; ``dynamic`` lists modules that are treated differently."""
    version = config.word("checkpoint_format", config.word("format", "gptq"))
    layouts = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
    if version not in layouts or config.flag("is_marlin_format"):
        raise ConfigError(
            f"{config.where}: checkpoint_format {version!r}"
            + (" (marlin)" if config.flag("is_marlin_format") else "")
            + " is not supported, only 'gptq' and 'gptq_v2'"
        )
    only(config, "pack_dtype", config.word("pack_dtype", "int32"), "int32")
    refuse(config, "rotation", "adapter")  # GPTQModel's
    rules = [] if config.flag("lm_head") else [Rule(HEAD, None)]
    dynamic = ConfigReader(config.table("dynamic"), f"{config.where}: dynamic")
    for pattern in config.table("dynamic"):
        names_of = f"(?:{pattern.removeprefix('-:').removeprefix('+:')}).*"
        modules = regex(dynamic, pattern, names_of)
        own = ConfigReader(
            {**config.values, **dynamic.table(pattern)}, f"{dynamic.where}: {pattern}"
        )
        form = None if pattern.startswith("-:") else _gptq_format(own, layouts[version])
        rules.append(Rule(modules, form))
    return [*rules, Rule(ALL, _gptq_format(config, layouts[version]))]


def _gptq_format(config: ConfigReader, layout: Layout) -> WeightFormat:
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise ConfigError(f"{config.where}: bits {bits} is not supported, only 4 and 8")
    size = group_size(config, "group_size")
    return WeightFormat(
        layout=layout,
        encoding=Encoding.INT4 if bits == 4 else Encoding.INT8,
        block=(1, size),
        symmetric=config.flag("sym", True),
        reorders=config.flag("desc_act") and size is not None,
    )


def read_auto_round(config: ConfigReader) -> list[Rule]:
    """AutoRound of Intel. ``extra_config`` has what is different for a module, or for those in
    whose names an expression is found; names count before expressions. Blocks that are listed are
    quantized, and by default all is but the output head."""
    said = config.word("packing_format", config.word("backend", "auto"))
    packing = _PACKING.fullmatch("auto_gptq" if said == "auto" else said)
    if packing is None:
        raise ConfigError(
            f"{config.where}: packing_format {said!r} is not supported, only "
            "'auto_round:auto_gptq' and 'auto_round:auto_awq'"
        )
    refuse(config, "rotation_config", "spinquant_config", "hadamard_config", "transform_config")
    extra = ConfigReader(config.table("extra_config"), f"{config.where}: extra_config")
    by_name: dict[WeightFormat | None, set[str]] = {}
    by_pattern: list[Rule] = []
    for name in extra.values:
        own = ConfigReader({**config.values, **extra.table(name)}, f"{extra.where}: {name}")
        form = _auto_round_format(own, packing[1])
        if _IN_PATTERNS.search(name) is not None:
            by_pattern.append(Rule(regex(extra, name, f".*(?:{name}).*"), form))
        else:
            by_name.setdefault(form, set()).add(name)
    form = _auto_round_format(config, packing[1])
    blocks = _blocks(config)
    return [
        *plain(config, names(config, "modules_to_not_convert"), module),
        *(Rule(frozenset(held), form) for form, held in by_name.items()),
        *by_pattern,
        *([Rule(frozenset(blocks), form)] if blocks else [Rule(HEAD, None), Rule(ALL, form)]),
    ]


def _auto_round_format(config: ConfigReader, packing: str) -> WeightFormat | None:
    """How AutoRound stores a module; None if it left it plain."""
    if config.integer("bits") >= 16:
        return None
    only(config, "data_type", config.word("data_type", "int"), "int")
    if (bits := config.integer("act_bits", 16)) < 16:
        raise ConfigError(f"{config.where}: act_bits {bits} is not supported, only 16")
    return _awq_format(config) if packing == "awq" else _gptq_format(config, Layout.GPTQ)


def _blocks(config: ConfigReader) -> list[str]:
    """The modules below which AutoRound has quantized; none if nothing is said."""
    key = "block_name_to_quantize"
    if not config.values.get(key):
        key = "to_quant_block_names"
    value = config.values.get(key) or []
    if isinstance(value, str):
        value = value.split(",")
    parts = value if isinstance(value, list) else [value]
    flat = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    return [name.strip() for name in names(ConfigReader({key: flat}, config.where), key)]
