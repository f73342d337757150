"""What several tools write into their ``quantization_config`` in the same way.

Must not know any particular tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.weight_format import Rule

ALL: Final = re.compile(".*")
HEAD: Final = re.compile("lm_head")
_LARGEST_GROUP: Final = 2**20


def check_kv(config: ConfigReader) -> None:
    """Raise ``ConfigError`` unless keys and values are plain, or 8-bit floats with one scale per
    layer (``kv_scales``)."""
    algorithm = config.word("kv_cache_quant_algo", "FP8")
    only(config, "kv_cache_quant_algo", algorithm, "FP8")
    if isinstance(named := config.values.get("kv_cache_scheme"), str):  # ModelOpt may write a name
        only(config, "kv_cache_scheme", named, "FP8")
        return
    scheme = config.table("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float"} if scheme else {}
    defaults = {"dynamic": False, "symmetric": True, "strategy": "tensor"}
    if any(scheme.get(key) != value for key, value in wanted.items()) or any(
        scheme.get(key, value) != value for key, value in defaults.items()
    ):
        raise config.error("kv_cache_scheme", "8-bit floats with one scale a tensor", scheme)


def block(config: ConfigReader, key: str) -> tuple[int, int] | None:
    """A block of outputs and inputs, or None."""
    value = config.values.get(key)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise config.error(key, "two integers >= 1", value)
    return sizes[0], sizes[1]


def group_size(config: ConfigReader, *keys: str) -> int | None:
    """The number of inputs in a group; None, which is -1 in the file, for all."""
    key = next((key for key in keys if key in config.values), keys[0])
    size = config.values.get(key, 128)
    if size == -1:
        return None
    size = config.integer(key, 128, maximum=_LARGEST_GROUP)
    if size % 8:
        raise config.error(key, "-1 or a multiple of 8", size)
    return size


def only(config: ConfigReader, key: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise ConfigError(f"{config.where}: {key} {value!r} is not supported, only {wanted!r}")


def refuse(config: ConfigReader, *keys: str) -> None:
    """Raise ``ConfigError`` if one of these keys, which change what is computed, says anything."""
    for key in keys:
        if config.values.get(key):
            raise ConfigError(f"{config.where}: {key} {config.values[key]!r} is not supported")


def names(config: ConfigReader, *keys: str) -> list[str]:
    """The strings that these keys list."""
    found: list[str] = []
    for key in keys:
        listed = config.values.get(key, [])
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise config.error(key, "a list of names", listed)
        found += listed
    return found


def plain(config: ConfigReader, names: Iterable[str], pattern: Callable[[str], str]) -> list[Rule]:
    return [Rule(regex(config, name, pattern(name)), None) for name in names]


def module(name: str) -> str:
    """A module's full name or its end, and everything below it."""
    return rf"(?:.*\.)?(?:{name})(?:\..*)?"


def regex(config: ConfigReader, written: str, pattern: str) -> re.Pattern[str]:
    """The expression ``pattern``, made of what is ``written`` in the file."""
    try:
        return re.compile(pattern)
    except re.error as error:  # with a position in ``pattern``, which nobody has written
        raise ConfigError(
            f"{config.where}: {written!r} is no regular expression: {error.msg}"
        ) from None
