"""perf_analyzer, the load generator that Triton's users know, drives the ensembles by streaming.

Its binary comes out of the wheel of tritonclient 2.51, into the user's cache folder. The two system
libraries that it wants besides come with nvidia-pytriton, under other names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minisgl_backend.server.process import TritonServer

VERSION = "2.51.0"


@pytest.fixture(scope="module")
def perf_analyzer() -> tuple[Path, dict[str, str]]:
    """The binary and its environment; skips where it cannot be had or does not run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "minisgl" / f"perf_analyzer-{VERSION}"
    binary = folder / "perf_analyzer"
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fetch_binary(folder, binary)
    library_path = system_libraries(folder)
    env = {**os.environ, "LD_LIBRARY_PATH": library_path}
    probe = subprocess.run([binary, "--version"], env=env, capture_output=True, text=True)
    if "error while loading shared libraries" in probe.stderr:
        pytest.skip(f"perf_analyzer does not run here: {probe.stderr.strip()}")
    return binary, env


def fetch_binary(folder: Path, binary: Path) -> None:
    """Take the binary out of the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--platform", "manylinux1_x86_64", "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"tritonclient=={VERSION}"], capture_output=True, text=True, timeout=200
    )
    if done.returncode:
        pytest.skip(f"perf_analyzer cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/bin/perf_analyzer")]
        part = binary.with_suffix(".part")
        with archive.open(name) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
    part.chmod(0o755)
    part.rename(binary)
    wheel.unlink()


def system_libraries(folder: Path) -> str:
    """A folder in which the libraries of nvidia-pytriton have the names that are asked for."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return os.environ.get("LD_LIBRARY_PATH", "")
    bundled = Path(spec.submodule_search_locations[0]).parent / "nvidia_pytriton.libs"
    libraries = folder / "lib"
    libraries.mkdir(exist_ok=True)
    for pattern, name in (("libb64-*", "libb64.so.0d"), ("libcudart-*", "libcudart.so.12")):
        link = libraries / name
        link.unlink(missing_ok=True)
        link.symlink_to(next(bundled.glob(pattern)))
    return os.pathsep.join((str(libraries), str(bundled)))


@pytest.mark.parametrize("model", ["minisgl", "llm_engine"])
def test_streaming(
    paced_server: TritonServer,
    perf_analyzer: tuple[Path, dict[str, str]],
    model: str,
    tmp_path: Path,
) -> None:
    binary, env = perf_analyzer
    data = {"input_ids": {"content": [1, 2, 3], "shape": [3]}}
    inputs = tmp_path / "input.json"
    inputs.write_text(
        json.dumps({"data": [{**data, "stream": [True], "max_tokens": [8], "ignore_eos": [True]}]})
    )
    export = tmp_path / "export.json"
    command = [binary, "-m", model, "--service-kind", "triton", "-i", "grpc", "--streaming"]
    command += ["-u", f"127.0.0.1:{paced_server.grpc_port}", "--async", "--concurrency-range", "2"]
    command += ["--input-data", str(inputs), "--request-count", "20"]
    command += ["--profile-export-file", str(export)]
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    assert len(requests) >= 20
    # a response a chunk, of one token or of some, and none that is empty
    assert all(1 <= len(request["response_timestamps"]) <= 9 for request in requests)
