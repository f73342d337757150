"""The type of weights and activations that a rank takes by default."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_backend import resolve
from minisgl_backend.config import EngineOptions
from minisgl_backend.models.catalog import parse_spec
from minisgl_backend.parallel.place import RankPlace
from tests.unit.models.config_jsons import LLAMA_3_1_8B

AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("stored", "quantized", "expected"),
    [
        ("float16", False, "float16"),
        ("bfloat16", False, "bfloat16"),
        ("float32", False, "bfloat16"),
        ("float16", True, "bfloat16"),
    ],
)
def test_the_default_on_a_hopper_gpu(
    stored: str, quantized: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only bfloat16 has kernels for quantized weights there; elsewhere float16 stays."""
    device: Any = SimpleNamespace(is_host=False, torch_device=torch.device("cuda", 0))
    values = LLAMA_3_1_8B | {"torch_dtype": stored}
    spec = parse_spec(values | {"quantization_config": AWQ} if quantized else values)
    for has_kernels in (True, False):
        monkeypatch.setattr(resolve, "has_hopper_kernels", lambda *_, found=has_kernels: found)
        found = resolve.dtype_of(EngineOptions(), device, spec)
        wanted = expected if has_kernels or stored != "float16" else "float16"
        assert found == getattr(torch, wanted)
    converted = EngineOptions(quantization="fp8")
    monkeypatch.setattr(resolve, "has_hopper_kernels", lambda *_: True)
    assert resolve.dtype_of(converted, device, spec) == torch.bfloat16
    assert resolve.dtype_of(replace(converted, dtype="float16"), device, spec) == torch.float16


def test_a_slow_choice_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device: Any = SimpleNamespace(is_host=False, torch_device=torch.device("cuda", 0))
    monkeypatch.setattr(resolve, "has_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(resolve, "CudaDevice", lambda index: device)
    monkeypatch.setattr(resolve, "device_kind", lambda options, num_ranks: "cuda")
    place = RankPlace.first(1, None)
    resolve.resolve(EngineOptions(dtype="float16"), place)
    assert not caplog.messages
    facts = resolve.resolve(EngineOptions(dtype="float16", quantization="fp8"), place)
    assert facts.dtype == torch.float16
    (message,) = caplog.messages
    assert "kernels for quantized weights take bfloat16 alone" in message
