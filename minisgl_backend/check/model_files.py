"""Folders of a model in which something is wrong: the load fails with its cause, in one line.

Knows the files of a checkpoint. The first is given to a whole server, which must never be ready;
the others, since a start takes seconds, to the function that the server's engine loads with.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from minisgl_backend.check.case import Case
from minisgl_backend.check.fault import Fault, Settings
from minisgl_backend.check.own_server import OPTIONS, started
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError

_WEIGHTS: Final = "model.safetensors"


def broken_files(settings: Settings, case: Case) -> None:
    """None may be loaded."""
    for number, (name, (damage, cause)) in enumerate(DAMAGES.items()):
        case.count += 1
        with tempfile.TemporaryDirectory(prefix="minisgl-check-") as base:
            folder = Path(base) / "model"
            shutil.copytree(DEMO_MODEL, folder)
            damage(folder)
            error = _load_error(folder) if number else _start_error(folder, settings)
        case.expect(error is not None, f"{name}: was loaded")
        if error is not None:
            case.ended["refused"] += 1
            case.expect(cause in error, f"{name}: the error does not say {cause!r}: {error[:300]}")
            case.expect("Traceback" not in error, f"{name}: a traceback: {error[:300]}")
            case.expect("\n" not in error.strip(), f"{name}: more than a line: {error[:300]}")
    case.what = f"{case.ended['refused']} refused with their cause"


def _start_error(folder: Path, settings: Settings) -> str | None:
    options = {**OPTIONS, "model": str(folder)}
    try:
        with started(options, tritonserver=settings.tritonserver):
            return None
    except ConfigError as error:
        return str(error)


def _load_error(folder: Path) -> str | None:
    from minisgl_backend.build import build_executor  # brings torch

    try:
        build_executor(EngineOptions(model=str(folder), device="cpu", num_pages=8))[1].close()
        return None
    except ConfigError as error:
        return str(error)


FAULTS: Final = (Fault("F26", "a model's files are broken", broken_files),)


# --- damages ---------------------------------------------------------------------------------


def _header(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / _WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _write(folder: Path, header: Mapping[str, Any], tensors: bytes) -> None:
    text = json.dumps(header).encode()
    (folder / _WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + tensors)


def _truncated(folder: Path) -> None:
    data = (folder / _WEIGHTS).read_bytes()
    (folder / _WEIGHTS).write_bytes(data[: len(data) // 2])


def _huge_header(folder: Path) -> None:
    data = (folder / _WEIGHTS).read_bytes()
    (folder / _WEIGHTS).write_bytes(struct.pack("<Q", 2**63) + data[8:])


def _overlapping(folder: Path) -> None:
    header, tensors = _header(folder)
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    _write(folder, header, tensors)


def _other_shape(folder: Path) -> None:
    header, tensors = _header(folder)
    name = next(name for name, it in header.items() if len(it.get("shape", ())) == 2)
    header[name]["shape"].reverse()
    _write(folder, header, tensors)


def _other_dtype(folder: Path) -> None:
    header, tensors = _header(folder)
    for name, it in header.items():
        if name != "__metadata__":
            it["dtype"] = "F99"
    _write(folder, header, tensors)


def _missing_shard(folder: Path) -> None:
    header, _ = _header(folder)
    names = [name for name in header if name != "__metadata__"]
    index = {"weight_map": dict.fromkeys(names, _WEIGHTS) | {names[0]: "model-2.safetensors"}}
    (folder / f"{_WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")


def _pickled(folder: Path) -> None:
    (folder / _WEIGHTS).rename(folder / "pytorch_model.bin")


def _small_vocabulary(folder: Path) -> None:
    """The model has fewer embeddings than the tokenizer has tokens."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["vocab_size"] //= 2
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


DAMAGES: Final[Mapping[str, tuple[Callable[[Path], None], str]]] = {
    "a truncated file": (_truncated, _WEIGHTS),
    "a header of 2^63 bytes": (_huge_header, _WEIGHTS),
    "overlapping tensors": (_overlapping, _WEIGHTS),
    "a tensor of another shape": (_other_shape, "shape"),
    "tensors of an unknown type": (_other_dtype, _WEIGHTS),
    "a shard that is missing": (_missing_shard, "model-2.safetensors"),
    "pickled weights only": (_pickled, "pickled"),
    "a vocabulary of another size": (_small_vocabulary, "shape"),
}
"""And a word that the error must have."""
