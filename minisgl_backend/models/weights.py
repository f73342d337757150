"""Loads weights from safetensors files into a model's places, strictly.

Every place is filled exactly once, every tensor of the checkpoint has a place, and every shape
fits; anything else is a ``ConfigError`` with the tensor's name. Only this rank's slices are read.
Pickled files are never opened. Knows files and places; must not know architectures.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.weight_place import WeightPlace
from minisgl_backend.models.checkpoint import tensor_files
from minisgl_backend.progress import Progress, unseen

logger = logging.getLogger(__name__)


def load_weights(
    places: Mapping[str, WeightPlace],
    folder: Path,
    *,
    is_ignored: Callable[[str], bool],
    progress: Progress = unseen,
) -> None:
    """Fill every place from the checkpoint in ``folder``, converting to the places' dtype.

    ``is_ignored`` says by name which tensors of the checkpoint need no place; buffers of rotary
    frequencies are ignored too. Raises ``ConfigError`` for missing, left-over or misshapen tensors
    and for files that cannot be read.
    """
    started = monotonic()
    files = tensor_files(folder)
    _check_names(places, {name for held in files.values() for name in held}, is_ignored)
    wanted = {path: [name for name in held if name in places] for path, held in files.items()}
    with progress("loading weights", len(places)) as advance:
        for path, held in wanted.items():
            for name in _read_file(places, path, held):
                advance(name)
    logger.info("loaded %d tensors in %.1f s", len(places), monotonic() - started)


def fill_random(places: Mapping[str, WeightPlace], seed: int) -> None:
    """Weights for trying out a shape without a checkpoint: norms 1, all else normal(0, 0.02).

    Each rank draws the checkpoint's tensors whole, on its device, and keeps its slices of them: so
    on devices of one kind, any number of ranks has the same model.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, place in places.items():
        target, device = place.target, place.target.device
        if name.endswith("norm.weight"):
            target.fill_(1)
            continue
        if device not in generators:
            generators[device] = torch.Generator(device)
        of_name = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        generator = generators[device].manual_seed(int.from_bytes(of_name, "little"))
        drawn = torch.empty(place.shape, dtype=target.dtype, device=device)
        target.copy_(drawn.normal_(std=0.02, generator=generator)[_region(place)])


def _check_names(
    places: Mapping[str, WeightPlace], found: set[str], is_ignored: Callable[[str], bool]
) -> None:
    missing = sorted(places.keys() - found)
    if missing:
        raise ConfigError(f"the checkpoint lacks {_listed(missing)}")
    left_over = sorted(
        name
        for name in found - places.keys()
        if not (is_ignored(name) or name.endswith("rotary_emb.inv_freq"))
    )
    if left_over:
        raise ConfigError(f"the model has no place for {_listed(left_over)} of the checkpoint")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_file(places: Mapping[str, WeightPlace], path: Path, names: list[str]) -> Iterator[str]:
    with open_tensors(path) as file:
        for name in names:
            stored = file.get_slice(name)
            place = places[name]
            shape = tuple(stored.get_shape())
            if shape != place.shape:
                raise ConfigError(f"{name} has the shape {shape}, the model needs {place.shape}")
            place.target.copy_(stored[_region(place)])
            yield name


def _region(place: WeightPlace) -> tuple[slice, ...]:
    """Which part of the checkpoint's tensor belongs to the place."""
    if place.dim is None:
        return (slice(None),) * len(place.shape)
    region = [slice(None)] * place.dim
    return (*region, slice(place.start, place.start + place.target.shape[place.dim]))


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file; all errors with it become a ``ConfigError``."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
