"""What each of the three models does when it is loaded: read the options, send logs to Triton.

The options are only in the config.pbtxt of ``llm_engine``. The text models find that file next to
their own folder in the model repository. Must not know requests, or what a model does with its
options.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import triton_python_backend_utils as pb_utils

from minisgl_backend.config import EngineOptions
from minisgl_backend.death_signal import ending_with
from minisgl_backend.errors import ConfigError, MiniSGLError
from minisgl_backend.runtime_files import (
    HTTP_URL_VARIABLE,
    OPTIONS_MODEL,
    RUNTIME_DIRECTORY_VARIABLE,
)

logger = logging.getLogger(__name__)

_TRITON_PARAMETERS: Final = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})
"""Parameters that the Python backend itself reads."""
_STUB: Final = "triton_python_backend_stub"
_PARENT_ARGUMENT: Final = 5
"""The index of the stub's argument that holds the id of the process that started it."""

_Method = TypeVar("_Method", bound=Callable[..., None])


def runtime_directory() -> Path | None:
    """The directory of this server's sockets and marker files; None if the starter made none."""
    path = _environment(RUNTIME_DIRECTORY_VARIABLE)
    return Path(path) if path else None


def ready_url(args: Mapping[str, str]) -> str | None:
    """The URL at which the server tells whether this model is ready; None if it is not known."""
    server = _environment(HTTP_URL_VARIABLE)
    version = f"{args['model_name']}/versions/{args['model_version']}"
    return f"{server}/v2/models/{version}/ready" if server else None


def _environment(variable: str) -> str | None:
    """What the server's starter tells its models; the environment is read only here."""
    return os.environ.get(variable)


def own_options(args: Mapping[str, str]) -> EngineOptions:
    """The options among a model's own parameters."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return _options({name: value["string_value"] for name, value in parameters.items()})


def engine_options(args: Mapping[str, str]) -> EngineOptions:
    """The options of the ``llm_engine`` in the same repository as this model."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = Path(args["model_repository"]).parent / OPTIONS_MODEL / "config.pbtxt"
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"the text models need {OPTIONS_MODEL} in their repository: {error.strerror}"
        ) from error
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return _options({name: value.string_value for name, value in config.parameters.items()})


def _options(parameters: Mapping[str, str]) -> EngineOptions:
    return EngineOptions.from_mapping(
        {name: value for name, value in parameters.items() if name not in _TRITON_PARAMETERS}
    )


def loading(initialize: _Method) -> _Method:
    """Decorate ``initialize``: what all models do when they are loaded.

    The process ends with tritonserver, logs go to Triton, and a failure is one line with its cause.
    """

    @functools.wraps(initialize)
    def wrapped(self: Any, args: Mapping[str, str]) -> None:
        with ending_with(tritonserver_pid()):
            send_logs_to_triton()
            try:
                initialize(self, args)
            except MiniSGLError as error:
                raise pb_utils.TritonModelException(str(error)) from None
            # what is loaded stays: searching it for garbage again would take up to 0.1 s
            gc.collect()
            gc.freeze()

    return wrapped  # type: ignore[return-value]


def tritonserver_pid() -> int:
    """The process that started this one, even if it is gone by now and another is the parent."""
    words = Path("/proc/self/cmdline").read_text("utf-8", "replace").split("\0")
    return int(words[_PARENT_ARGUMENT]) if Path(words[0]).name == _STUB else os.getppid()


def send_logs_to_triton() -> None:
    """Hand log records of this process to Triton's log: ours from INFO, others' from WARNING."""
    root = logging.getLogger()
    if not any(isinstance(handler, _TritonHandler) for handler in root.handlers):
        handler = _TritonHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)
    logging.getLogger("minisgl_backend").setLevel(logging.INFO)


class _TritonHandler(logging.Handler):
    """Writes records to Triton's log, which adds time and severity."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)
