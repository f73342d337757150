"""Where a model's folder comes from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.hub import resolve_model, resolve_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def _never(model: str, patterns: list[str]) -> str:
    raise AssertionError("nothing is to be fetched")


def test_gguf_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"no config\.json, only GGUF files: this format is not supported"
    ):
        resolve_model(str(tmp_path), download=_never)
    with pytest.raises(ConfigError, match="GGUF files are not supported; give a folder"):
        resolve_model(str(tmp_path / "model.gguf"), download=_never)


@pytest.mark.parametrize("resolve", [resolve_model, resolve_tokenizer])
def test_a_file_is_not_taken_for_an_id(
    resolve: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").touch()
    with pytest.raises(ConfigError, match=r"^tokenizer.json is a file: give the folder"):
        resolve("tokenizer.json")


def test_mistrals_own_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no config\.json, only Mistral's params\.json: this"):
        resolve_model(str(tmp_path), download=_never)


def test_a_folder_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder), download=_never) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model(f"~/{folder.name}", download=_never) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model(folder.name, download=_never) == Path(folder.name)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path), download=_never)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"no config\.json, only an adapter: serve its base model"
    ):
        resolve_model(str(tmp_path), download=_never)


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "./model", "../model", "a/b/c", "~/x", "~nobody-of-that-name/x", "a/"],
)
def test_what_is_neither_folder_nor_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        resolve_model("/" + "n" * 300)
    with pytest.raises(ConfigError, match="neither a folder nor a model id"):
        resolve_model(model, download=_never)


def _fetched(asked: dict[str, Any], names: list[str]) -> list[str]:
    """The files among ``names`` that the hub's function would fetch."""

    def fits(name: str, rules: str) -> bool:
        return any(fnmatch(name, rule) for rule in asked[rules])

    return [
        name for name in names if fits(name, "allow_patterns") and not fits(name, "ignore_patterns")
    ]


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_an_id_is_fetched_without_code_or_pickles(folder: Path, model: str) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, patterns: list[str]) -> str:
        asked.append((name, patterns))
        return str(folder)

    assert resolve_model(model, download=download) == folder
    [(name, patterns)] = asked
    assert name == model
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(patterns)
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in patterns)


def test_a_failed_fetch_tells_why_in_one_line() -> None:
    def download(name: str, patterns: list[str]) -> str:
        raise OSError("no route to host\nand a long story")

    with pytest.raises(ConfigError, match=r"a/b could not be fetched from hf: no route to host$"):
        resolve_model("a/b", download=download)

    def silent(name: str, patterns: list[str]) -> str:
        raise TimeoutError

    with pytest.raises(ConfigError, match=r"from modelscope: TimeoutError$"):
        resolve_model("a/b", "modelscope", download=silent)


def test_hugging_face_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/name") == folder
    assert asked["model"] == "owner/name" and "*.safetensors" in asked["allow_patterns"]
    assert not _fetched(asked, ["original/model.safetensors", "consolidated.safetensors"])
    assert _fetched(asked, names := ["model-1-of-2.safetensors", "layers-0.safetensors"]) == names


def test_modelscope_where_it_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(folder)

    fake: Any = ModuleType("modelscope")
    fake.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    assert resolve_model("owner/name", "modelscope") == folder
    assert asked["model"] == "owner/name" and "*.safetensors" in asked["allow_patterns"]
    assert not _fetched(asked, ["original/model.safetensors", "consolidated.safetensors"])
    assert _fetched(asked, names := ["model-1-of-2.safetensors", "layers-0.safetensors"]) == names


def test_modelscope_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="pip install modelscope"):
        resolve_model("owner/name", "modelscope")
