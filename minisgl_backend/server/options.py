"""The operator's options on their way to a server: completed, checked, and written as text.

Knows the files that options name. Must not import torch, so that a wrong option is reported at
once. Options that do not fit raise ``ConfigError``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from minisgl_backend.adapter_options import (
    adapter_paths,
    check_adapter_folders,
    check_task_names,
    with_adapters_beside,
)
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.model_check import checked_spec
from minisgl_backend.models.hub import resolve_model, resolve_tokenizer
from minisgl_backend.parallel.nodes import read_secret
from minisgl_backend.precheck import check_meeting_point, check_options, device_type
from minisgl_backend.runtime_files import OPTIONS_MODEL
from minisgl_backend.server.repository import shipped_repository
from minisgl_backend.text.tokenizer_files import check_tokenizer


def with_modules(options: EngineOptions, modules: Sequence[str]) -> EngineOptions:
    """The options with more adapters, each as NAME=PATH."""
    for module in modules:
        name, _, path = module.partition("=")
        if not (name.strip() and path.strip()) or "," in module:
            raise ConfigError(f"--lora-module must be NAME=PATH without commas, got {module!r}")
    before = [] if options.lora_modules is None else [options.lora_modules]
    return replace(options, lora_modules=",".join([*before, *modules]) or None)


def checked(options: EngineOptions) -> EngineOptions:
    """The options, ``located``, if the engine could start with them."""
    device = device_type(options)
    check_options(options, device)
    if (options.nnodes or 1) > 1:
        read_secret(options, os.environ)
    check_meeting_point(options)
    options = with_adapters_beside(located(options), shipped_repository() / OPTIONS_MODEL / "1")
    check_adapter_folders(options)
    check_task_names(options)
    checked_spec(options, Path(options.model), device)
    check_tokenizer(Path(options.tokenizer or options.model))
    return options


def located(options: EngineOptions) -> EngineOptions:
    """The options with absolute paths; models given by id are downloaded.

    The server runs in another folder, and a download here shows its progress to the operator.
    """
    source = options.model_source
    model = str(resolve_model(options.model, source).resolve())
    tokenizer = options.tokenizer and str(resolve_tokenizer(options.tokenizer, source).resolve())
    layer_folder = options.speculative_mtp_model
    if layer_folder is not None:
        layer_folder = str(resolve_model(layer_folder, source).resolve())
    modules = adapter_paths(replace(options, multi_lora=None))
    return replace(
        options,
        model=model,
        tokenizer=tokenizer,
        speculative_mtp_model=layer_folder,
        lora_modules=",".join(f"{n}={Path(path).resolve()}" for n, path in modules.items()) or None,
        multi_lora=options.multi_lora and str(Path(options.multi_lora).resolve()),
        node_secret_file=options.node_secret_file and str(Path(options.node_secret_file).resolve()),
    )


def options_as_text(options: EngineOptions) -> dict[str, str]:
    """The options that differ from the defaults, as the parameters of a config.pbtxt."""
    given = {spec.name: getattr(options, spec.name) for spec in fields(options)}
    defaults = {spec.name: spec.default for spec in fields(options)}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in given.items()
        if value != defaults[name]
    }
