"""A private copy of the model repository, with the operator's options written into it.

Knows the layout of a repository and the text format of config.pbtxt. The options are ``parameters``
of ``llm_engine`` alone; the text models read them there. Must not know which options exist or what
they mean.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.runtime_files import OPTIONS_MODEL


def shipped_repository() -> Path:
    """The repository that comes with the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    for place in (package / "model_repository", package.parent / "model_repository"):
        if place.is_dir():
            return place
    raise ConfigError("the package has lost its model_repository")


def copy_repository(source: Path, target: Path, options: Mapping[str, str]) -> None:
    """Copy ``source`` to ``target`` (which must not exist) and write ``options`` into it."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for model in target.glob("*/*/model.py"):
        keep_no_bytecode(model.parent)
    config = target / OPTIONS_MODEL / "config.pbtxt"
    config.write_text(with_parameters(config.read_text("utf-8"), options), "utf-8")


def with_plain_folders(options: Mapping[str, str], directory: Path) -> Mapping[str, str]:
    """The options with links in ``directory`` for checkpoints whose names are not ASCII.

    The Python inside Triton's stub understands only ASCII names, whatever the locale. The code that
    opens other files that options name knows that (``file_names``).
    """
    plain = dict(options)
    for name in ("model", "tokenizer", "speculative_mtp_model"):
        folder = plain.get(name, "")
        if not folder.isascii() and Path(folder).is_dir():
            link = directory / name
            link.symlink_to(folder)
            plain[name] = str(link)
    return plain


def keep_no_bytecode(folder: Path) -> None:
    """Keep Python from writing .pyc files for the modules in ``folder``: a file takes the place of
    their folder.

    Before 3.13, Python leaves half a .pyc on a full disk, and never starts with it again; and the
    Python inside Triton's stub ignores environment variables.
    """
    (folder / "__pycache__").touch()


def with_parameters(config: str, values: Mapping[str, str]) -> str:
    """The text of a config.pbtxt with the ``parameters`` in ``values`` set.

    Raises ``ConfigError`` for a value that is not UTF-8, as a path may be.
    """
    # gRPC and protobuf take half a second to import, a cost that other commands should not pay
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    message = text_format.Parse(config, model_config_pb2.ModelConfig())
    for name, value in values.items():
        try:
            message.parameters[name].string_value = value
        except UnicodeEncodeError:
            raise ConfigError(f"option {name} must be UTF-8, got {value!r}") from None
    return str(text_format.MessageToString(message))
