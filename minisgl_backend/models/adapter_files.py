"""LoRA adapters in PEFT's format (arXiv 2106.09685): ``adapter_config.json`` (``adapter_config``)
and ``adapter_model.safetensors``.

An adapter adds (x A^T) B^T * scaling to the outputs of projections; A [r, in_features] and
B [out_features, r] are small. Knows the format. Variants that compute anything else are refused,
with the name of the field or tensor. Must not know slots, ranks of a group or devices. Reads
headers, and tensors through ``weights``; nothing pickled is ever opened.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.weight_place import FLOATS
from minisgl_backend.models.adapter_config import CONFIG, AdapterConfig, check_adapter_folder
from minisgl_backend.models.checkpoint import TensorHeader, read_header
from minisgl_backend.models.config_json import read_json
from minisgl_backend.models.tensor_names import LAYER, TensorNames
from minisgl_backend.models.weights import load_tensors

_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_TENSOR: Final = re.compile(r"(.+)\.lora_([AB])\.weight")
_NUMBER: Final = re.compile(r"\.\d+\.")
"""A layer's in the name of a module."""
_NEVER: Final = ("lm_head", "model.embed_tokens")
"""What ``all-linear`` does not include."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map of the model that adapters may add to, in its whole size, over all ranks."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Factors:
    """Where one projection's factors are in the file: tensor names, the rows of B (all rows, unless
    the tensor is for several projections; those may be ordered by heads), rank and scaling."""

    a: str
    b: str
    rows: tuple[slice, ...]
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A checked adapter: the ``factors`` of each projection that it adds to, by the projection's
    name in the checkpoint, and the largest rank among them. ``state`` is a number that changes when
    the files are written again, ``base`` that of ``AdapterConfig``."""

    path: Path
    factors: Mapping[str, Factors]
    rank: int
    state: int
    base: str

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """For each projection, A [rank, in_features] and B [out_features, rank] as the file has
        them; ``rank`` is the projection's own. Raises ``ConfigError`` if the file cannot be
        read."""
        held = load_tensors(self.path)
        for name, factors in self.factors.items():
            for key in (factors.a, factors.b):
                if key not in held:  # it was there when the file was opened
                    raise ConfigError(f"the adapter lacks {key}")
            parts = [held[factors.b][rows] for rows in factors.rows]
            yield name, held[factors.a], parts[0] if len(parts) == 1 else torch.cat(parts)

    def complaint(self, dtype: torch.dtype) -> str:
        """What is wrong with numbers that are not finite, once B is scaled, in ``dtype``."""
        for name, a, b in self.tensors():
            factors = self.factors[name]
            scaled = b.float() * factors.scaling
            for key, held, values in ((factors.a, a, a), (factors.b, b, scaled)):
                if not values.to(dtype).isfinite().all():
                    what = f"too large for {dtype}" if held.isfinite().all() else "not finite"
                    return f"{key} of the adapter has numbers that are {what}"
        return "the adapter has numbers that are not finite"


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
    state = _state_of(folder / CONFIG, path)  # before they are read
    config, headers = _read(folder)
    factors: dict[str, Factors] = {}
    for module, (a, b) in _pairs(headers).items():
        if not config.targets(module):
            raise ConfigError(f"{a} of the adapter is of no module that {CONFIG} targets")
        num_rows = headers[b].shape[0] if headers[b].shape else 0
        parts = _parts(module, num_rows, names)
        if not parts or not parts.keys() <= projections.keys():
            raise ConfigError(
                f"{a} of the adapter is not supported: the model takes adapters only for "
                f"{', '.join(_kinds(projections, names))} of its layers"
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
            if part in factors:
                raise ConfigError(f"{a} and {factors[part].a} of the adapter are of one module")
            factors[part] = Factors(a, b, rows, rank, scaling)
    for name in (name for name in projections if name not in factors):
        targeted = next(filter(config.targets, _spellings(name, factors, names)), None)
        if targeted is not None:
            raise ConfigError(f"the adapter lacks {_PREFIX}{targeted}.lora_A.weight")
    if not factors:
        raise ConfigError(f"{path} adds to no projection of the model")
    rank = max(each.rank for each in factors.values())
    return AdapterFile(path, MappingProxyType(factors), rank, state, config.base)


def _read(folder: Path) -> tuple[AdapterConfig, Mapping[str, TensorHeader]]:
    """The config and the header of the weights, whatever the model is."""
    path = folder / _WEIGHTS
    for file in (folder / CONFIG, path):
        if file.exists() and not file.is_file():  # reading a pipe would wait
            raise ConfigError(f"{file} is no regular file")
    config = AdapterConfig(read_json(folder / CONFIG))
    for module in _NEVER:
        if config.names(module):
            raise ConfigError(f"{CONFIG}: target_modules has {module}, which takes no adapters")
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise ConfigError(f"{folder} holds pickled weights only; only safetensors are read")
    return config, read_header(path)


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


def _parts(module: str, num_rows: int, names: TensorNames) -> dict[str, tuple[slice, ...]]:
    """The projections in a module that the file names, each with its part of the outputs: B has
    them in the order of a bias, also if the weight is stored with inputs before outputs."""
    parts: dict[str, tuple[slice, ...]] = {}
    for bias, stored in names.weights(f"{module}.bias", (num_rows,)):
        regions = stored.regions_within((slice(None),))
        rows = tuple(part for (part,) in regions if isinstance(part, slice))  # no stack of experts
        parts[bias.removesuffix(".bias")] = rows
    return parts


def _spellings(name: str, factors: Mapping[str, Factors], names: TensorNames) -> Iterator[str]:
    """The names that a projection's module may have in the file: as other layers' modules of the
    kind are named there, as in the checkpoint, and as in the decoder."""
    layer, kind = _layer_and_kind(name)
    for other, found in factors.items():
        if _layer_and_kind(other)[1] == kind:
            module = _TENSOR.fullmatch(found.a.removeprefix(_PREFIX))
            assert module is not None, "else it is no pair"
            yield _NUMBER.sub(f".{layer}.", module[1], count=1)
            break
    yield names.in_checkpoint(f"{name}.weight", "model.").removesuffix(".weight")
    yield names.merged_module(name)


def _layer_and_kind(name: str) -> tuple[str, str]:
    """The number of a projection's layer, and its name in the layer; both empty outside layers."""
    found = LAYER.match(name)
    return (found[1], name[found.end() :]) if found else ("", "")


def _why_not(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return ": it belongs to DoRA"
    if "lora_embedding" in name:
        return ": embeddings take no adapters"
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "base_layer.weight")):
        return ": an adapter does not replace embeddings or the output head"
    return ""


def _kinds(projections: Iterable[str], names: TensorNames) -> list[str]:
    """The names of the modules in the checkpoint, without those of their layers."""
    theirs = (names.in_checkpoint(f"{name}.weight", "model.") for name in projections)
    return list(dict.fromkeys(name.split(".")[-2] for name in theirs))


def _check_header(name: str, header: TensorHeader, shape: tuple[int, int]) -> None:
    if header.shape != shape:
        raise ConfigError(f"{name} of the adapter has the shape {header.shape}, not {shape}")
    if header.dtype not in FLOATS:
        raise ConfigError(
            f"{name} of the adapter has the type {header.dtype}, not {' or '.join(FLOATS)}"
        )
