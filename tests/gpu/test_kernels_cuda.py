"""The kernels in CUDA C++ against their twins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.decode_attention import decode_attention_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.paged_kv import PagedKV
from tests.gpu.compare import assert_close

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.decode_attention import Tuning

FP8 = torch.float8_e4m3fn

needs_gpu = pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS = [
    Heads(16, 8, 128),
    Heads(40, 8, 128),
    Heads(32, 4, 128),
    Heads(16, 2, 128),
    Heads(5, 1, 128),
    Heads(32, 8, 64),
    Heads(9, 3, 64),
    Heads(14, 2, 64),
    Heads(8, 8, 64),
    Heads(16, 2, 256),
    Heads(24, 4, 256),
    Heads(4, 1, 256),
]


class Decoding:
    """Rows of random lengths over shuffled pages; positions that no row sees are NaN."""

    def __init__(
        self,
        heads: Heads,
        lengths: list[int],
        *,
        device: torch.device,
        kv_dtype: torch.dtype = torch.bfloat16,
        page_size: int = 16,
        window: int | None = None,
        cut: Tuning | None = None,
    ):
        from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel, DecodeShape

        torch.manual_seed(len(lengths))
        batch_size, longest = len(lengths), max(lengths)
        per_row = -(-longest // page_size)
        num_pages = batch_size * per_row
        shape = (num_pages + 1, page_size, heads.num_kv_heads, heads.head_dim)
        self.window = window
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        pages = torch.randperm(num_pages, device=device).to(torch.int32)
        self.table = pages.view(batch_size, per_row)
        self.rows = torch.randperm(batch_size, device=device).to(torch.int32)
        self.q = torch.randn(
            (batch_size, heads.num_heads, heads.head_dim), dtype=torch.bfloat16, device=device
        )
        keys, values = (
            torch.randn(shape, dtype=torch.bfloat16, device=device).to(kv_dtype) for _ in "kv"
        )
        is_fp8 = kv_dtype == FP8
        self.kv = PagedKV(
            keys=keys,
            values=values,
            k_scale=torch.full((1,), 0.5, device=device) if is_fp8 else None,
            v_scale=torch.full((1,), 2.0, device=device) if is_fp8 else None,
        )
        self.kernel = DecodeAttentionKernel(
            DecodeShape(
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                page_size=page_size,
                dtype=torch.bfloat16,
                kv_dtype=kv_dtype,
            ),
            max_batch_size=max(batch_size, 256),
            device=device,
            cut=cut,
        )

    def forget_unseen(self) -> None:
        """Positions after the ends become NaN, as freed pages may be."""
        page_size = self.kv.keys.shape[1]
        for row, length in zip(self.rows.tolist(), self.lengths.tolist(), strict=True):
            page, offset = divmod(length, page_size)
            for cache in (self.kv.keys, self.kv.values):
                if offset:
                    cache[self.table[row, page], offset:] = float("nan")
                for freed in self.table[row, page + bool(offset) :].tolist():
                    cache[freed] = float("nan")

    def plan(self) -> Tensor:
        return self.kernel.plan(
            self.table, self.lengths, rows=self.rows, window=self.window, pdl=False
        )

    def attend(self, runs: Tensor | None = None, *, pdl: bool = False) -> Tensor:
        if runs is None:
            runs = self.plan()
        out = torch.empty_like(self.q)
        self.kernel(
            self.q,
            self.kv,
            self.table,
            self.lengths,
            runs,
            rows=self.rows,
            scale=self.q.shape[-1] ** -0.5,
            window=self.window,
            out=out,
            pdl=pdl,
        )
        return out

    def expected(self) -> Tensor:
        return decode_attention_reference(
            self.q,
            self.kv,
            self.table,
            self.lengths,
            rows=self.rows,
            scale=self.q.shape[-1] ** -0.5,
            window=self.window,
        )


def ragged(batch_size: int, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(batch_size)
    lengths = torch.randint(1, longest + 1, (batch_size,), generator=generator)
    return [int(length) for length in lengths]


@needs_gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([17], None),
        (ragged(3, 600), None),
        (ragged(37, 900), None),
        (ragged(5, 1300), 100),
        (ragged(300, 180), 33),
        (ragged(700, 300), None),
    ],
    ids=["one", "few", "ragged", "window", "many, short window", "many"],
)
def test_attention_equals_its_twin(
    device: torch.device,
    heads: Heads,
    lengths: list[int],
    window: int | None,
    kv_dtype: torch.dtype,
) -> None:
    case = Decoding(heads, lengths, device=device, kv_dtype=kv_dtype, window=window)
    expected = case.expected()
    for _ in range(2):  # the second one finds what the first one left in the workspace
        assert_close(case.attend(), expected, tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 256])
def test_page_sizes(device: torch.device, page_size: int) -> None:
    case = Decoding(HEADS[0], ragged(20, 700), device=device, page_size=page_size)
    assert_close(case.attend(), case.expected(), tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stages", [2, 3])
def test_ways_to_cut_the_work(
    device: torch.device, parts: int, stages: int, kv_dtype: torch.dtype
) -> None:
    from minisgl_backend.kernels.cuda.decode_attention import Tuning

    cut = Tuning(parts=parts, stages=stages, per_processor=1, leaving=1, least=1)
    for window in (None, 90):
        case = Decoding(
            HEADS[0], ragged(40, 700), device=device, kv_dtype=kv_dtype, window=window, cut=cut
        )
        assert_close(case.attend(), case.expected(), tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[5], HEADS[9]], ids=str)
@pytest.mark.parametrize("batch_size", [1, 9, 200])
def test_launches_right_after_each_other_give_the_same_bits(
    device: torch.device, heads: Heads, batch_size: int
) -> None:
    case = Decoding(heads, ragged(batch_size, 2000), device=device)
    runs, first = case.plan(), case.attend()
    assert_close(first, case.expected(), tolerance=1e-2)
    others = [case.attend(runs, pdl=True) for _ in range(50)]
    assert all(torch.equal(first, other) for other in others)


@needs_gpu
@pytest.mark.parametrize("leaving", [0, 3])
def test_runs_without_a_tile(device: torch.device, leaving: int) -> None:
    from minisgl_backend.kernels.cuda.decode_attention import Tuning

    cut = Tuning(parts=1, stages=2, per_processor=1, leaving=leaving, least=1)
    case = Decoding(HEADS[0], [1] * 60 + [300] + [1] * 60, device=device, cut=cut)
    for _ in range(2):
        assert_close(case.attend(), case.expected(), tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[3], HEADS[5], HEADS[10]], ids=str)
def test_no_value_keeps_thread_blocks_waiting(
    device: torch.device, heads: Heads, kv_dtype: torch.dtype
) -> None:
    case = Decoding(heads, [30_000, 40], device=device, kv_dtype=kv_dtype)
    sound = case.attend()
    patterns = [0x7F, 0xFF] if kv_dtype == FP8 else [0x7FFF, -1, 0x7F80, -0x80]  # NaN, infinity
    words = torch.uint8 if kv_dtype == FP8 else torch.int16
    for cache in (case.kv.keys, case.kv.values):
        for pattern in patterns:
            kept = cache.clone()
            cache.view(words)[case.table[case.rows[0], ::300]] = pattern
            assert not case.attend()[0].isfinite().all()
            cache.copy_(kept)
            assert torch.equal(case.attend(), sound)


@needs_gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[2], HEADS[4], HEADS[5]], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[300] * 32, [700] * 3, [20] * 15 + [6_000] + [20] * 15, ragged(16, 4_000), [1, 5_000, 1, 900]],
    ids=["many", "several runs each", "a long row", "runs across rows", "one position"],
)
def test_warps_share_the_positions_of_few_rows(
    device: torch.device, heads: Heads, lengths: list[int], kv_dtype: torch.dtype
) -> None:
    for window in (None, 500):
        case = Decoding(heads, lengths, device=device, kv_dtype=kv_dtype, window=window)
        expected, runs = case.expected(), case.plan()
        first = case.attend(runs)
        assert_close(first, expected, tolerance=1e-2)
        others = [case.attend(runs, pdl=True) for _ in range(20)]
        assert all(torch.equal(first, other) for other in others)


@needs_gpu
def test_one_long_row_is_cut_among_all_multiprocessors(device: torch.device) -> None:
    case = Decoding(HEADS[0], [30_001], device=device)
    assert_close(case.attend(), case.expected(), tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_positions_that_no_query_sees_do_not_matter(
    device: torch.device, kv_dtype: torch.dtype
) -> None:
    case = Decoding(HEADS[0], ragged(24, 400), device=device, kv_dtype=kv_dtype)
    expected = case.expected()
    case.forget_unseen()
    assert_close(case.attend(), expected, tolerance=1e-2)


@needs_gpu
@pytest.mark.parametrize("batch_size", [8, 64])
def test_a_captured_call_follows_the_lengths(device: torch.device, batch_size: int) -> None:
    case = Decoding(HEADS[0], [800] * batch_size, device=device)
    case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.attend()
    for longest in (800, 17, 300):
        lengths = torch.tensor(ragged(batch_size, longest), dtype=torch.int32)
        case.lengths.copy_(lengths)
        graph.replay()
        assert_close(out, case.expected(), tolerance=1e-2)
