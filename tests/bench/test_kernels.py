"""The benchmark of kernels, as far as it needs no GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_bench import kernels
from minisgl_bench.kernel_cases import Case


def test_a_kernel_that_there_is_not_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 1e12)
    case = Case("norm", num_bytes=1, ours=())
    monkeypatch.setattr(kernels, "cases", lambda *_: iter([case]))
    result = CliRunner().invoke(main, ["bench", "kernels", "--only", "nrom"])
    assert result.exit_code == 2, result.output
    assert "Error: there is no such kernel of these models on this GPU" in result.output
