"""Loads weights from safetensors files into a model's places, strictly.

Every place is filled exactly once, every tensor of the checkpoint has a place, and every type and
shape fits; anything else is a ``ConfigError`` with the tensor's name. Only this rank's slices are
read, file by file, so loading takes the memory of one weight, besides the pages of the file itself.
Pickled files are never opened. Knows files and places; must not know architectures or formats.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.weight_place import Place, ReadTensor, StoredTensor, WeightPlace
from minisgl_backend.models.checkpoint import WeightFiles, WeightHeader, reading, weight_files
from minisgl_backend.models.tensor_names import LAYER, StoredAs, TensorNames
from minisgl_backend.progress import Progress, unseen

logger = logging.getLogger(__name__)

_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of numbers other than codes."""
_NO_EXPONENT: Final = 255
"""What means NaN among the exponents of scales (OCP MX)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """What a tensor of the checkpoint is for: the role that it plays in the weight of a place.

    Without a weight, the tensor must be 0: tools write biases of 0 for projections that have none.
    """

    weight: str | None
    part: str
    wanted: StoredTensor
    stored: StoredAs


def load_weights(
    places: Mapping[str, Place],
    folder: Path,
    *,
    names: TensorNames,
    is_ignored: Callable[[str], bool],
    progress: Progress = unseen,
) -> None:
    """Fill every place from the checkpoint in ``folder``, converting to the places' dtype.

    ``names`` says how the checkpoint names its tensors; places have the decoder's names.
    ``is_ignored`` says, by the decoder's name, which tensors of the checkpoint need no place;
    buffers of rotary frequencies and biases of 0 need none either. Raises ``ConfigError`` for
    tensors that are missing or left over or have a wrong shape or type, for scales that are 0 or
    not finite, and for files that cannot be read.
    """
    started = monotonic()
    files = weight_files(folder, names)
    uses = _uses(places, files, names, is_ignored)
    wanted = {path: [name for name in held if name in uses] for path, held in files.items()}
    num_missing = {weight: 0 for weight in places}
    for use in uses.values():
        if use.weight is not None:
            num_missing[use.weight] += 1
    found: dict[str, dict[str, ReadTensor]] = {}  # weights not yet read in full
    with progress("loading weights", len(uses)) as advance:
        for path, held in wanted.items():
            for name, values in _read_file(path, {name: uses[name] for name in held}):
                advance(name)
                weight, part = uses[name].weight, uses[name].part
                stored_name = uses[name].stored.name
                if weight is None:
                    if values.any():
                        raise ConfigError(
                            f"the model has no place for {stored_name} of the checkpoint"
                        )
                    continue
                found.setdefault(weight, {})[part] = ReadTensor(stored_name, values)
                num_missing[weight] -= 1
                if not num_missing[weight]:
                    places[weight].fill(found.pop(weight))
    logger.info("loaded %d tensors in %.1f s", len(uses), monotonic() - started)


def fill_random(places: Mapping[str, Place], seed: int, dtype: torch.dtype) -> None:
    """Make weights to try out a shape without a checkpoint: norms and scales have no
    effect, all else is normal(0, 0.02).

    Each rank draws the checkpoint's whole weights, in ``dtype`` and on its device, and keeps its
    slices. So on devices of the same kind, any number of ranks has the same model.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, place in places.items():
        device = place.device
        if isinstance(place, WeightPlace) and place.neutral is not None:
            number = place.neutral - place.offset
            place.draw(torch.full(place.shape, number, dtype=dtype, device=device))
            continue
        if device not in generators:
            generators[device] = torch.Generator(device)
        of_name = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        generator = generators[device].manual_seed(int.from_bytes(of_name, "little"))
        drawn = torch.empty(place.shape, dtype=dtype, device=device)
        place.draw(drawn.normal_(std=0.02, generator=generator))


def _uses(
    places: Mapping[str, Place],
    files: WeightFiles,
    names: TensorNames,
    is_ignored: Callable[[str], bool],
) -> dict[str, _Use]:
    """Each tensor to be read, by the decoder's name; raises ``ConfigError`` unless all of them
    fit."""
    headers = {name: header for held in files.values() for name, header in held.items()}
    uses: dict[str, _Use] = {}
    missing: list[list[str]] = []
    for weight, place in places.items():
        module = weight.rpartition(".")[0]
        for part, wanted in place.tensors(weight).items():
            spelled = [f"{module}.{name}" for name in wanted.names]
            name = next((name for name in spelled if name in headers), None)
            if name is not None:
                _check_header(headers[name], wanted)
                uses[name] = _Use(weight, part, wanted, headers[name].stored)
            elif not wanted.optional:
                missing.append(spelled)
    if missing:
        raise ConfigError(f"the checkpoint lacks {_listed(_as_spelled(missing, headers, names))}")
    for weight in places:
        name = weight.rpartition(".")[0] + ".bias"
        if name in headers and name not in uses:
            header = headers[name]
            wanted = StoredTensor(names=("bias",), shapes=(header.shape,))
            uses[name] = _Use(None, "bias", wanted, header.stored)
    left_over = sorted(
        headers[name].stored.name
        for name in headers.keys() - uses.keys()
        if not (is_ignored(name) or name.endswith("rotary_emb.inv_freq"))
    )
    if left_over:
        raise ConfigError(f"the model has no place for {_listed(left_over)} of the checkpoint")
    return uses


def _check_header(header: WeightHeader, wanted: StoredTensor) -> None:
    name = header.stored.name
    if header.dtype not in wanted.dtypes:  # first: with other codes the shape may differ, too
        raise ConfigError(
            f"{name} has the type {header.dtype}, the model needs {' or '.join(wanted.dtypes)}"
        )
    if header.shape not in wanted.shapes:
        needed = " or ".join(map(str, wanted.shapes))
        raise ConfigError(f"{name} has the shape {header.shape}, the model needs {needed}")


def _as_spelled(
    missing: Sequence[Sequence[str]], headers: Mapping[str, WeightHeader], names: TensorNames
) -> list[str]:
    """Names of missing tensors for an error message, spelled as this checkpoint spells others.

    Each tensor is given by the decoder's names for it, any of which would do. The spelling is that
    of the same tensor in another layer, unless the layer itself has another name. If there is none,
    the prefix is that of other tensors.
    """
    layers = {match[1] for name in headers if (match := LAYER.match(name))}
    prefix = next(
        (
            header.stored.name.removesuffix(end)
            for name, header in headers.items()
            if name.startswith("model.")
            and header.stored.name.endswith(end := name.removeprefix("model."))
            and header.stored.name.removesuffix(end)[-1:] in ("", ".")
        ),
        None,
    )

    def of_other_layer(name: str) -> str | None:
        match = LAYER.match(name)
        if match is None or any(ours == match[0] for _, ours in names.renamed):
            return None
        for layer in layers:
            twin = headers.get(f"model.layers.{layer}.{name[match.end() :]}")
            if twin is not None:
                return twin.stored.name.replace(f".{layer}.", f".{match[1]}.", 1)
        return None

    spelled = set()
    for alternatives in missing:
        twins = [twin for name in alternatives if (twin := of_other_layer(name))]
        spelled.add(" or ".join(twins or (names.in_checkpoint(n, prefix) for n in alternatives)))
    return sorted(spelled)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_file(path: Path, uses: Mapping[str, _Use]) -> Iterator[tuple[str, Tensor]]:
    """The regions of these weights in one file."""
    with open_tensors(path) as file:
        for name, use in uses.items():
            stored = use.stored
            wanted = use.wanted.region_of(stored.shape)
            parts = [
                file.get_slice(stored.name)[region] if region else file.get_tensor(stored.name)
                for region in stored.regions_within(wanted)
            ]
            values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=stored.joined_at)
            values = values.T if stored.transposed else values
            if stored.scale != 1.0:
                values = _scaled(stored, values, is_scale=use.wanted.is_scale)
            if use.wanted.is_scale:
                _check_scale(stored.name, values, use.wanted)
            yield name, values


def _scaled(stored: StoredAs, values: Tensor, *, is_scale: bool) -> Tensor:
    """What was read, times its factor, unless it is codes or has 8 bits: then the scale of the
    whole weight takes the factor. Raises ``ConfigError`` for scales that are exponents."""
    if values.dtype in _FLOATS:
        return values.to(torch.promote_types(values.dtype, torch.float32)) * stored.scale
    if is_scale and values.dtype != torch.float8_e4m3fn:
        raise ConfigError(f"{stored.name} has exponents, which a factor of the model cannot scale")
    return values


def _check_scale(name: str, values: Tensor, wanted: StoredTensor) -> None:
    """Raise ``ConfigError`` unless each scale is an exponent, or finite, and not 0, above 0 or
    without a sign, as ``wanted``."""
    are_exponents = values.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if are_exponents:
        is_wrong = values.view(torch.uint8) == _NO_EXPONENT
    else:
        wide = values.float()  # what kernels compute with, even for float64
        beyond = wide.signbit() if wanted.may_be_zero else wide == 0 if wanted.signed else wide <= 0
        is_wrong = ~wide.isfinite() | beyond
    if not is_wrong.any():
        return
    at = is_wrong.nonzero()[0].tolist()
    where = f" at {at}" if at else ""
    if are_exponents:
        raise ConfigError(f"{name} is no exponent ({_NO_EXPONENT}){where}")
    limit = "not 0" if wanted.signed else "without a sign" if wanted.may_be_zero else "above 0"
    found = values[tuple(at)].float().item()
    raise ConfigError(f"{name} must be finite and {limit}, it is {found}{where}")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small safetensors file, which may be read again and again. (``safe_open`` of
    safetensors 0.8 leaks 32 bytes for each tensor.) Raises ``ConfigError``."""
    with reading(path, SafetensorError):
        return load(path.read_bytes())


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file; all its errors become a ``ConfigError``."""
    with reading(path, SafetensorError), safe_open(path, framework="pt", device="cpu") as file:
        yield file
