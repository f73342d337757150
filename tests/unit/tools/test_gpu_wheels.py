"""Which wheels are packed for the GPU machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.gpu.__main__ import download


def test_only_the_version_asked_for_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "apache_tvm_ffi-0.1.8-cp312-cp312-manylinux2014_x86_64.whl",
        "apache_tvm_ffi-0.1.9-cp312-cp312-manylinux2014_x86_64.whl",
        "apache_tvm_ffi-0.1.91-cp312-cp312-manylinux2014_x86_64.whl",
        "numpy-1.26.4+own-cp312-cp312-manylinux2014_x86_64.whl",
    ):
        (tmp_path / name).touch()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    found = download(("apache-tvm-ffi==0.1.9", "numpy==1.26.4"), tmp_path)
    assert [wheel.name.split("-")[1] for wheel in found] == ["0.1.9", "1.26.4+own"]
