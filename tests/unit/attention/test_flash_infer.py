"""What FlashInfer's kernels are told, read back as they read it.

A stand-in for the library attends in plain PyTorch, using what wrappers are planned with and the
buffers that a captured kernel would read. The kernels themselves run in ``tests/gpu``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import PagedAttention, ScheduledDecode
from minisgl_backend.attention.flash_infer import FlashInferDecode, FlashInferPrefill
from minisgl_backend.attention.own_kernels import TritonDecode
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.attention.sections import (
    ScheduledSectionDecode,
    SectionPrefill,
    within_section,
)
from tests.gpu.paged import Case, Decoding, Prompts, assert_tokens_close

CPU = torch.device("cpu")
CASES = [Case(1, 2, 64), Case(16, 4, 64), Case(16, 8, 64, window=50), Case(64, 2, 64, fp8=True)]
LIBRARY: Any = SimpleNamespace()


class Wrapper:
    """Either of FlashInfer's wrappers: lists of pages by offsets and the length of the last one."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any):
        assert layout == "NHD"
        self.options = options
        self.buffers: list[Any] = [
            options.get(f"paged_kv_{name}_buffer")
            for name in ("indptr", "indices", "last_page_len")
        ]

    def reset_workspace_buffer(self, workspace: Tensor, schedule: Tensor) -> None:
        self.schedule = schedule

    def plan(self, *tensors: Any, **options: Any) -> None:
        *lists, num_heads, num_kv_heads, head_dim, page_size = tensors
        self.queries = None if len(lists) == 3 else lists.pop(0)
        self.page_size, self.planned = page_size, options
        assert (num_heads % num_kv_heads, head_dim) == (0, 64)
        for index, tensor in enumerate(lists):
            assert tensor.dtype == torch.int32
            buffer = self.buffers[index]
            if buffer is None or not self.options.get("use_cuda_graph"):
                self.buffers[index] = tensor
            else:
                buffer[: len(tensor)].copy_(tensor)
        self.scheduled = self.lengths()

    def lengths(self) -> list[int]:
        offsets, _, last_lengths = self.buffers
        pages = offsets[1:] - offsets[:-1]
        found: list[int] = ((pages - 1) * self.page_size + last_lengths).tolist()
        return found

    def run(
        self,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        *,
        k_scale: float,
        v_scale: float,
        out: Tensor | None = None,
        enable_pdl: bool,
    ) -> Tensor:
        assert self.lengths() == self.scheduled
        offsets, indices, _ = self.buffers
        ends = self.queries if self.queries is not None else torch.arange(len(q) + 1)
        parts = []
        for row, length in enumerate(self.lengths()):
            first, last = int(ends[row]), int(ends[row + 1])
            taken = indices[offsets[row] :][: -(-length // self.page_size)]
            keys, values = (cache.float()[taken].flatten(0, 1)[:length] for cache in pages)
            query = torch.arange(length - (last - first), length)[:, None]
            seen = torch.arange(length) <= query
            left = self.planned["window_left"]
            if left >= 0:
                seen &= torch.arange(length) >= query - left
            attended = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1),
                (keys * k_scale).transpose(0, 1),
                (values * v_scale).transpose(0, 1),
                attn_mask=seen,
                scale=self.planned["sm_scale"],
                enable_gqa=True,
            )
            parts.append(attended.transpose(0, 1))
        found = torch.cat(parts)
        return found if out is None else out.copy_(found)


def fast_decode_plan(
    wrapper: Wrapper, offsets: Tensor, indices: Tensor, last_lengths: Tensor, *heads: int, **_: Any
) -> None:
    """Make the schedule from the host's numbers, and leave what the kernels read alone."""
    assert len(indices) <= len(wrapper.buffers[1])
    pages = offsets[1:] - offsets[:-1]
    wrapper.scheduled = ((pages - 1) * wrapper.page_size + last_lengths).tolist()


LIBRARY.BatchPrefillWithPagedKVCacheWrapper = Wrapper
LIBRARY.BatchDecodeWithPagedKVCacheWrapper = Wrapper
LIBRARY.decode = SimpleNamespace(fast_decode_plan=fast_decode_plan)


class Event:
    """A CUDA event without CUDA."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks(case: Case) -> None:
    prompts = Prompts.of(case.setting(torch.float32, CPU))
    setting = prompts.paged.setting
    backend = PagedAttention("fi", FlashInferPrefill(LIBRARY, setting), SdpaAttention(setting))
    assert_tokens_close(prompts.attend(backend), prompts.expected(), limit=1e-5)


def check_eagerly_and_as_captured(
    step: Decoding, backend: PagedAttention, decode: FlashInferDecode | ScheduledSectionDecode
) -> None:
    for seed in range(2):
        inputs = step.inputs(seed)
        step.take(inputs)
        eager = step.attend(backend, inputs.host_lengths)
        assert_tokens_close(eager, step.expected(inputs), limit=1e-5)
        decode.schedule_rows(inputs.host_lengths)
        assert_tokens_close(step.attend(backend, None), step.expected(inputs), limit=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_eagerly_and_as_captured(case: Case) -> None:
    step = Decoding(case.setting(torch.float32, CPU), 5)
    setting = step.paged.setting
    decode = FlashInferDecode(LIBRARY, setting)
    backend = PagedAttention("fi", SdpaAttention(setting), decode)
    check_eagerly_and_as_captured(step, backend, decode)


def test_sections_have_schedules_of_their_own_lengths() -> None:
    case = Case(16, 4, 64, window=64, sections=True)
    prompts = Prompts.of(case.setting(torch.float32, CPU))
    inner = within_section(prompts.paged.setting)
    decode = ScheduledSectionDecode(FlashInferDecode(LIBRARY, inner), 64, 16)
    prefill = SectionPrefill(FlashInferPrefill(LIBRARY, inner), 64, 16)
    backend = PagedAttention("fi", prefill, decode)
    assert_tokens_close(prompts.attend(backend), prompts.expected(), limit=1e-5)
    step = Decoding(prompts.paged.setting, 5)
    check_eagerly_and_as_captured(step, backend, decode)


def test_each_window_has_its_own_schedule() -> None:
    setting = Case(16, 2, 64).setting(torch.float32, CPU)
    setting = replace(setting, shape=replace(setting.shape, windows=(20, None, 20)))
    step = Decoding(setting, 5)
    captured: list[Wrapper] = []

    class Recorded(Wrapper):
        def __init__(self, workspace: Tensor, layout: str, **options: Any):
            super().__init__(workspace, layout, **options)
            if options.get("use_cuda_graph"):
                captured.append(self)

    library: Any = SimpleNamespace(
        **{**vars(LIBRARY), "BatchDecodeWithPagedKVCacheWrapper": Recorded}
    )
    decode = FlashInferDecode(library, setting)
    backend = PagedAttention("fi", SdpaAttention(setting), decode)
    inputs = step.inputs(seed=0)
    step.take(inputs)
    decode.schedule_rows(inputs.host_lengths)
    assert_tokens_close(step.attend(backend, None), step.expected(inputs), limit=1e-5)
    assert [wrapper.planned["window_left"] for wrapper in captured] == [19, -1]
    first, second = captured
    assert first.schedule.data_ptr() != second.schedule.data_ptr()


def test_only_scheduled_backends_are_told_of_lengths() -> None:
    setting = Case(16, 2, 64).setting(torch.float32, CPU)
    own = TritonDecode(setting.shape, max_batch_size=5, device=CPU)
    assert isinstance(FlashInferDecode(LIBRARY, setting), ScheduledDecode)
    assert not isinstance(own, ScheduledDecode)
