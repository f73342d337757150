"""What a checkpoint's files say about its tensors, and whether config.json agrees."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.checkpoint import (
    TensorHeader,
    check_weights,
    read_header,
    tensor_files,
    weight_files,
)
from minisgl_backend.models.weights import load_tensors

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def written(folder: Path, entries: Any, num_bytes: int = 32) -> Path:
    """A file with this header, and this number of bytes after it."""
    header = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
    return path


def test_names_types_and_shapes(tmp_path: Path) -> None:
    path = written(tmp_path, {"__metadata__": {"format": "pt"}, "b": B, "a": A})
    end = path.stat().st_size
    assert tensor_files(tmp_path) == {
        path: {
            "a": TensorHeader("F32", (2, 3), end - 32, end - 8),
            "b": TensorHeader("BF16", (4,), end - 8, end),
        }
    }


@pytest.mark.parametrize(
    ("entries", "num_bytes", "message"),
    [
        ([], 0, "its header is no object"),
        ({"a": A, "b": B}, 31, "its tensors have 32 bytes, and 31 are there"),
        ({"a": A, "b": B}, 33, "its tensors have 32 bytes, and 33 are there"),
        ({"a": A, "b": {**B, "data_offsets": [16, 24]}}, 32, "overlap or leave a gap at byte 24"),
        ({"a": A, "b": {**B, "data_offsets": [26, 34]}}, 34, "overlap or leave a gap at byte 24"),
        ({"a": {**A, "shape": [2, 4]}}, 24, "a does not have the bytes of its type and shape"),
        ({"a": {**A, "shape": [-2, -3]}}, 24, "a does not have the bytes of its type and shape"),
        ({"a": {**A, "shape": [2.0, 3]}}, 24, "a does not have the bytes of its type and shape"),
        ({"a": {**A, "dtype": "F99"}}, 24, "a is no tensor of a known type: {'dtype': 'F99'"),
        ({"a": {**A, "shape": "23"}}, 24, "a is no tensor of a known type"),
        ({"a": {**A, "data_offsets": [0]}}, 24, "a is no tensor of a known type"),
        ({"a": 7}, 24, "a is no tensor of a known type: 7"),
    ],
)
def test_files_with_an_invalid_layout_are_refused(
    tmp_path: Path, entries: Any, num_bytes: int, message: str
) -> None:
    path = written(tmp_path, entries, num_bytes)
    with pytest.raises(ConfigError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path} is not a whole safetensors file: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 200_000_000, 9])
def test_a_header_of_no_possible_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ConfigError, match=f"its header cannot have {length} bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 5}, "num_hidden_layers is 5, but the weights have 4 layers"),
        ({"vocab_size": 10**6}, r"vocab_size is 1000000, but .*embed_tokens.* \(2048, 240\)"),
        ({"hidden_size": 512}, r"hidden_size is 512, but model.embed_tokens.weight has the shape"),
        (
            {"heads": LayerHeads(8, 2, 64)},
            r"num_attention_heads x head_dim is 512, but .*q_proj.* \(256, 240\)",
        ),
        (
            {"heads": LayerHeads(4, 4, 64)},
            r"num_key_value_heads x head_dim is 256, but .*k_proj.* \(128, ",
        ),
        ({"intermediate_size": 9}, r"intermediate_size is 9, but .*gate_proj.* \(768, 240\)"),
    ],
)
def test_a_config_of_another_model(changes: dict[str, Any], message: str) -> None:
    spec = load_spec(Path(DEMO_MODEL))
    files = weight_files(Path(DEMO_MODEL), spec.names)
    check_weights(spec, files)
    with pytest.raises(ConfigError, match=message):
        check_weights(replace(spec, **changes), files)


@pytest.mark.parametrize("file", ["", ".", "../x", "/x", "x" * 256, 10**400, None, ["x"]])
def test_an_index_that_names_no_file(tmp_path: Path, file: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(ConfigError) as caught:
        tensor_files(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{index} puts lm_head.weight into {repr(file)[:80]}")
    assert message.endswith(", which is no name of a file")
    assert len(message) < len(str(index)) + 150


def test_an_index_beside_a_single_file_does_not_count(tmp_path: Path) -> None:
    """As in transformers: who saves a model again in one file may leave the index of its shards."""
    path = written(tmp_path, {"a": A, "b": B})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert list(tensor_files(tmp_path)) == [path]


@pytest.mark.parametrize("write", [Path.mkdir, Path.touch])
def test_what_is_no_file_of_tensors(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        tensor_files(tmp_path)


def test_a_file_of_tensors_that_this_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, {"a": A, "b": B})

    def denied(*_: object, **__: object) -> None:  # root may read any file
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", denied)
    monkeypatch.setattr(Path, "read_bytes", denied)
    for read in (read_header, load_tensors):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert str(caught.value) == f"{path} cannot be read: Permission denied"
