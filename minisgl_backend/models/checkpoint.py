"""The weights of a checkpoint as its files describe them: names, types and shapes of tensors.

Reads indexes and the headers of safetensors files, and of tensors only bytes to compare, for which
it needs no torch. So mistakes are found before any memory is allocated or any process is started.
Must not know layers.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import LFS_POINTER, NOT_FETCHED, read_json
from minisgl_backend.models.recurrent_spec import ConvSpec, DeltaSpec, KimiDeltaSpec, RecurrentSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import BODY, LAYER, StoredAs, TensorNames
from minisgl_backend.weight_format import Layout

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_LENGTH: Final = struct.Struct("<Q")
_MOST_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
_EMBEDDING: Final = "model.embed_tokens.weight"
_MOST_NAME: Final = 255
"""Characters of a file's name."""
_COMPARED_AT_ONCE: Final = 2**20
"""Bytes."""
_BYTES: Final = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
    | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file; ``dtype`` has the format's spelling, such as BF16. Its bytes are those
    from ``begin`` to ``end``, counted from the file's first."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """A weight of the decoder, which may be a part of a tensor in a file (``stored``)."""

    dtype: str
    shape: tuple[int, ...]
    stored: StoredAs


TensorFiles = Mapping[Path, Mapping[str, TensorHeader]]
"""The tensors of each file, by their names there."""

WeightFiles = Mapping[Path, Mapping[str, WeightHeader]]
"""The decoder's weights in each file, by the decoder's names."""


def weight_files(folder: Path, names: TensorNames) -> WeightFiles:
    """The decoder's weights in the files of the checkpoint in ``folder``, which names its tensors
    by ``names``. Raises ``ConfigError`` if a file is incomplete, or if two tensors hold the same
    weight."""
    found: dict[str, str] = {}
    files: dict[Path, dict[str, WeightHeader]] = {}
    for path, held in tensor_files(folder).items():
        weights = files.setdefault(path, {})
        for name, header in held.items():
            for weight, stored in names.weights(name, header.shape):
                if weight in found:
                    raise ConfigError(f"{name} and {found[weight]} both hold {weight}")
                found[weight] = name
                weights[weight] = WeightHeader(header.dtype, stored.shape, stored)
    return files


def head_and_embedding(folder: Path, names: TensorNames) -> Literal["own", "alone"] | None:
    """How the checkpoint in ``folder`` holds an output head, if it has weights: ``own`` if it is
    not the embedding once more, ``alone`` if there is no embedding beside it."""
    if not _has_weights(folder):
        return None
    found = _located_weights(folder, names)
    head, embedding = found.get("lm_head.weight"), found.get(_EMBEDDING)
    if head is None:
        return None
    if embedding is None:
        return "alone"
    return None if _are_equal(head, embedding) else "own"


def has_embedding_of_its_own(
    folder: Path, names: TensorNames, model: Path, names_of_model: TensorNames
) -> bool:
    """Whether a checkpoint for guesses has an embedding that is not that of the ``model`` once
    more."""
    own = _located_weights(folder, names).get(_EMBEDDING)
    if own is None:
        return False
    others = _located_weights(model, names_of_model).get(_EMBEDDING)
    return others is None or not _are_equal(own, others)


def _located_weights(folder: Path, names: TensorNames) -> dict[str, tuple[Path, TensorHeader]]:
    """The decoder's weights, by its names, each with its file and the tensor that holds it."""
    found: dict[str, tuple[Path, TensorHeader]] = {}
    for path, held in tensor_files(folder).items():
        for name, header in held.items():
            for weight, _ in names.weights(name, header.shape):
                found[weight] = path, header
    return found


def _are_equal(one: tuple[Path, TensorHeader], other: tuple[Path, TensorHeader]) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    (path, header), (other_path, other_header) = one, other
    if (header.dtype, header.shape) != (other_header.dtype, other_header.shape):
        return False
    with (
        reading(path, ValueError),
        open(path, "rb") as file,
        open(other_path, "rb") as other_file,
    ):
        file.seek(header.begin)
        other_file.seek(other_header.begin)
        left = header.end - header.begin
        while left:
            size = min(left, _COMPARED_AT_ONCE)
            if file.read(size) != other_file.read(size):
                return False
            left -= size
    return True


def is_headless(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` has only the layers of a model, judging by the names in
    such checkpoints."""
    if not _has_weights(folder):
        return False
    found = [name for held in tensor_files(folder).values() for name in held]
    return all(name.startswith(BODY) for name in found)


def _has_weights(folder: Path) -> bool:
    """Whether any weights are there; an index alone, beside config.json, is enough for a dummy."""
    has_index = (folder / _INDEX).exists()
    return (folder / _SINGLE).exists() or (has_index and any(folder.glob("*.safetensors")))


def tensor_files(folder: Path) -> TensorFiles:
    """The files of the checkpoint in ``folder``; ``ConfigError`` if one is incomplete."""
    if (folder / _SINGLE).exists():  # an index beside it may be left of an earlier checkpoint
        return {folder / _SINGLE: read_header(folder / _SINGLE)}
    if (folder / _INDEX).exists():
        located = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(located, dict):
            raise ConfigError(f"{folder / _INDEX} has no weight_map")
        return _located_files(folder, located)
    if any(folder.glob("*.gguf")):
        raise ConfigError(
            f"{folder} holds GGUF files, which are not supported; only safetensors are read"
        )
    if any(folder.glob("consolidated*.safetensors")):
        raise ConfigError(
            f"{folder} holds weights by Mistral's own names (consolidated.safetensors) only, which "
            f"are not supported; needed is {_SINGLE} or {_INDEX}"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(
            f"{folder} holds pickled weights only; only safetensors are read, which "
            "save_pretrained of transformers writes"
        )
    raise ConfigError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")


def _located_files(folder: Path, located: Mapping[str, Any]) -> TensorFiles:
    headers: dict[Path, Mapping[str, TensorHeader]] = {}
    files: dict[Path, dict[str, TensorHeader]] = {}
    for name, file in sorted(located.items()):
        # A plain file name: an index must not reach outside its folder.
        if not isinstance(file, str) or Path(file).name != file or not 0 < len(file) <= _MOST_NAME:
            shown = repr(file)[:80]
            raise ConfigError(
                f"{folder / _INDEX} puts {name} into {shown}, which is no name of a file"
            )
        path = folder / file
        if path not in headers:
            headers[path] = read_header(path)
        if name not in headers[path]:
            raise ConfigError(f"{path} lacks {name}, which the index puts there")
        files.setdefault(path, {})[name] = headers[path][name]
    return files


def read_header(path: Path) -> Mapping[str, TensorHeader]:
    """The tensors of a safetensors file, in the order of their names.

    Raises ``ConfigError`` unless they are laid out as the format demands: one after another,
    without gaps, to the file's end.
    """
    with reading(path, ValueError, RecursionError, struct.error):
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(NOT_FETCHED)
            file.seek(0)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(num_bytes - _LENGTH.size, _MOST_HEADER_BYTES):
                raise ValueError(f"its header cannot have {length} bytes")
            entries = json.loads(file.read(length))
            if not isinstance(entries, dict):
                raise ValueError("its header is no object")
        return _laid_out(entries, _LENGTH.size + length, num_bytes)


@contextmanager
def reading(path: Path, *broken: type[Exception]) -> Iterator[None]:
    """Read a safetensors file: what the system refuses becomes a ``ConfigError``, and so do the
    errors ``broken``, of files that are not as the format demands."""
    not_whole: tuple[type[Exception], ...] = (OSError, *broken)
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except not_whole as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None


def _laid_out(entries: Mapping[str, Any], start: int, num_bytes: int) -> Mapping[str, TensorHeader]:
    """The tensors of a file of so many bytes, whose header ends at ``start``."""
    found, places = {}, []
    for name, entry in sorted(entries.items()):
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
            size = math.prod(shape) * _BYTES[dtype]
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"{name} is no tensor of a known type: {str(entry)[:80]}") from None
        if any(type(number) is not int or number < 0 for number in numbers) or size != end - begin:
            raise ValueError(f"{name} does not have the bytes of its type and shape")
        found[name] = TensorHeader(dtype, tuple(shape), start + begin, start + end)
        places.append((begin, end))
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise ValueError(f"its tensors overlap or leave a gap at byte {at}")
        at = end
    if at != num_bytes - start:
        raise ValueError(f"its tensors have {at} bytes, and {num_bytes - start} are there")
    return found


def check_weights(spec: ModelSpec, files: WeightFiles) -> None:
    """Raise ``ConfigError`` if config.json and the weights describe models of different sizes.

    Compares what a model's size depends on; ``weights`` compares every tensor when it is loaded.
    """
    found = {name: header for held in files.values() for name, header in held.items()}
    layers = {int(match[1]) for name in found if (match := LAYER.match(name))}
    if spec.has_mtp_layer and layers:
        _check_mtp_layer(spec, found)
        layers.discard(spec.num_layers)
    if layers and max(layers) + 1 != spec.num_layers:
        raise ConfigError(
            f"config.json: num_hidden_layers is {spec.num_layers}, "
            f"but the weights have {max(layers) + 1} layers"
        )
    expected = {
        "model.embed_tokens": {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size}
    }
    if (latent := spec.latent) is not None:
        attention = f"model.layers.{spec.attention_layers[0]}.self_attn"
        expected[f"{attention}.kv_a_proj_with_mqa"] = {
            "kv_lora_rank + qk_rope_head_dim": latent.key_dim,
            "hidden_size": spec.hidden_size,
        }
        expected[f"{attention}.kv_b_proj"] = {
            "num_attention_heads x (qk_nope_head_dim + v_head_dim)": (
                spec.heads.num_heads * (latent.nope_dim + latent.value_dim)
            ),
            "kv_lora_rank": latent.latent_dim,
        }
    for layer in spec.attention_layers[:1] if latent is None else ():
        heads = spec.heads_of(layer)
        attention = f"model.layers.{layer}.self_attn"
        times = 2 if spec.gates_in_queries else 1
        expected[f"{attention}.q_proj"] = {
            "num_attention_heads x head_dim": times * heads.num_heads * heads.head_dim,
            "hidden_size": spec.hidden_size,
        }
        expected[f"{attention}.k_proj"] = {
            "num_key_value_heads x head_dim": heads.num_kv_heads * heads.head_dim,
            "hidden_size": spec.hidden_size,
        }
    if spec.recurrent is not None:
        first = f"model.layers.{min(spec.recurrent.layers)}"
        expected |= _expected_of_states(first, spec.recurrent, spec.hidden_size)
    blocks = (layer for layer in range(spec.num_layers) if spec.has_part(layer, "feed-forward"))
    if (block := next(blocks, None)) is not None:
        expected |= _expected_of_block(block, spec)
    for module, sizes in expected.items():
        header = found.get(f"{module}.weight")
        if header is None:  # ``weights`` will list all that is missing
            continue
        shape, note = header.shape, ""
        if _has_pairs(module, header, spec):
            shape, note = (*shape[:-1], 2 * shape[-1]), ", with two inputs in a byte"
        for (field, value), stored in zip(sizes.items(), shape, strict=False):
            if value != stored:
                raise ConfigError(
                    f"config.json: {field} is {value}, "
                    f"but {header.stored.name} has the shape {shape}{note}"
                )


def _has_pairs(module: str, header: WeightHeader, spec: ModelSpec) -> bool:
    """Whether each element of a module's ``weight`` holds the codes of two inputs."""
    if spec.weights is None or header.dtype != "U8" or not header.shape:
        return False
    form = spec.weights.of(module, header.stored.name.removesuffix(".weight"))
    return form is not None and form.layout is Layout.NV_MODELOPT


def _check_mtp_layer(spec: ModelSpec, found: Collection[str]) -> None:
    """Raise ``ConfigError`` if no weights of the MTP layer are there: tools that convert or train
    models often drop them, and leave config.json as it was."""
    layer = f"model.layers.{spec.num_layers}."
    if not any(name.startswith(layer) for name in found):
        needed = spec.names.in_checkpoint(f"{layer}eh_proj.weight", prefix=None)
        raise ConfigError(
            "option speculative_mtp_tokens needs the weights of the MTP layer, which the "
            f"checkpoint lacks, such as {needed}"
        )


def _expected_of_states(
    layer: str, recurrent: RecurrentSpec, hidden_size: int
) -> dict[str, dict[str, int]]:
    """The sizes of a projection of a layer with recurrent states, by the keys that name them."""
    if isinstance(recurrent, KimiDeltaSpec):
        name, of_kimi = "num_attention_heads x head_dim", "linear_attn_config: num_heads x head_dim"
        value_size = {name if recurrent.direct else of_kimi: recurrent.value_size}
        return {f"{layer}.self_attn.o_proj": {"hidden_size": hidden_size, **value_size}}
    if isinstance(recurrent, DeltaSpec):
        value_size = {"linear_num_value_heads x linear_value_head_dim": recurrent.value_size}
        return {f"{layer}.linear_attn.out_proj": {"hidden_size": hidden_size, **value_size}}
    if isinstance(recurrent, ConvSpec):
        return {f"{layer}.conv.out_proj": {"hidden_size": hidden_size}}
    size = recurrent.inner_size
    sizes = {"hidden_size": hidden_size, "number x size of Mamba's heads": size}
    return {f"{layer}.mamba.out_proj": sizes}


def _expected_of_block(layer: int, spec: ModelSpec) -> dict[str, dict[str, int]]:
    """The same for a layer's feed-forward block."""
    mlp, expected = f"model.layers.{layer}.mlp", {}
    up_proj = "up_proj" if spec.gate is None else "gate_proj"
    moe = spec.moe if spec.moe is not None and layer in spec.moe.layers else None
    if moe is None or moe.beside:
        expected[f"{mlp}.{up_proj}"] = {"intermediate_size": spec.intermediate_size_of(layer)}
    if moe is not None:
        experts = moe.experts
        within = mlp.removesuffix(".mlp") if moe.beside else mlp
        expected[f"{within}.{experts.router}"] = {"num_experts": experts.num_experts}
        expected[f"{within}.experts.0.{up_proj}"] = {
            "moe_intermediate_size": experts.intermediate_size
        }
    return expected
