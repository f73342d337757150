"""Finds perf_analyzer on this machine, and sets up its environment.

The binary comes with NVIDIA's SDK container, and inside the wheels of tritonclient up to 2.60. On a
plain system it lacks two libraries, which nvidia-pytriton brings under other names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl_backend.errors import ConfigError

_HOW_TO_GET_IT: Final = (
    "put perf_analyzer on PATH, name it with --binary, or give --wheel a wheel that holds it, as "
    "`pip download --no-deps --platform manylinux1_x86_64 tritonclient==2.51.0` fetches one"
)
_LIBRARIES: Final = {"libb64.so.0d": "libb64-*", "libcudart.so.12": "libcudart-*"}
"""The name that the binary needs, and the name that nvidia-pytriton gives it."""
_TUNABLES: Final = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""For tensors that a response does not have, perf_analyzer 2.51 exports uninitialized memory, and
its export ends at the first NaN. By default glibc leaves scrambled pointers there, some of which
are NaN as a float; without these two caches it leaves addresses of an arena, which never are:
arenas begin at multiples of 64 MiB, so that bits 23 to 25 are zero in their first 8 MiB."""


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """A binary that runs here, with the folders that hold its libraries."""

    path: Path
    library_path: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which it finds its libraries and writes whole exports."""
        library_path = _joined(*self.library_path, os.environ.get("LD_LIBRARY_PATH", ""))
        tunables = _joined(os.environ.get("GLIBC_TUNABLES", ""), _TUNABLES)
        return {**os.environ, "LD_LIBRARY_PATH": library_path, "GLIBC_TUNABLES": tunables}

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [str(self.path), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )


def find_perf_analyzer(folder: Path, *, binary: str | None, wheel: Path | None) -> PerfAnalyzer:
    """The binary named, else the one in the wheel, else the one on PATH.

    What must be unpacked or linked goes to ``folder``. Raises ``ConfigError`` if there is none or
    it does not run.
    """
    if wheel is not None:
        path = _unpacked(wheel, folder)
    else:
        found = shutil.which(binary or "perf_analyzer")
        if found is None:
            raise ConfigError(f"no {binary or 'perf_analyzer'} found: {_HOW_TO_GET_IT}")
        path = Path(found)
    tool = PerfAnalyzer(path)
    complaint = _complaint(tool)
    if complaint:
        tool = PerfAnalyzer(path, _linked_libraries(folder))
        complaint = _complaint(tool)
    if complaint:
        raise ConfigError(f"{path.name} does not run here: {complaint}")
    return tool


def _joined(*parts: str) -> str:
    return ":".join(filter(None, parts))


def _unpacked(wheel: Path, folder: Path) -> Path:
    path = folder / "perf_analyzer"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith("/bin/perf_analyzer")]
            if not names:
                raise ConfigError(f"{wheel.name} holds no perf_analyzer: {_HOW_TO_GET_IT}")
            with archive.open(names[0]) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{wheel.name} is no wheel: {error}") from None
    path.chmod(0o755)
    return path


def _linked_libraries(folder: Path) -> tuple[str, ...]:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return ()
    bundled = Path(spec.submodule_search_locations[0]).parent / "nvidia_pytriton.libs"
    for name, pattern in _LIBRARIES.items():
        for library in bundled.glob(pattern):
            (folder / name).symlink_to(library)
    return str(folder), str(bundled)


def _complaint(tool: PerfAnalyzer) -> str:
    """Why it does not start; empty if it does."""
    try:
        done = tool.run(["--version"])
    except OSError as error:
        return error.strerror or str(error)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[:200]
