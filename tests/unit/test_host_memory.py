"""Memory is what the machine has, or what the control groups of a container leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.host_memory import HostMemory

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_machine(tmp_path: Path) -> None:
    found = HostMemory.now(write(tmp_path, {"proc/self/cgroup": "0::/user.slice\n"}))
    assert found == HostMemory(total=64 * GIB, free=48 * GIB)


def test_this_machine() -> None:
    found = HostMemory.now()
    assert 2**20 < found.free <= found.total < 2**50


@pytest.mark.parametrize("path", ["/", "/kubepods/pod1/app"])
def test_a_container_with_groups_of_version_2(tmp_path: Path, path: str) -> None:
    """With a namespace of its own, a container sees its group as the root. Cached files make
    room."""
    group = f"sys/fs/cgroup{path}".rstrip("/")
    files = {
        "proc/self/cgroup": f"0::{path}\n",
        f"{group}/memory.max": f"{8 * GIB}\n",
        f"{group}/memory.current": f"{5 * GIB}\n",
        f"{group}/memory.stat": f"anon {2 * GIB}\ninactive_file {3 * GIB}\n",
    }
    assert HostMemory.now(write(tmp_path, files)) == HostMemory(total=8 * GIB, free=6 * GIB)


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    """A group has no limit, one around it has; what others use in there is not free."""
    files = {
        "proc/self/cgroup": "0::/pod/app\n",
        "sys/fs/cgroup/pod/app/memory.max": "max\n",
        "sys/fs/cgroup/pod/app/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
    }
    assert HostMemory.now(write(tmp_path, files)) == HostMemory(total=4 * GIB, free=0)


@pytest.mark.parametrize("folder", ["docker/1234", ""])
def test_a_container_with_groups_of_version_1(tmp_path: Path, folder: str) -> None:
    """The path may be that of the host, which is not there in the container."""
    group = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/1234\n4:memory:/docker/1234\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{group}/memory.usage_in_bytes": f"{GIB}\n",
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
    }
    found = HostMemory.now(write(tmp_path, files))
    assert found == HostMemory(total=2 * GIB, free=3 * GIB // 2)
