"""Broken model folders: the load must fail with one line that names the cause.

Knows the files of a checkpoint. Each folder is given to the engine's own load function, and to
`minisgl serve`, which must print no more than that line, and end.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_check.case import Case
from minisgl_check.fault import Fault, Settings
from minisgl_check.served import served

_WEIGHTS: Final = "model.safetensors"


def broken_files(settings: Settings, case: Case) -> None:
    """Folders with broken files, none of which may be loaded or served."""
    for name, (damage, cause) in DAMAGES.items():
        with damaged(damage) as folder:
            errors = (load_error(folder), _serve_error(folder, settings))
        for way, error in zip(("the engine", "minisgl serve"), errors, strict=True):
            case.count += 1
            if error is None:
                case.expect(False, f"{name}: was loaded by {way}")
                continue
            case.ended["refused"] += 1
            told = f"{name}: {way} says {error[:300]!r}"
            case.expect(cause in error, f"{told} without {cause!r}")
            case.expect("Traceback" not in error, told)
            case.expect("\n" not in error.strip(), told)
    case.what = f"{case.ended['refused']} of {case.count} refused"


@contextmanager
def damaged(damage: Callable[[Path], None]) -> Iterator[Path]:
    """A folder like the demo model's, with this damage."""
    with tempfile.TemporaryDirectory(prefix="minisgl-check-") as base:
        folder = Path(base) / "model"
        shutil.copytree(DEMO_MODEL, folder)
        damage(folder)
        yield folder


def load_error(folder: Path) -> str | None:
    """The engine's error for a folder; None if it can be loaded."""
    from minisgl_backend.build import build_executor  # brings torch

    try:
        build_executor(EngineOptions(model=str(folder), device="cpu", num_pages=8))[1].close()
        return None
    except ConfigError as error:
        return str(error)


def _serve_error(folder: Path, settings: Settings) -> str | None:
    """The last message of `minisgl serve`; None if it serves."""
    said = ""
    with served("--model", str(folder), tritonserver=settings.tritonserver) as server:
        while (line := server.lines.get(timeout=settings.patience_s)) is not None:
            if line.startswith("Error: "):
                said = ""
            said += f"{line}\n"
            if "/ready" in line:
                return None
    return said


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
    here, missing = "model-1.safetensors", "model-2.safetensors"
    (folder / _WEIGHTS).rename(folder / here)
    index = {"weight_map": dict.fromkeys(names, here) | {names[0]: missing}}
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
"""The damages, each with a word that the error must contain."""
