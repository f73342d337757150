"""A LoRA adapter's ``adapter_config.json``: which modules it adapts, with which rank and scaling.

Names and patterns match as PEFT matches them. Fields that would change what an adapter computes are
refused by name. Must not know tensors, or which modules a model has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minisgl_backend.errors import ConfigError

CONFIG: Final = "adapter_config.json"
"""The name of the file."""
_LAYER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""Where PEFT finds the number of a module's layer, unless the config names other patterns."""
_ALL_LINEAR: Final = "all-linear"
_MOST_RANK: Final = 4096
_MOST_BASE: Final = 200
"""The most characters of the base model's name that are kept."""
_REPEAT: Final = 4
"""What a repeat costs: the binary logarithm of the number of places at which it may end, as a rule.
An optional part costs 1, and so does a choice between two alternatives that may both match."""
_MOST_COST: Final = 6 * _REPEAT
"""The most that a pattern may cost: with so many ways to match, a name takes some 50 ms."""
_MOST_IN_ALL: Final = 30
"""The most repeats in all alternatives together, which are tried one after the other."""
_SYMBOL: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}[?+]?|[*+?][?+]?|.", re.DOTALL
)
"""The tokens of a regular expression: something escaped, a set, a repeat or a character."""
_PLAIN: Final = re.compile(r"[a-zA-Z0-9_-]|\\[._-]")
"""Tokens that match one character."""

_READ: Final = frozenset(
    {"base_model_name_or_path", "peft_type", "r", "lora_alpha", "use_rslora"}
    | {"target_modules", "exclude_modules"}
    | {"rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "bias"}
    | {"init_lora_weights"}
)
_NO_MATTER: Final = frozenset(
    {"auto_mapping", "corda_config", "ensure_weight_tying", "fan_in_fan_out"}
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
        base = fields.get("base_model_name_or_path")
        self.base = base[:_MOST_BASE] if isinstance(base, str) else ""
        """The model that the adapter was trained for, by its id or its path then; empty if the file
        does not say. It may be here under any other name, so it cannot be compared."""
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
        # a pattern of the config may have groups of its own, which come first
        return any(match and int(match[match.re.groups]) in self._layers for match in found)

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
            f"at most {_MOST_COST // _REPEAT} repeats in an alternative, {_MOST_IN_ALL} in all, "
            "and none of a group with repeats or alternatives; "
            f"{_REPEAT} optional parts or choices count as a repeat in an alternative"
        )
    return compiled


@dataclass(slots=True)
class _Group:
    """What is known of an open group of a pattern. ``words`` are its alternatives, None if these
    are not plain characters. It ``varies`` if there are several ways to match it. ``cost`` is that
    of the alternative so far, ``most`` that of those before."""

    words: list[str] | None = field(default_factory=lambda: [""])
    num_alternatives: int = 1
    varies: bool = False
    cost: int = 0
    most: int = 0

    def branch(self) -> None:
        """Another alternative begins."""
        self.num_alternatives += 1
        self.varies = True
        self.most, self.cost = max(self.most, self.cost), 0
        if self.words is not None:
            self.words.append("")

    @property
    def num_ways(self) -> int:
        """Number of alternatives that may match at one place: of words, those that begin each
        other, whatever their case."""
        if self.words is None:
            return self.num_alternatives
        most, beginnings = 0, list[str]()
        for word in sorted(word.lower() for word in self.words):
            while beginnings and not word.startswith(beginnings[-1]):
                beginnings.pop()
            beginnings.append(word)
            most = max(most, len(beginnings))
        return most

    @property
    def total(self) -> int:
        """The cost of the whole group."""
        return max(self.most, self.cost) + (self.num_ways - 1).bit_length()


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression takes only a bounded time for a module's name, during which no
    other thread of the process runs. Some expressions that do are not recognized."""
    groups, in_all = [_Group()], 0
    before, varied = "", False  # the symbol before; whether it ends a group that varies
    for match in _SYMBOL.finditer(pattern):
        symbol, group = match[0], groups[-1]
        is_repeat = symbol[0] in "*+{" and symbol != "{"
        if symbol == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].words = None
            groups[-1].varies |= group.varies
            groups[-1].cost += group.total
        elif symbol == "(":
            groups.append(_Group())
        elif symbol == "|":
            group.branch()
        elif is_repeat or (symbol[0] == "?" and before != "("):
            if is_repeat and varied:
                return False
            group.words, group.varies = None, True
            group.cost += _REPEAT if is_repeat else 1
            in_all += is_repeat
        elif group.words is not None and _PLAIN.fullmatch(symbol):
            group.words[-1] += symbol[-1]
        elif before + symbol not in ("(?", "?:"):
            group.words = None
        before, varied = symbol, symbol == ")" and group.varies
    return in_all <= _MOST_IN_ALL and groups[0].total <= _MOST_COST


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
