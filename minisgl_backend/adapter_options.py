"""The LoRA adapters that options name, by their paths and by their numbers.

Knows the options about adapters, and the file that lists some. Must not know tensors, or which
adapters the engine has loaded since. Everything here raises ``ConfigError``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.file_names import reachable
from minisgl_backend.models.adapter_config import check_adapter_folder
from minisgl_backend.models.config_json import read_json

_ADAPTERS: Final = "multi_lora.json"


def adapter_paths(options: EngineOptions) -> dict[str, str]:
    """The adapters that ``multi_lora`` and ``lora_modules`` name. Raises ``ConfigError``."""
    paths: dict[str, str] = {}
    if options.multi_lora is not None:
        file = Path(options.multi_lora)
        with reachable(file) as place:
            listed = read_json(place)
        if not all(isinstance(path, str) for path in listed.values()):
            raise ConfigError(f"{file} must hold an object of names and paths")
        paths = {name: str(file.parent / path) for name, path in listed.items()}
    given = options.lora_modules
    named: dict[str, str] = {}
    for entry in given.split(",") if given else ():
        name, _, path = entry.partition("=")
        if not (name.strip() and path.strip()):
            raise ConfigError(f"option lora_modules must be NAME=PATH,NAME=PATH, got {given!r}")
        if name.strip() in named:
            raise ConfigError(f"option lora_modules names {name.strip()!r} twice, got {given!r}")
        named[name.strip()] = os.path.expanduser(path.strip())  # shells do not expand it after a =
    return {**paths, **named}


def with_adapters_beside(options: EngineOptions, folder: Path) -> EngineOptions:
    """The options with the list of adapters in ``folder``, the engine's version folder in the model
    repository, where the vLLM backend has it, if there is one and the options name no other."""
    listed = folder / _ADAPTERS
    if not options.enable_lora or options.multi_lora is not None or not listed.exists():
        return options
    return replace(options, multi_lora=str(listed))


def adapter_tasks(options: EngineOptions) -> dict[int, str]:
    """The names of adapters by ``lora_task_id``. Raises ``ConfigError``."""
    given = options.lora_task_ids
    tasks: dict[int, str] = {}
    for entry in given.split(",") if given else ():
        number, _, name = entry.partition("=")
        if not (number.strip().isdecimal() and name.strip()):
            raise ConfigError(
                f"option lora_task_ids must be NUMBER=NAME,NUMBER=NAME, got {given!r}"
            )
        if int(number) in tasks:
            raise ConfigError(f"option lora_task_ids has {int(number)} twice, got {given!r}")
        tasks[int(number)] = name.strip()
    return tasks


def check_adapters(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if options about adapters are malformed or contradict each other."""
    if not options.enable_lora:
        for name in (
            "lora_modules",
            "multi_lora",
            "lora_task_ids",
            "max_cpu_loras",
            "lora_updates",
        ):
            if getattr(options, name):
                raise ConfigError(f"option {name} needs enable_lora")
        others = EngineOptions()
        for name in ("max_loras", "max_lora_rank"):
            if getattr(options, name) != getattr(others, name):
                raise ConfigError(f"option {name} needs enable_lora")
    most = options.max_cpu_loras
    if most is not None and most < options.max_loras:
        raise ConfigError(f"max_cpu_loras {most} must be at least max_loras {options.max_loras}")
    adapter_paths(options)
    adapter_tasks(options)


def check_adapter_folders(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if the folder or the config of an adapter that the options name is not
    there. The engine checks this, too, but later."""
    for name, path in adapter_paths(options).items():
        try:
            check_adapter_folder(Path(path))
        except ConfigError as error:
            raise ConfigError(f"adapter {name!r}: {error}") from None


def check_task_names(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if ``lora_task_ids`` names an adapter that is not there and cannot be
    loaded later. ``multi_lora`` must be as the engine gets it, which may be the file in its model's
    folder."""
    if options.lora_updates or not options.enable_lora:
        return
    known = adapter_paths(options)
    for number, name in adapter_tasks(options).items():
        if name not in known:
            raise ConfigError(
                f"option lora_task_ids: {number} stands for {name!r}, and the adapters of "
                f"lora_modules and multi_lora are {list(known)}"
            )
