"""What a processor is good at, and which number type follows from it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from minisgl_backend import resolve as resolving
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.device import processor
from minisgl_backend.device.processor import LARGE_MODEL, default_dtype, has_bfloat16
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.resolve import num_cpu_threads


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16 avx512_vnni", True),
        ("fpu amx_tile amx_bf16", True),
        ("fpu avx2 avx512f avx512_vnni", False),
    ],
)
def test_bfloat16_is_a_flag_of_the_processor(
    flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(processor, "CPU_INFO", cpu_info)
    assert has_bfloat16() is expected


def test_without_proc_there_is_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPU_INFO", Path("/nowhere/cpuinfo"))
    assert not has_bfloat16()


@pytest.mark.parametrize(
    ("checkpoint", "num_weights", "is_native", "expected"),
    [
        ("bfloat16", LARGE_MODEL, True, "bfloat16"),
        ("float16", LARGE_MODEL, True, "bfloat16"),
        ("bfloat16", LARGE_MODEL, False, "float32"),
        ("bfloat16", LARGE_MODEL - 1, True, "float32"),
        ("float32", LARGE_MODEL, True, "float32"),
    ],
)
def test_the_type_follows_from_checkpoint_size_and_processor(
    checkpoint: str,
    num_weights: int,
    is_native: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor, "has_bfloat16", lambda: is_native)
    assert default_dtype(checkpoint, num_weights) == expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_native", [True, False])
def test_sixteen_bits_on_a_slow_processor_are_one_warning_of_all_ranks(
    is_native: bool, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolving, "has_bfloat16", lambda: is_native)
    options = EngineOptions(model=DEMO_MODEL, device="cpu", dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        facts = resolving.resolve(options, RankPlace.first(2, None).of(rank))
    facts.device.close()
    assert facts.dtype == torch.bfloat16
    warnings = [record for record in caplog.records if "float32 is many times" in record.message]
    assert len(warnings) == (0 if is_native or rank else 1)


@pytest.mark.parametrize(
    ("variable", "num_weights", "num_ranks", "expected"),
    [
        ("", LARGE_MODEL - 1, 1, 7),  # one core is left for planning and sending
        ("", LARGE_MODEL, 1, 8),
        ("8", LARGE_MODEL - 1, 1, 8),
        ("", LARGE_MODEL, 2, 4),
    ],
)
def test_threads_follow_from_model_and_ranks(
    variable: str,
    num_weights: int,
    num_ranks: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert num_cpu_threads(RankPlace.first(num_ranks, None), num_weights) == expected
