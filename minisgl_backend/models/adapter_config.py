"""A LoRA adapter's ``adapter_config.json``: which modules it adapts, with which rank and scaling.

Names and patterns match as PEFT matches them. Fields that would change what an adapter computes are
refused by name. Must not know tensors, or which modules a model has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl_backend.errors import ConfigError

CONFIG: Final = "adapter_config.json"
"""The name of the file."""
_LAYER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""Where PEFT finds the number of a module's layer, unless the config names other patterns."""
_ALL_LINEAR: Final = "all-linear"
_MOST_RANK: Final = 4096
_MOST_REPEATS: Final = 6
"""The most repeats on one way through a pattern: with this many, each of which may begin anywhere,
a name takes some 50 ms."""
_MOST_IN_ALL: Final = 30
"""The most repeats in all alternatives together, which are tried one after the other."""
_SYMBOL: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}[?+]?|[*+][?+]?|.", re.DOTALL
)
"""The tokens of a regular expression: something escaped, a set, a repeat or a character."""

_READ: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules"}
    | {"rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "bias"}
    | {"init_lora_weights"}
)
_NO_MATTER: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"}
    | {"eva_config", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config"}
    | {"megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"}
)
"""Fields that do not change what a loaded adapter computes. Any other field must be off."""
_HARMLESS_STARTS: Final = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights``; all others also change the weights of the base model."""


def check_adapter_folder(folder: Path) -> None:
    """Raise ``ConfigError`` if there is no such folder, or no config in it, or if this user may not
    read it."""
    try:
        if not folder.is_dir():
            wrong = "is not a folder" if folder.exists() else "does not exist"
            raise ConfigError(f"the adapter's folder {folder} {wrong}")
        if not (folder / CONFIG).exists():
            raise ConfigError(f"{folder / CONFIG} does not exist")
    except OSError as error:
        raise ConfigError(
            f"the adapter's folder {folder} cannot be read: {error.strerror}"
        ) from None


class AdapterConfig:
    """The fields that say what an adapter computes."""

    def __init__(self, fields: Mapping[str, Any]):
        """Raises ``ConfigError`` for a field that is malformed or not supported."""
        if fields.get("peft_type") != "LORA":
            raise ConfigError(f"{CONFIG}: peft_type must be LORA, got {fields.get('peft_type')!r}")
        for name, value in fields.items():
            if name not in _READ | _NO_MATTER and value not in (None, False, {}, [], ""):
                raise ConfigError(f"{CONFIG}: {name} is not supported, got {_short(value)}")
        if fields.get("bias", "none") != "none":
            raise ConfigError(f"{CONFIG}: bias must be none, got {_short(fields['bias'])}")
        start = fields.get("init_lora_weights", True)
        if start not in _HARMLESS_STARTS:
            raise ConfigError(
                f"{CONFIG}: init_lora_weights={_short(start)} changes the base model's weights; "
                "convert the adapter to one for the unchanged model"
            )
        self._rank = _number(fields, "r", 8)
        self._alpha = _number(fields, "lora_alpha", 8)
        self._rslora = _flag(fields, "use_rslora")
        self._targets = _modules(fields, "target_modules")
        self._excluded = _modules(fields, "exclude_modules")
        self._ranks = _pattern(fields, "rank_pattern")
        self._alphas = _pattern(fields, "alpha_pattern")
        self._layers = _integers(fields, "layers_to_transform")
        patterns = _modules(fields, "layers_pattern") or []
        self._layer_patterns = [
            _compiled("layers_pattern", pattern, rf"(?:^|.*?\.){pattern}\.(\d+)\.")
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
        ] or [_LAYER]
        if self._targets is None:
            raise ConfigError(f"{CONFIG}: target_modules is missing")

    def names(self, module: str) -> bool:
        """Whether this module is among the targets, and not only because of ``all-linear``."""
        return self._targets != _ALL_LINEAR and self.targets(module)

    def targets(self, module: str) -> bool:
        """Whether the module of this name is adapted."""
        if self._excluded is not None and _matches("exclude_modules", self._excluded, module):
            return False
        if self._targets == _ALL_LINEAR:
            is_pattern = False
        else:
            assert self._targets is not None
            if not _matches("target_modules", self._targets, module):
                return False
            is_pattern = isinstance(self._targets, str)
        if not self._layers or is_pattern:
            return True
        found = (pattern.match(module) for pattern in self._layer_patterns)
        return any(match is not None and int(match[1]) in self._layers for match in found)

    def rank_of(self, module: str) -> int:
        """The rank of a targeted module's factors."""
        return int(_by_pattern("rank_pattern", self._ranks, module, self._rank))

    def scaling_of(self, module: str) -> float:
        """What a targeted module's (x A^T) B^T is multiplied by."""
        rank = self.rank_of(module)
        alpha = _by_pattern("alpha_pattern", self._alphas, module, self._alpha)
        return float(alpha / (rank**0.5 if self._rslora else rank))


def _matches(name: str, modules: str | list[str], module: str) -> bool:
    if isinstance(modules, str):
        return _compiled(name, modules).fullmatch(module) is not None
    return any(module == end or module.endswith(f".{end}") for end in modules)


def _by_pattern(name: str, patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if _compiled(name, pattern, rf"(.*\.)?({pattern})$").match(module):
            return value
    return default


def _compiled(name: str, pattern: str, around: str | None = None) -> re.Pattern[str]:
    """A field's ``pattern``, or what PEFT has ``around`` it."""
    try:
        re.compile(pattern)
        compiled = re.compile(around or pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: {name} holds no regular expression: {error}") from None
    if not _is_quick(pattern):
        raise ConfigError(
            f"{CONFIG}: {name} holds a pattern that may take forever, as {_short(pattern)} does: "
            f"at most {_MOST_REPEATS} repeats in an alternative, {_MOST_IN_ALL} in all, and none "
            "of a group with repeats or alternatives"
        )
    return compiled


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression takes only a bounded time for a module's name, during which no
    other thread of the process runs. Some expressions that do are not recognized."""
    varies = [False]  # of each open group: whether there are several ways to match it
    repeats, most = [0], [0]  # of each open group: in the alternative so far, in those before
    in_all, closed = 0, False
    for match in _SYMBOL.finditer(pattern):
        symbol = match[0]
        if symbol == "(":
            varies.append(False)
            repeats.append(0)
            most.append(0)
        elif symbol == ")" and len(varies) > 1:
            closed = varies.pop()
            varies[-1] |= closed
            inside = max(repeats.pop(), most.pop())
            repeats[-1] += inside
            continue
        elif symbol[0] in "*+" or (symbol[0] == "{" and len(symbol) > 1):
            repeats[-1] += 1
            in_all += 1
            varies[-1] = True
            if closed:
                return False
        elif symbol == "|":
            varies[-1] = True
            most[-1] = max(most[-1], repeats[-1])
            repeats[-1] = 0
        closed = False
    return in_all <= _MOST_IN_ALL and max(repeats[0], most[0]) <= _MOST_REPEATS


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    is_number = type(value) is int or (type(value) is float and name == "lora_alpha")
    if not is_number or not 0 < value <= _MOST_RANK:
        raise ConfigError(f"{CONFIG}: {name} must be 1..{_MOST_RANK}, got {_short(value)}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False):
        raise ConfigError(f"{CONFIG}: {name} must be true or false, got {_short(value)}")
    return bool(value)


def _modules(fields: Mapping[str, Any], name: str) -> str | list[str] | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return value or None
    raise ConfigError(f"{CONFIG}: {name} must be names or a pattern, got {_short(value)}")


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, float]:
    value = fields.get(name) or {}
    numbers = (int,) if name == "rank_pattern" else (int, float)
    if not isinstance(value, dict) or not all(
        type(entry) in numbers and 0 < entry <= _MOST_RANK for entry in value.values()
    ):
        raise ConfigError(f"{CONFIG}: {name} must map names to numbers, got {_short(value)}")
    return value


def _integers(fields: Mapping[str, Any], name: str) -> list[int] | None:
    value = fields.get(name)
    if value is None:
        return None
    entries = value if isinstance(value, list) else [value]
    if not all(type(entry) is int for entry in entries):
        raise ConfigError(f"{CONFIG}: {name} must be layer numbers, got {_short(value)}")
    return entries


def _short(value: object) -> str:
    return repr(value)[:80]
