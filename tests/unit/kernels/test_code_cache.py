"""The kernels' machine code in the user's cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from minisgl_backend.kernels.cuda.code_cache import kept

_NAMES_OF_HOMES: Final = ("HOME", "XDG_CACHE_HOME")


def _never() -> bytes:
    raise AssertionError("compiled although it is kept")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "minisgl" / "kernels"


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    assert kept("a.cubin", lambda: b"code") == b"code"
    assert kept("a.cubin", _never) == b"code"
    assert [path.name for path in folder.iterdir()] == ["a.cubin"]
    assert folder.stat().st_mode & 0o077 == 0


def test_what_is_kept_is_on_the_disk_before_it_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    kept("a.cubin", lambda: b"code")
    assert synced == [(folder / "a.cubin").stat().st_ino]


def test_an_empty_file_is_compiled_again(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "a.cubin").touch()
    assert kept("a.cubin", lambda: b"code") == b"code"
    assert kept("a.cubin", _never) == b"code"


def test_what_cannot_be_kept_leaves_nothing_behind(folder: Path) -> None:
    (folder / "a.cubin").mkdir(parents=True)
    assert kept("a.cubin", lambda: b"code") == b"code"
    assert [path.name for path in folder.iterdir()] == ["a.cubin"]


def test_a_cache_that_is_no_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept("a.cubin", lambda: b"code") == b"code"


def test_a_user_without_a_home_compiles_at_every_start() -> None:
    """As in a container that runs under an arbitrary user id."""
    if os.getuid():
        pytest.skip("only root can take another user's number")
    become_nobody = f"""
import os
from {kept.__module__} import kept
os.setuid(2**31 - 2)
assert kept("a.cubin", lambda: b"code") == b"code"
"""
    env = {name: value for name, value in os.environ.items() if name not in _NAMES_OF_HOMES}
    subprocess.run([sys.executable, "-c", become_nobody], env=env, check=True)
