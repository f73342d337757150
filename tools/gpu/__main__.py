"""``python -m tools.gpu grammars|kernels|server``: pack wheels for the GPU machine.

The GPU machine is expected to have Linux x86-64, Python 3.12, an NVIDIA driver, nvcc, torch, pytest
and hypothesis; it needs no network. ``grammars`` packs llguidance, and what checks answers in
tests; ``kernels`` FlashInfer and a trimmed sgl_kernel; ``server`` tritonserver, a numpy that its
stub can read, and what its clients need. Each archive stays small enough to travel with a working
tree (``--limit-mib`` is for all together); ``tools/gpu/activate.sh`` unpacks them there.

Needs pip, ``xz`` and, for ``kernels``, ``pip install zstandard``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import click

from tools.gpu.trim import Wanted, trim

PYTHON = "3.12"
WHEELS = {
    "grammars": (
        "llguidance==1.9.1",
        "jsonschema==4.26.0",
        "jsonschema-specifications==2025.9.1",
        "referencing==0.37.0",
        "rpds-py==2026.9.1",
    ),
    "kernels": ("flashinfer-python==0.6.12", "apache-tvm-ffi==0.1.9", "sglang-kernel==0.4.4"),
    "server": (
        "nvidia-pytriton==0.7.0",
        "numpy==1.26.4",
        "tritonclient==2.73.0",
        "grpcio==1.85.1",
        "protobuf==6.33.6",
        "python-rapidjson==1.25",
    ),
}
_GLIBC = (17, 24, 27, 28, 31, 34, 35, 38, 39)
"""The minor versions of glibc 2 whose wheels run there; pip matches each tag exactly."""


def download(requirements: tuple[str, ...], folder: Path) -> list[Path]:
    """Download wheels for the GPU machine's Python, without their dependencies."""
    tags = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for tag in tags:
        command += ["--platform", tag]
    wheels: list[Path] = []
    for requirement in requirements:
        subprocess.run([*command, "--dest", str(folder), requirement], check=True)
        distribution, version = requirement.replace("-", "_").split("==")
        # the folder may keep wheels of other versions
        wheels.extend(folder.glob(f"{distribution}-{version}[-+]*.whl"))
    return wheels


def unpack(wheel: Path, target: Path, keep: Callable[[str], bool]) -> None:
    """Unpack the files of a wheel whose names pass ``keep``, with their permissions."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.is_dir() and keep(member.filename):
                path = Path(archive.extract(member, target))
                path.chmod(member.external_attr >> 16 & 0o777 or 0o644)


def _kernel_file(name: str) -> bool:
    """Whether to keep a file of sgl_kernel: other architectures and extensions are left out."""
    return not name.startswith(
        ("sgl_kernel/sm100/", "sgl_kernel/flashmla_ops", "sgl_kernel/testing/")
    )


def _server_file(name: str) -> bool:
    """Whether to keep a file: of pytriton no Python, and of its tritonserver what serves one Python
    version."""
    place = name.partition("pytriton/tritonserver/")[2]
    if place:
        stub = f"python_backend_stubs/{PYTHON}/"
        return place.startswith(("bin/", "backends/", stub))
    if name.startswith("nvidia_pytriton.libs/libpython"):
        return False  # of another Python; 3.12 has its own on the machine
    return "/tests/" not in name and not name.startswith(("pytriton/", "nvidia_pytriton-"))


def _grammar_file(name: str) -> bool:
    return "/tests/" not in name


_KEPT_FILES = {"grammars": _grammar_file, "kernels": _kernel_file, "server": _server_file}


@click.command()
@click.argument("what", type=click.Choice(sorted(WHEELS)))
@click.option("--out", type=click.Path(path_type=Path), default=Path(".gpu"), show_default=True)
@click.option("--wheels", type=click.Path(path_type=Path), help="folder that keeps the downloads")
@click.option("--arch", default=90, show_default=True, help="SM architecture of the GPU")
@click.option("--head-dims", default="64,128", show_default=True)
@click.option("--limit-mib", default=60, show_default=True, help="most for all archives together")
def pack(
    what: str, out: Path, wheels: Path | None, arch: int, head_dims: str, limit_mib: int
) -> None:
    """Download and pack the wheels of WHAT into OUT/WHAT.tar.xz."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        folder = wheels or Path(scratch, "wheels")
        folder.mkdir(parents=True, exist_ok=True)
        for wheel in download(WHEELS[what], folder):
            unpack(wheel, tree, _KEPT_FILES[what])
        if what == "kernels":
            dims = frozenset(int(dim) for dim in head_dims.split(","))
            wanted = Wanted(arch=arch, head_dims=dims, dtypes=frozenset({"bfloat16_t"}))
            kept, found = trim(tree / "sgl_kernel" / "flash_ops.abi3.so", wanted)
            click.echo(f"device code of sgl_kernel: kept {kept >> 20} of {found >> 20} MiB")
        archive = out / f"{what}.tar.xz"
        names = sorted(path.name for path in tree.iterdir())
        compress = ["tar", "-C", str(tree), "-I", "xz -6 -T0", "-cf", str(archive), *names]
        subprocess.run(compress, check=True)
    total = sum(path.stat().st_size for path in out.glob("*.tar.xz"))
    click.echo(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, all {total / 2**20:.1f} MiB")
    if total > limit_mib << 20:
        click.echo(f"over {limit_mib} MiB together: carry one archive at a time", err=True)


if __name__ == "__main__":
    pack()
