"""Attention over shared pages: its partial results, and decode attention that merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.decode_attention import decode_attention_reference
from minisgl_backend.kernels.dispatch import is_interpreted, num_processors
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.shared_attention import (
    FASTEST,
    MOST_SLOTS,
    SharedAttention,
    SharedCut,
    SharedShape,
)
from tests.gpu.compare import assert_close
from tests.gpu.test_kernels_cuda import FP8, HEADS, Heads, needs_gpu

LN2 = float(np.log(2))
PAGES = 24
"""The width of the page table: what a row may have at most."""


@dataclass(frozen=True)
class Group:
    """Rows of the batch that share the pages from ``begin`` to ``end`` of their tables."""

    members: Sequence[int]
    begin: int
    end: int


PATTERNS = {
    "all rows": [Group(range(20), 0, 9)],
    "pairs": [Group((2 * i, 2 * i + 1), 0, 1 + i) for i in range(10)],
    "some rows": [Group((3, 1, 8), 0, 4), Group((0, 19), 0, 23)],
    "two levels": [Group(range(18), 0, 5), Group((0, 5, 9), 5, 14), Group((2, 3), 5, 6)],
    "four levels": [Group(range(12 - 2 * n), 3 * n, 3 * n + 3) for n in range(4)],
}


class SharedDecoding:
    """Rows of random lengths over shuffled pages, some of which they share."""

    def __init__(
        self,
        heads: Heads,
        groups: Sequence[Group],
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = 20,
        page_size: int = 16,
        window: int | None = None,
        fp8: bool = False,
        cut: SharedCut = FASTEST,
    ):
        torch.manual_seed(batch_size)
        kv_dtype = FP8 if fp8 else dtype
        self.window, self.page_size = window, page_size
        num_pages = batch_size * PAGES
        self.table = torch.randperm(num_pages, device=device).int().view(batch_size, PAGES)
        self.rows = torch.randperm(batch_size, device=device).int()
        for group in groups:
            rows = self.rows[list(group.members)].long()
            self.table[rows, group.begin : group.end] = self.table[
                rows[0], group.begin : group.end
            ].clone()
        owned = np.zeros(batch_size, np.int64)
        for group in groups:
            owned[list(group.members)] = group.end * page_size
        lengths = np.random.default_rng(0).integers(owned + 1, PAGES * page_size, endpoint=True)
        lengths[0] = owned[0] + 1
        self.lengths = torch.from_numpy(lengths.astype(np.int32)).to(device)
        self.q = torch.randn((batch_size, heads.num_heads, heads.head_dim), device=device).to(dtype)
        dims = (num_pages, page_size, heads.num_kv_heads, heads.head_dim)
        keys, values = (torch.randn(dims, device=device).to(kv_dtype) for _ in "kv")
        self.kv = PagedKV(
            keys=keys,
            values=values,
            k_scale=torch.full((1,), 0.5, device=device) if fp8 else None,
            v_scale=torch.full((1,), 2.0, device=device) if fp8 else None,
        )
        self.heads = heads
        self.shared = SharedAttention(
            SharedShape(
                max_batch=batch_size,
                page_size=page_size,
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                processors=num_processors(device),
                is_fp8=fp8,
                cut=cut,
            ),
            device,
        )
        self.regroup(groups)

    def regroup(self, groups: Sequence[Group]) -> None:
        """Let the kernels read these groups together, whose pages are shared already."""
        words = self.shared.table.content(
            np.array([len(group.members) for group in groups], np.int32),
            np.array([group.begin for group in groups], np.int32),
            np.array([group.end for group in groups], np.int32),
            np.array([member for group in groups for member in group.members], np.int32),
        )
        self.shared.fill(words)
        self.shared.values.fill_(float("nan"))
        self.shared.sums.fill_(float("nan"))

    def attend_shared(self) -> None:
        self.shared(
            self.q,
            self.kv,
            self.table,
            self.lengths,
            rows=self.rows,
            scale=self.q.shape[-1] ** -0.5,
            window=self.window,
            pdl=False,
        )

    def merged(self) -> tuple[Tensor, Tensor]:
        """The merged partial results of each row: the weighted sum of values [batch, heads, dim],
        and the logarithm of the weights' sum [batch, heads], -inf for rows without any."""
        starts = self.shared.starts.view(-1, 2)
        slots = self.shared.slots.view(-1, MOST_SLOTS)
        outputs, logarithms = [], []
        for row, count in enumerate(starts[:, 1].tolist()):
            taken = slots[row, :count].long()
            best, total = self.shared.sums[taken].unbind(-1)  # [count, heads]
            logarithm = torch.logsumexp((best + total.log2()) * LN2, 0) / LN2
            weights = (best - logarithm).exp2()
            outputs.append((weights[..., None] * self.shared.values[taken]).sum(0))
            logarithms.append(logarithm)
        return torch.stack(outputs), torch.stack(logarithms)

    def expected(self, lengths: Tensor) -> Tensor:
        return decode_attention_reference(
            self.q,
            self.kv,
            self.table,
            lengths,
            rows=self.rows,
            scale=self.q.shape[-1] ** -0.5,
            window=self.window,
        )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[4], HEADS[6]], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_partial_results_of_shared_positions(
    pattern: str, heads: Heads, page_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    if is_interpreted() and heads != HEADS[4]:
        pytest.skip("slow")
    cut = SharedCut(tile=16, block=32, num_warps=4, stages=2, per_processor=50)
    case = SharedDecoding(
        heads, PATTERNS[pattern], device=device, dtype=dtype, page_size=page_size, cut=cut
    )
    case.attend_shared()
    out, logarithms = case.merged()
    starts = case.shared.starts.view(-1, 2)[:, 0]
    grouped = starts > 0
    assert torch.equal(logarithms.isfinite().all(1), grouped)
    assert_close(out[grouped].to(case.q.dtype), case.expected(starts.clamp_min(1))[grouped])


@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_grouped_decode_attention_equals_its_twin(
    pattern: str, heads: Heads, window: int | None, fp8: bool, device: torch.device
) -> None:
    case = SharedDecoding(
        heads, PATTERNS[pattern], device=device, dtype=torch.bfloat16, window=window, fp8=fp8
    )
    attend = _grouped(case)
    expected = case.expected(case.lengths)
    for pdl in (False, True):
        assert_close(attend(pdl), expected, tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("window", [None, 70])
def test_sinks_count_once(window: int | None, device: torch.device) -> None:
    case = SharedDecoding(
        HEADS[0], PATTERNS["two levels"], device=device, dtype=torch.bfloat16, window=window
    )
    sinks = torch.full((HEADS[0].num_heads,), 4.0, dtype=torch.bfloat16, device=device)
    case.kv = replace(case.kv, sinks=sinks)
    expected = case.expected(case.lengths)
    assert_close(_grouped(case)(False), expected, tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_page_sizes(page_size: int, device: torch.device) -> None:
    for fp8 in (False, True):
        case = SharedDecoding(
            HEADS[0],
            PATTERNS["two levels"],
            device=device,
            dtype=torch.bfloat16,
            page_size=page_size,
            fp8=fp8,
        )
        assert_close(_grouped(case)(False), case.expected(case.lengths), tolerance=1e-2)


@needs_gpu
def test_a_captured_call_follows_the_groups(device: torch.device) -> None:
    case = SharedDecoding(
        HEADS[0], [Group(range(60), 0, 20)], device=device, dtype=torch.bfloat16, batch_size=64
    )
    attend = _grouped(case)
    attend(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = attend(True)
    expected = case.expected(case.lengths)
    for groups in (
        [Group(range(60), 0, 20)],
        [Group((5, 50), 0, 3)],
        [],
        [Group(range(30), 0, 19), Group(range(30, 60), 0, 1), Group(range(50, 60), 1, 20)],
    ):
        case.regroup(groups)
        graph.replay()
        assert_close(out, expected, tolerance=1e-2)


def _grouped(case: SharedDecoding):  # type: ignore[no-untyped-def]
    from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel, DecodeShape

    heads = case.heads
    kernel = DecodeAttentionKernel(
        DecodeShape(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            page_size=case.page_size,
            dtype=torch.bfloat16,
            kv_dtype=case.kv.keys.dtype,
        ),
        max_batch_size=256,
        device=case.q.device,
        shared=case.shared,
    )

    def attend(pdl: bool) -> Tensor:
        runs = kernel.plan(
            case.table, case.lengths, rows=case.rows, window=case.window, grouped=True, pdl=pdl
        )
        out = torch.empty_like(case.q)
        kernel(
            case.q,
            case.kv,
            case.table,
            case.lengths,
            runs,
            rows=case.rows,
            scale=case.q.shape[-1] ** -0.5,
            window=case.window,
            out=out,
            grouped=True,
            pdl=pdl,
        )
        return out

    return attend
