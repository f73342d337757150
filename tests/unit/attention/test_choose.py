"""Which attention backends a GPU gets, as far as this can be tested without one."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend import packages
from minisgl_backend.attention import choose, flash_infer
from minisgl_backend.attention.base import (
    AttentionSetting,
    AttentionShape,
    DecodeRows,
    ExpandedHeads,
    GroupedDecode,
    LayerAttention,
    LayerHeads,
    PagedAttention,
    ScheduledDecode,
)
from minisgl_backend.attention.by_rows import DecodeByRows
from minisgl_backend.attention.expanded import ExpandedPrefill
from minisgl_backend.attention.flash_attn import FlashAttention
from minisgl_backend.attention.latent_kernels import LatentDecode, LatentPrefill
from minisgl_backend.attention.names import DECODE_NAMES, PREFILL_NAMES
from minisgl_backend.attention.own_kernels import InvariantAttention, TritonDecode, TritonPrefill
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.errors import ConfigError
from minisgl_backend.plan import NO_GROUPS, Groups
from minisgl_backend.request import IntArray

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
SETTING = AttentionSetting(
    shape=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, windows=(None,)),
    page_size=16,
    max_sequence_length=100,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    max_batch_size=4,
    max_captured_batch_size=4,
    device=torch.device("cpu"),
)

ACCELERATOR = torch.device("meta")
"""Stands for a device that is not a CPU and has no library's kernels."""


def choice(option: str | None, **changes: Any) -> PagedAttention:
    return choose.choose_attention(option, replace(SETTING, **changes))


@pytest.fixture(autouse=True)
def pretend_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_triton", lambda: True)


@pytest.mark.parametrize("option", [None, "triton", "triton,triton", "triton, triton"])
def test_own_kernels_need_nothing(option: str | None) -> None:
    attention = choice(option, device=ACCELERATOR)
    assert attention.name == "triton"
    assert attention.can_capture
    assert attention.captures_chunks
    assert isinstance(attention.prefill, TritonPrefill)
    assert isinstance(attention.decode, TritonDecode)


def test_each_kind_of_heads_has_a_backend_of_its_own() -> None:
    narrow, wide = LayerHeads(4, 2, 64), LayerHeads(4, 1, 1024)
    shape = replace(SETTING.shape, windows=(None, 8, None), by_layer=(narrow, wide, narrow))
    attention = choice(None, shape=shape, device=ACCELERATOR)
    assert attention.name == "triton+sdpa"  # heads of 1,024 are too large for the kernels
    assert not attention.can_capture and not attention.captures_chunks
    assert choice("sdpa", shape=shape).name == "sdpa"


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "triton"), (torch.float32, "sdpa")])
def test_wide_heads_have_to_fit_into_shared_memory(dtype: torch.dtype, name: str) -> None:
    shape = replace(SETTING.shape, head_dim=512)
    assert choice(None, shape=shape, dtype=dtype, device=ACCELERATOR).name == name
    assert choice("triton", shape=shape, dtype=dtype, device=ACCELERATOR).name == "triton"


LATENTS = replace(SETTING.shape, num_kv_heads=1, head_dim=576, latent_dim=512)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "triton"), (torch.float32, "sdpa")])
def test_latents_have_kernels_of_their_own(dtype: torch.dtype, name: str) -> None:
    attention = choice(None, shape=LATENTS, dtype=dtype, device=ACCELERATOR, grouped=True)
    assert attention.name == name and not attention.reads_groups
    assert attention.can_capture == attention.captures_chunks == (name == "triton")
    named = choice("triton", shape=LATENTS, dtype=dtype, device=ACCELERATOR)
    assert isinstance(named.prefill, LatentPrefill) and isinstance(named.decode, LatentDecode)
    assert choice(None, shape=LATENTS, grouped=True).reads_groups, "on a CPU"


@pytest.mark.parametrize("option", ["cuda", "fi", "trtllm", "fi,triton", "triton,cuda"])
def test_other_kernels_take_no_latents(option: str) -> None:
    with pytest.raises(ConfigError, match="has no kernels for the latents of this model: take fa"):
        choice(option, shape=LATENTS, device=ACCELERATOR)


@pytest.fixture
def pretend_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_why_not_gpu", lambda *_: None)
    monkeypatch.setattr(choose, "_why_not_import", lambda *_: None)
    monkeypatch.setattr(choose, "_library_of_flash_attn", lambda: ModuleType("flash_attn"))


@pytest.mark.usefixtures("pretend_flash_attn")
def test_flash_attention_over_latents() -> None:
    shape = replace(LATENTS, expanded=ExpandedHeads(256, 256))
    default = choice(None, shape=shape, device=ACCELERATOR)
    assert default.name == "fa,triton+fa"
    assert default.can_capture and default.captures_chunks
    assert isinstance(default.prefill, FlashAttention)
    assert isinstance(default.decode, DecodeByRows)
    assert isinstance(default.expansion, ExpandedPrefill)
    in_float8 = choice(None, shape=shape, kv_dtype=torch.float8_e4m3fn, device=ACCELERATOR)
    assert in_float8.name == "triton" and isinstance(in_float8.expansion, ExpandedPrefill)
    named = choice("triton", shape=shape, device=ACCELERATOR)
    assert isinstance(named.decode, LatentDecode) and named.expansion is None
    assert choice("fa", shape=shape, device=ACCELERATOR).name == "fa"


@pytest.mark.usefixtures("pretend_flash_attn")
def test_only_chunks_of_flash_attention_are_faster_than_rows_that_read_again() -> None:
    shape = replace(SETTING.shape, num_kv_heads=8, head_dim=128)
    choose_of = partial(choice, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=ACCELERATOR)
    assert choose_of("fa,triton", shape=shape).most_read_again == 200_000_000 // (2 * 8 * 128 * 2)
    assert choose_of("triton", shape=shape).most_read_again is None
    latents = choose_of("fa", shape=LATENTS).most_read_again
    assert latents == 200_000_000 // (LATENTS.head_dim * 2)
    has_windows = replace(shape, windows=(8, None)).for_context(100)
    assert choose_of("fa,triton", shape=has_windows).most_read_again == 48828
    no_others = replace(shape, windows=(8, 8)).for_context(100)
    assert choose_of("fa,triton", shape=no_others).most_read_again is None


@pytest.mark.usefixtures("pretend_flash_attn")
def test_heads_that_flash_attention_does_not_know() -> None:
    shape = replace(LATENTS, expanded=ExpandedHeads(96, 64))
    assert choice(None, shape=shape, device=ACCELERATOR).expansion is None
    shape = replace(LATENTS, head_dim=544)
    assert choice(None, shape=shape, device=ACCELERATOR).name == "triton"
    with pytest.raises(ConfigError, match="fa has no kernels for latents of this size"):
        choice("fa", shape=shape, device=ACCELERATOR)


@pytest.mark.parametrize(("num_rows", "backend"), [(1, "few"), (4, "few"), (5, "many")])
def test_few_rows_are_decoded_by_another_backend(num_rows: int, backend: str) -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self._name = name

        def plan_rows(self, rows: DecodeRows) -> LayerAttention:
            chosen.append(self._name)
            return lambda out, q, kv, layer: None

    chosen: list[str] = []
    numbers = torch.ones(num_rows, dtype=torch.int32)
    rows = DecodeRows(rows=numbers, lengths=numbers, page_table=torch.zeros(8, 1))
    DecodeByRows(Named("few"), Named("many"), 4).plan_rows(rows)
    assert chosen == [backend]


def test_windows_over_the_pages_of_all_layers() -> None:
    shape = replace(SETTING.shape, windows=(8, None), one_pool=True).for_context(100)
    assert not shape.window_pages and len(shape.kinds) == 1
    assert choice(None, shape=shape).name == "sdpa"


@pytest.mark.parametrize("option", ["cuda", "fa", "fi", "trtllm", "fa,triton", "triton,cuda"])
def test_other_kernels_do_not_bound_scores(option: str) -> None:
    shape = replace(SETTING.shape, cap=50.0)
    with pytest.raises(ConfigError, match="has no kernels for the bounded scores of this model"):
        choice(option, shape=shape, device=ACCELERATOR)
    assert choice(None, shape=shape, device=ACCELERATOR).name == "triton"


def test_latents_have_to_fit_into_a_tile() -> None:
    shape = replace(LATENTS, head_dim=832, latent_dim=768)
    assert choice(None, shape=shape, device=ACCELERATOR).name == "sdpa"
    with pytest.raises(ConfigError, match="latents of at most 512 elements, not 768: take sdpa"):
        choice("triton", shape=shape, device=ACCELERATOR)


class Scheduled:
    """Decode attention by a schedule, which records what it is told."""

    def __init__(self, setting: AttentionSetting) -> None:
        self.lengths: list[int] = []
        self.tables: list[Tensor] = []

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        self.tables.append(rows.page_table)
        return lambda out, q, kv, layer: None

    def schedule_rows(self, lengths: IntArray) -> None:
        self.lengths += lengths.tolist()


def test_layers_with_window_pages_have_a_schedule_and_a_table_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Scheduled] = []

    def make(setting: AttentionSetting) -> Scheduled:
        made.append(Scheduled(setting))
        return made[-1]

    kind = replace(choose._DECODE["triton"], make=make)
    monkeypatch.setattr(choose, "_DECODE", {**choose._DECODE, "triton": kind})
    shape = replace(SETTING.shape, windows=(None, 8, None)).for_context(100)
    attention = choice("triton", shape=shape, device=ACCELERATOR)
    assert attention.can_capture and not attention.captures_chunks
    assert isinstance(attention.decode, ScheduledDecode)
    attention.decode.schedule_rows(np.array([3, 4], np.int32))
    assert [backend.lengths for backend in made] == [[3, 4], [3, 4]]
    pages, window_pages = torch.zeros(2, 4), torch.ones(2, 4)
    rows = DecodeRows(
        rows=torch.arange(2),
        lengths=torch.ones(2),
        page_table=pages,
        window_table=window_pages,
    )
    attention.decode.plan_rows(rows)
    assert made[0].tables == [pages] and made[1].tables == [window_pages]
    assert shape.kinds[1][1] == (1,) and shape.kinds[1][0].window_pages


def test_sections_are_computed_by_a_backend_without_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row has only the pages of its section, as a captured step finds them."""
    made: list[Scheduled] = []

    def make(setting: AttentionSetting) -> Scheduled:
        assert setting.shape.windows == (None,)
        made.append(Scheduled(setting))
        return made[-1]

    kind = replace(choose._DECODE["triton"], make=make)
    monkeypatch.setattr(choose, "_DECODE", {**choose._DECODE, "triton": kind})
    shape = replace(SETTING.shape, windows=(32, None), sections=True).for_context(100)
    attention = choice("triton", shape=shape, device=ACCELERATOR)
    assert isinstance(attention.decode, ScheduledDecode)
    attention.decode.schedule_rows(np.array([1, 32, 33, 100], np.int32))
    assert [backend.lengths for backend in made] == [[1, 32, 1, 4], [1, 32, 33, 100]]
    table = torch.arange(28).view(4, 7)  # pages of 16 positions
    rows = DecodeRows(
        rows=torch.tensor([0, 1, 2, 3]),
        lengths=torch.tensor([1, 32, 33, 100]),
        page_table=table,
        window_table=table + 100,
    )
    attention.decode.plan_rows(rows)
    assert made[0].tables[0].tolist() == [[100, 101], [107, 108], [116, 117], [127, 127]]
    assert made[1].tables == [table]
    assert not shape.for_context(32).sections, "one section is all"


class TakesGroups:
    """Decode attention that reads groups together."""

    def __init__(self, setting: AttentionSetting) -> None:
        self.setting = setting
        self.planned: list[DecodeRows] = []

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        self.planned.append(rows)
        return lambda out, q, kv, layer: None

    def take_groups(self, groups: Groups) -> bool:
        return self.setting.grouped


def test_groups_share_pages_and_no_window_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TakesGroups] = []

    def make(setting: AttentionSetting) -> TakesGroups:
        made.append(TakesGroups(setting))
        return made[-1]

    kind = replace(choose._DECODE["triton"], make=make)
    monkeypatch.setattr(choose, "_DECODE", {**choose._DECODE, "triton": kind})
    shape = replace(SETTING.shape, windows=(8, None)).for_context(100)
    attention = choice("triton", shape=shape, grouped=True, device=ACCELERATOR)
    assert attention.reads_groups and isinstance(attention.decode, GroupedDecode)
    assert [backend.setting.grouped for backend in made] == [False, True]
    assert attention.decode.take_groups(NO_GROUPS)
    rows = DecodeRows(
        rows=torch.arange(2),
        lengths=torch.ones(2),
        page_table=torch.zeros(2, 4),
        window_table=torch.ones(2, 4),
        grouped=True,
    )
    attention.decode.plan_rows(rows)
    assert [backend.planned[0].grouped for backend in made] == [False, True]


def test_batch_invariance_has_one_backend() -> None:
    attention = choice(None, batch_invariant=True)
    assert attention.name == "invariant"
    assert isinstance(attention.prefill, InvariantAttention)
    assert attention.prefill is attention.decode
    assert attention.can_capture and attention.captures_chunks


def test_a_cpu_takes_the_reference() -> None:
    assert choice(None).name == "sdpa"


def test_the_reference_needs_nothing_and_is_not_captured() -> None:
    attention = choice("sdpa")
    assert attention.name == "sdpa"
    assert not attention.can_capture
    assert isinstance(attention.decode, SdpaAttention)
    assert choice("sdpa,triton").can_capture
    assert not choice("sdpa,triton").captures_chunks


@pytest.mark.parametrize("option", ["tritn", "triton,flash", ""])
def test_unknown_names_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="offered are cuda, triton, fa, fi, trtllm, sdpa"):
        choice(option)


def test_each_name_has_a_backend() -> None:
    assert (tuple(choose._PREFILL), tuple(choose._DECODE)) == (PREFILL_NAMES, DECODE_NAMES)


def test_three_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="one or two names"):
        choice("triton,triton,triton")


@pytest.mark.parametrize("option", ["fa,triton", "fi", "triton,fi", "trtllm"])
def test_libraries_need_a_gpu(option: str) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend (fa|fi|trtllm) needs a GPU"):
        choice(option)


@pytest.mark.parametrize(
    ("option", "changes", "reason"),
    [
        ("fa", {"kv_dtype": torch.float8_e4m3fn}, "fa needs KV pages of bfloat16 or float16, not"),
        ("fi", {"dtype": torch.float32}, "fi needs dtype bfloat16 or float16, not float32"),
        ("trtllm", {"page_size": 1}, "trtllm needs a page_size of 16, 32 or 64, not 1: set page_"),
        ("trtllm", {"page_size": 128}, "trtllm needs a page_size of 16, 32 or 64, not 128"),
        ("trtllm,triton", {}, "trtllm only decodes: use trtllm alone, or put one of triton, fa"),
    ],
)
def test_an_unsupported_backend_is_refused_with_the_reason(
    option: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choice(option, **changes)


@pytest.mark.parametrize(
    ("option", "head_dim", "reason"),
    [
        ("fi", 32, "fi needs a head_dim of 64, 128 or 256, not 32"),
        ("fa", 96, "fa needs a head_dim that is a power of two up to 256, not 96"),
    ],
)
def test_head_dimensions_that_libraries_lack_are_refused(
    option: str, head_dim: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choice(option, shape=replace(SETTING.shape, head_dim=head_dim))


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("fi", "needs flashinfer .*: pip install flashinfer-python=="),
        ("trtllm", "needs flashinfer .*: pip install flashinfer-python=="),
        ("fa", "needs sgl_kernel .*: pip install sglang-kernel=="),
        ("cuda", "needs cuda .*: pip install cuda-bindings"),
    ],
)
def test_missing_packages_name_the_command(
    option: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, 9)
    for name in ("flashinfer", "sgl_kernel", "sgl_kernel.flash_attn", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=command):
        choice(option, device=torch.device("cuda"))


@pytest.mark.parametrize("command", [packages.FLASH_ATTN, packages.FLASH_INFER])
def test_commands_install_the_versions_of_the_extra(command: str) -> None:
    extra = re.findall(r'"(.+?)"', PYPROJECT.read_text(encoding="utf-8"))
    assert command.removeprefix("pip install ") in extra


def test_kernels_compiled_ahead_have_the_version_of_flash_infer() -> None:
    _, version = packages.FLASH_INFER.split("==")
    assert f"=={version} " in packages.FLASH_INFER_KERNELS


def test_flash_infer_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "exists", lambda path: False)
    expected = f"needs nvcc to compile its kernels, or {packages.FLASH_INFER_KERNELS}"
    assert flash_infer.why_no_kernels() == expected
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch()
    assert flash_infer.why_no_kernels() is None


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 8)
    with pytest.raises(ConfigError, match="fa needs a GPU of compute capability 9, this one has 8"):
        choice("fa", device=torch.device("cuda"))


def test_missing_triton_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="pip install triton"):
        choice("triton")


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
