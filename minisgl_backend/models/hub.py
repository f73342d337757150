"""A model's folder: on this machine, or fetched from a hub.

Only configs, safetensors and tokenizer files are fetched: never code, never pickled weights. Must
not know what the files say.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from minisgl_backend.errors import ConfigError

logger = logging.getLogger(__name__)

PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja")
NEEDLESS: Final = ("original/*", "consolidated*.safetensors")
"""The same weights again under other names, with which gpt-oss and Mistral's models come."""

Download = Callable[[str, list[str]], str]
"""Fetches the files of a model id that match the patterns; returns their folder."""


def resolve_model(model: str, source: str = "hf", *, download: Download | None = None) -> Path:
    """The folder of ``model``, which is a folder, or else an id of the hub ``source`` (hf or
    modelscope).

    ``download`` replaces the hub's own function. Raises ``ConfigError`` if there is neither.
    """
    folder = Path(os.path.expanduser(model))  # leaves an unknown user as it is
    if _is_folder(folder):
        if not (folder / "config.json").exists():
            others = {"GGUF files": "*.gguf", "Mistral's params.json": "params.json"}
            found = [name for name, pattern in others.items() if any(folder.glob(pattern))]
            only = f", only {found[0]}: this format is not supported" if found else ""
            if (folder / "adapter_config.json").exists():
                only = ", only an adapter: serve its base model with enable_lora and lora_modules"
            raise ConfigError(f"{folder} holds no config.json{only}")
        return folder
    if folder.suffix == ".gguf":
        raise ConfigError(f"{folder}: GGUF files are not supported; give a folder of safetensors")
    if folder.is_file():
        raise ConfigError(f"{folder} is a file: give the folder that holds it, or a model id")
    if not _is_id(model):
        raise ConfigError(f"{model} is neither a folder nor a model id like NAME or OWNER/NAME")
    if download is None:
        download = _modelscope if source == "modelscope" else _hugging_face
    logger.info("fetching %s from %s", model, source)
    try:
        return Path(download(model, list(PATTERNS)))
    except ConfigError:
        raise
    except Exception as error:  # hubs raise the errors of their HTTP libraries
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(f"{model} could not be fetched from {source}: {reason}") from error


def resolve_tokenizer(tokenizer: str, source: str = "hf") -> Path:
    """The same for a tokenizer, whose folder need not hold a model."""
    folder = Path(os.path.expanduser(tokenizer))
    return folder if _is_folder(folder) else resolve_model(tokenizer, source)


def _is_folder(path: Path) -> bool:
    """Raises ``ConfigError`` if this user may not look for it, or into it."""
    try:
        is_folder = path.is_dir()
        if is_folder:
            (path / "config.json").exists()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return is_folder


def _is_id(model: str) -> bool:
    parts = model.split("/")
    return 1 <= len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def _hugging_face(model: str, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(model, allow_patterns=patterns, ignore_patterns=list(NEEDLESS))


def _modelscope(model: str, patterns: list[str]) -> str:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ConfigError(
            "model_source modelscope needs the modelscope package: pip install modelscope"
        ) from None
    return str(snapshot_download(model, allow_patterns=patterns, ignore_patterns=list(NEEDLESS)))
