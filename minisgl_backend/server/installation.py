"""Where tritonserver is on this machine, and what its environment must look like.

Two kinds are known: the one inside the nvidia-pytriton wheel, whose parts must be put together (it
has a stub for each Python version beside the backend), and a complete one, as in NVIDIA's
container, which is found on PATH or named by the operator, perhaps in the environment. Must not
know models or options, nor start anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl_backend.errors import ConfigError

TRITONSERVER_VARIABLE: Final = "MINISGL_TRITONSERVER"
"""The environment variable that names a tritonserver; the wheel's is used if it is empty."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver: its binary, its parts, and the directories that hold its libraries.

    ``backend`` and ``stub`` must be put together; ``backends`` is a complete folder. All are None
    if the server finds its own.
    """

    binary: Path
    backends: Path | None = None
    backend: Path | None = None
    stub: Path | None = None
    library_path: tuple[str, ...] = ()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """``inherited``, with what the server and its Python stubs need.

        The stub finds its packages through ``python3``, so this interpreter's folder comes first on
        PATH; and it must load this interpreter's own libpython, not another of the same version.
        """
        env = dict(inherited)
        bin_dir = str(Path(sys.executable).parent)
        env["PATH"] = os.pathsep.join([bin_dir, *_parts(env.get("PATH", os.defpath))])
        if self.library_path:
            parts = [*self.library_path, *_parts(env.get("LD_LIBRARY_PATH"))]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(parts)
        return env

    def make_backend_directory(self, parent: Path) -> Path | None:
        """Put the Python backend and its stub together under ``parent``; None if there is nothing
        to do."""
        if self.backend is None or self.stub is None:
            return None
        directory = parent / "backends"
        python = directory / "python"
        python.mkdir(parents=True)
        for source in (*self.backend.iterdir(), self.stub):
            if source.is_file():
                (python / source.name).symlink_to(source)
        return directory


def find_installation(binary: str | None = None) -> Installation:
    """The tritonserver named by ``binary``, else by the environment, else the wheel's, else the one
    on PATH.

    Raises ``ConfigError`` if there is none, or the wheel has no stub for this Python or NumPy.
    """
    named = binary if binary is not None else os.environ.get(TRITONSERVER_VARIABLE)
    if named:
        path = shutil.which(named)
        if path is None:
            raise ConfigError(f"there is no tritonserver at {named!r}")
        return _complete(path)
    wheel = _wheel_installation()
    if wheel is not None:
        return wheel
    path = shutil.which("tritonserver")
    if path is None:
        raise ConfigError(
            "no tritonserver found: install nvidia-pytriton (pip install '.[server]' in a clone),"
            " put tritonserver on PATH, or name it with --tritonserver"
        )
    return _complete(path)


def _complete(path: str) -> Installation:
    """An installation that is complete. A build may have its backends beside the binary's folder,
    where the server does not look by itself."""
    binary = Path(path).resolve()
    backends = binary.parent.parent / "backends"
    return Installation(binary, backends=backends if (backends / "python").is_dir() else None)


def _wheel_installation() -> Installation | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise ConfigError(f"nvidia-pytriton has no Python backend for Python {version}")
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:  # the stub starts with NumPy 2, but dies at the first request
        raise ConfigError(
            f"nvidia-pytriton's tritonserver does not work with NumPy {numpy}: "
            "pip install 'numpy<2'"
        )
    libdir = sysconfig.get_config_var("LIBDIR") or ""
    libpython = f"libpython{version}.so.1.0"
    if not _is_loadable(libpython, libdir):
        raise ConfigError(
            f"tritonserver's Python backend needs {libpython}, which this Python does not bring; "
            f"install it (apt-get install libpython{version}) or use a Python that has it"
        )
    return Installation(
        binary=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=stub,
        library_path=(libdir, str(package.parent / "nvidia_pytriton.libs")),
    )


def _is_loadable(library: str, libdir: str) -> bool:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    places = [libdir, f"/usr/lib/{multiarch}", f"/lib/{multiarch}", "/usr/lib64", "/usr/lib"]
    places += _parts(os.environ.get("LD_LIBRARY_PATH"))
    return any(Path(place, library).exists() for place in places if place)


def _parts(path: str | None) -> list[str]:
    return [part for part in (path or "").split(os.pathsep) if part]
