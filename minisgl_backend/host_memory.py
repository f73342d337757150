"""Main memory that this process may use: the machine's, or less if a container is limited.

Linux limits containers by control groups, which nest; each may have a limit. Files in a group's
folder have other names in version 1 and 2. Knows these files and /proc. Must not know what memory
is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of main memory: ``total`` is all that the process may use, ``free`` is what it can
    still get, perhaps from files that are cached."""

    total: int
    free: int

    @classmethod
    def now(cls, root: Path = Path("/")) -> HostMemory:
        """``root`` has the folders proc and sys."""
        of_machine = _numbers(root / "proc" / "meminfo")
        total, free = of_machine.get("MemTotal:", 0), of_machine.get("MemAvailable:", 0)
        total, free = 1024 * total, 1024 * free
        if not total or not free:
            page_size = os.sysconf("SC_PAGE_SIZE")
            total = os.sysconf("SC_PHYS_PAGES") * page_size
            free = os.sysconf("SC_AVPHYS_PAGES") * page_size
        for limit, used in _limits(root):
            total, free = min(total, limit), min(free, max(limit - used, 0))
        return cls(total, free)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that holds this process, and the bytes in use there: without
    cached files that were not read lately, as these make room (as Kubernetes counts)."""
    groups = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = groups / "memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        limit_name, used_name, cached_name = names
        # a container may see its own group at the base, under another path than this one
        for group in (Path(path), *Path(path).parents):
            folder = base / group.relative_to("/")
            limit, used = _lines(folder / limit_name), _lines(folder / used_name)
            if limit and used and limit[0].isdecimal():  # or "max"
                cached = _numbers(folder / "memory.stat").get(cached_name, 0)
                yield int(limit[0]), int(used[0]) - cached


def _lines(file: Path) -> list[str]:
    """Empty if the file is not there, or may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _numbers(file: Path) -> dict[str, int]:
    """Of a file whose lines are names and numbers."""
    return {words[0]: int(words[1]) for line in _lines(file) if len(words := line.split()) > 1}
