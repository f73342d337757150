"""LoRA adapters in PEFT's format (arXiv 2106.09685): ``adapter_config.json`` and
``adapter_model.safetensors``.

An adapter adds (x A^T) B^T * scaling to the outputs of projections; A [r, in_features] and
B [out_features, r] are small. Knows the format. Variants that compute anything else are refused,
with the name of the field or tensor. Must not know slots, ranks of a group or devices. Reads
headers, and tensors through ``weights``; nothing pickled is ever opened.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.weight_place import FLOATS
from minisgl_backend.models.checkpoint import TensorHeader, check_adapter_folder, read_header
from minisgl_backend.models.config_json import read_json
from minisgl_backend.models.tensor_names import TensorNames
from minisgl_backend.models.weights import load_tensors

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_TENSOR: Final = re.compile(r"(.+)\.lora_([AB])\.weight")
_LAYER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""Where PEFT finds the number of a module's layer, unless the config names other patterns."""
_ALL_LINEAR: Final = "all-linear"
_NEVER: Final = ("lm_head", "model.embed_tokens")
"""What ``all-linear`` does not include."""
_MOST_RANK: Final = 4096
_MOST_REPEATS: Final = 6
"""The most repeats in a pattern: with this many, each of which may begin anywhere, a name takes
some 50 ms."""
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


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map of the model that adapters may add to, in its whole size, over all ranks."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Factors:
    """Where one projection's factors are in the file: tensor names, the rows of B (all rows, unless
    the tensor is for several projections), rank and scaling."""

    a: str
    b: str
    rows: slice
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A checked adapter: the ``factors`` of each projection that it adds to, by the projection's
    name in the checkpoint, and the largest rank among them. ``state`` is a number that changes when
    the files are written again."""

    path: Path
    factors: Mapping[str, Factors]
    rank: int
    state: int

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
        """For each projection, A [rank, in_features] and B [out_features, rank] times the scaling,
        both in ``dtype``; ``rank`` is the projection's own.

        Raises ``ConfigError`` if the file cannot be read, or for numbers that are not finite or too
        large for ``dtype``.
        """
        held = load_tensors(self.path)
        for name, factors in self.factors.items():
            for key in (factors.a, factors.b):
                if key not in held:  # it was there when the file was opened
                    raise ConfigError(f"the adapter lacks {key}")
            a = held[factors.a].to(dtype)
            b = (held[factors.b][factors.rows].float() * factors.scaling).to(dtype)
            for key, values in ((factors.a, a), (factors.b, b)):
                if not _is_finite(values):
                    what = f"too large for {dtype}" if _is_finite(held[key]) else "not finite"
                    raise ConfigError(f"{key} of the adapter has numbers that are {what}")
            yield name, a, b


def _is_finite(values: Tensor) -> bool:
    """Takes only one pass over the numbers: an adapter has hundreds of small tensors, and each
    PyTorch operation waits for all its threads, which a busy machine runs late."""
    return all(math.isfinite(bound) for bound in values.aminmax()) if values.numel() else True


def open_adapter(
    folder: Path, projections: Mapping[str, Projection], names: TensorNames, *, max_rank: int
) -> AdapterFile:
    """The adapter in ``folder``, if it fits a model with these projections, which have the
    decoder's names. ``names`` are those of the checkpoint's tensors, which the adapter may also
    use.

    Reads the config and the header of the weights. Raises a ``ConfigError`` that names the field or
    tensor that does not fit.
    """
    path = folder / _WEIGHTS
    check_adapter_folder(folder)
    state = _state_of(folder / _CONFIG, path)  # before they are read
    for file in (folder / _CONFIG, path):
        if file.exists() and not file.is_file():  # reading a pipe would wait
            raise ConfigError(f"{file} is no regular file")
    config = _Config(read_json(folder / _CONFIG))
    for module in _NEVER:
        if config.names(module):
            raise ConfigError(f"{_CONFIG}: target_modules has {module}, which takes no adapters")
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise ConfigError(f"{folder} holds pickled weights only; only safetensors are read")
    headers = read_header(path)
    factors: dict[str, Factors] = {}
    for module, (a, b) in _pairs(headers).items():
        if not config.targets(module):
            raise ConfigError(f"{a} of the adapter is of no module that {_CONFIG} targets")
        num_rows = headers[b].shape[0] if headers[b].shape else 0
        parts = _parts(module, num_rows, names)
        if not parts or not parts.keys() <= projections.keys():
            raise ConfigError(
                f"{a} of the adapter is not supported: the model takes adapters only for "
                f"{', '.join(_kinds(projections))} of its layers"
            )
        rank, first = config.rank_of(module), projections[next(iter(parts))]
        if rank > max_rank:
            raise ConfigError(
                f"{a} of the adapter has the rank {rank}, and max_lora_rank={max_rank}"
            )
        num_outs = sum(projections[part].out_features for part in parts)
        _check_header(a, headers[a], (rank, first.in_features))
        _check_header(b, headers[b], (num_outs, rank))
        scaling = config.scaling_of(module)
        for part, rows in parts.items():
            factors[part] = Factors(a, b, rows, rank, scaling)
    for name in projections:
        module = names.merged_module(name)
        if name not in factors and config.targets(module):
            raise ConfigError(f"the adapter lacks {_PREFIX}{module}.lora_A.weight")
    if not factors:
        raise ConfigError(f"{path} adds to no projection of the model")
    rank = max(each.rank for each in factors.values())
    return AdapterFile(path, MappingProxyType(factors), rank, state)


def _state_of(*paths: Path) -> int:
    told = []
    for path in paths:
        with contextlib.suppress(OSError):  # its reader reports the error
            found = path.stat()
            told += [found.st_mtime_ns, found.st_size]
    return zlib.crc32(repr(told).encode())


def _pairs(headers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The names of both factors of each module that has them, by the module's name in the file."""
    found: dict[str, dict[str, str]] = {}
    for name in headers:
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None or not name.startswith(_PREFIX):
            raise ConfigError(f"{name} of the adapter is not supported{_why_not(name)}")
        module, factor = match.groups()
        found.setdefault(module, {})[factor] = name
    pairs = {}
    for module, named in found.items():
        for factor in "AB":
            if factor not in named:
                raise ConfigError(f"the adapter lacks {_PREFIX}{module}.lora_{factor}.weight")
        pairs[module] = named["A"], named["B"]
    return pairs


def _parts(module: str, num_rows: int, names: TensorNames) -> dict[str, slice]:
    """The projections in a module that the file names, each with its part of the outputs."""
    parts = {}
    for weight, stored in names.weights(f"{module}.weight", (num_rows, 1)):
        (rows,) = stored.region or (slice(None),)
        assert isinstance(rows, slice)  # a linear module is no stack of experts
        parts[weight.removesuffix(".weight")] = rows
    return parts


def _why_not(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return ": it belongs to DoRA"
    if "lora_embedding" in name:
        return ": embeddings take no adapters"
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "base_layer.weight")):
        return ": an adapter does not replace embeddings or the output head"
    return ""


def _kinds(projections: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in projections))


def _check_header(name: str, header: TensorHeader, shape: tuple[int, int]) -> None:
    if header.shape != shape:
        raise ConfigError(f"{name} of the adapter has the shape {header.shape}, not {shape}")
    if header.dtype not in FLOATS:
        raise ConfigError(
            f"{name} of the adapter has the type {header.dtype}, not {' or '.join(FLOATS)}"
        )


class _Config:
    """``adapter_config.json``: which modules are targeted, and each one's rank and scaling.

    Names and patterns match as PEFT matches them.
    """

    def __init__(self, fields: Mapping[str, Any]):
        if fields.get("peft_type") != "LORA":
            raise ConfigError(f"{_CONFIG}: peft_type must be LORA, got {fields.get('peft_type')!r}")
        for name, value in fields.items():
            if name not in _READ | _NO_MATTER and value not in (None, False, {}, [], ""):
                raise ConfigError(f"{_CONFIG}: {name} is not supported, got {_short(value)}")
        if fields.get("bias", "none") != "none":
            raise ConfigError(f"{_CONFIG}: bias must be none, got {_short(fields['bias'])}")
        start = fields.get("init_lora_weights", True)
        if start not in _HARMLESS_STARTS:
            raise ConfigError(
                f"{_CONFIG}: init_lora_weights={_short(start)} changes the base model's weights; "
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
            raise ConfigError(f"{_CONFIG}: target_modules is missing")

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
        return int(_by_pattern("rank_pattern", self._ranks, module, self._rank))

    def scaling_of(self, module: str) -> float:
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
        raise ConfigError(f"{_CONFIG}: {name} holds no regular expression: {error}") from None
    if not _is_quick(pattern):
        raise ConfigError(
            f"{_CONFIG}: {name} holds a pattern that may take for ever, as {_short(pattern)} does: "
            f"at most {_MOST_REPEATS} repeats, and none of a group with repeats or alternatives"
        )
    return compiled


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression takes only a bounded time for a module's name, during which no
    other thread of the process runs. Some expressions that do are not recognized."""
    varies = [False]  # of each open group: whether there are several ways to match it
    repeats, closed = 0, False
    for match in _SYMBOL.finditer(pattern):
        symbol = match[0]
        if symbol == "(":
            varies.append(False)
        elif symbol == ")":
            closed = len(varies) > 1 and varies.pop()
            varies[-1] |= closed
            continue
        elif symbol[0] in "*+" or (symbol[0] == "{" and len(symbol) > 1):
            repeats += 1
            varies[-1] = True
            if closed or repeats > _MOST_REPEATS:
                return False
        elif symbol == "|":
            varies[-1] = True
        closed = False
    return True


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    is_number = type(value) is int or (type(value) is float and name == "lora_alpha")
    if not is_number or not 0 < value <= _MOST_RANK:
        raise ConfigError(f"{_CONFIG}: {name} must be 1..{_MOST_RANK}, got {_short(value)}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False):
        raise ConfigError(f"{_CONFIG}: {name} must be true or false, got {_short(value)}")
    return bool(value)


def _modules(fields: Mapping[str, Any], name: str) -> str | list[str] | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return value or None
    raise ConfigError(f"{_CONFIG}: {name} must be names or a pattern, got {_short(value)}")


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, float]:
    value = fields.get(name) or {}
    numbers = (int,) if name == "rank_pattern" else (int, float)
    if not isinstance(value, dict) or not all(
        type(entry) in numbers and 0 < entry <= _MOST_RANK for entry in value.values()
    ):
        raise ConfigError(f"{_CONFIG}: {name} must map names to numbers, got {_short(value)}")
    return value


def _integers(fields: Mapping[str, Any], name: str) -> list[int] | None:
    value = fields.get(name)
    if value is None:
        return None
    entries = value if isinstance(value, list) else [value]
    if not all(type(entry) is int for entry in entries):
        raise ConfigError(f"{_CONFIG}: {name} must be layer numbers, got {_short(value)}")
    return entries


def _short(value: object) -> str:
    return repr(value)[:80]
