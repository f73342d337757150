"""The kernels of the indexer against their twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import indexer
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.indexer import ChooseSlots
from minisgl_backend.kernels.rope_store import TokenPlaces
from tests.gpu.compare import assert_close
from tests.gpu.test_kernels_attention import paged_cache
from tests.gpu.test_kernels_latents import narrow_dtype

FP8 = torch.float8_e4m3fn
ON_GPU = pytest.mark.skipif(is_interpreted(), reason="takes long in the interpreter")

SIZES = [
    pytest.param(64, 128, id="deepseek-v3.2"),
    pytest.param(32, 128, id="glm-5"),
    pytest.param(24, 24, id="uneven"),
]
"""Index queries of a token, size of keys."""


@dataclass(frozen=True)
class Seen:
    """What tokens see: positions of rows in shuffled pages, of which some hold no row and are NaN
    in all layers of ``index_keys`` [num_pages, page_size, key_dim]."""

    index_keys: Tensor
    page_table: Tensor
    rows: Tensor
    lengths: Tensor

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        lengths: Sequence[int],
        *,
        key_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Seen:
        """Tokens of ``rows`` that see ``lengths`` positions."""
        longest = [
            max((length for r, length in zip(rows, lengths, strict=True) if r == row), default=1)
            for row in range(max(rows) + 1)
        ]
        kv, table = paged_cache(
            longest,
            page_size=page_size,
            num_kv_heads=1,
            head_dim=key_dim,
            dtype=dtype,
            device=device,
        )
        on_device = (
            torch.tensor(list(of_tokens), dtype=torch.int32, device=device)
            for of_tokens in (rows, lengths)
        )
        return cls(kv.keys[:, :, 0], table, *on_device)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.page_table, self.rows, self.lengths

    @property
    def width(self) -> int:
        """A little more than the most positions that a token sees."""
        return int(self.lengths.max()) + 2

    def is_seen(self, width: int) -> Tensor:
        """[num_tokens, width]"""
        return torch.arange(width, device=self.lengths.device) < self.lengths[:, None]


def queries_of(
    num_tokens: int, num_heads: int, key_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Index queries, and their weights, of which some are negative."""
    q = torch.randn(num_tokens, num_heads, key_dim, device=device).to(dtype)
    return q, (torch.randn(num_tokens, num_heads, device=device) / num_heads).to(dtype)


all_scores = partial(indexer.index_scores, top_k=0)
"""Also of tokens that see few positions."""


def assert_scores(actual: Tensor, expected: Tensor, seen: Seen) -> None:
    """The scores of positions that are seen."""
    is_seen = seen.is_seen(actual.shape[1])
    assert_close(actual[is_seen], expected[is_seen], tolerance=1e-5)


@pytest.mark.parametrize("rotates_last", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 24])
@pytest.mark.parametrize(("num_heads", "key_dim"), SIZES)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["plain", "fp8"])
def test_store(
    device: torch.device,
    dtype: torch.dtype,
    rotates_last: bool,
    interleaved: bool,
    rotary_dim: int,
    num_heads: int,
    key_dim: int,
    kv_dtype: torch.dtype | None,
) -> None:
    """Keys lie in wider rows, pages are those of one layer of several, and one token has no slot;
    one number is too large for float8."""
    num_tokens = 5
    q = torch.randn(num_tokens, num_heads, key_dim, device=device).to(dtype)
    k = torch.randn(num_tokens, 8 + key_dim, device=device).to(dtype)[:, 8:]
    weight, bias = torch.randn(2, key_dim, device=device).to(dtype)
    bias[-1] = 1000.0
    places = TokenPlaces(
        positions=torch.tensor([4, 0, 9, 2, 7], dtype=torch.int32, device=device),
        slots=torch.tensor([0, 13, -1, 6, 9], dtype=torch.int32, device=device),
        cos_sin=torch.randn(10, rotary_dim, device=device),
        interleaved=interleaved,
    )
    found = []
    for store in (indexer.rope_store_index, indexer.rope_store_index_reference):
        index_keys = torch.zeros(4, 2, 4, key_dim, device=device).to(kv_dtype or dtype)
        queries = q.clone()
        store(
            queries,
            k,
            places,
            index_keys[:, 1],
            norm_weight=weight,
            norm_bias=bias,
            eps=1e-6,
            rotates_last=rotates_last,
        )
        found.append((queries, index_keys.float()))
    (queries, keys), (expected_queries, expected_keys) = found
    assert_close(queries, expected_queries, tolerance=8e-3)
    # a value on the edge may round to the next fp8 step; the interpreter does not round to nearest
    of_fp8 = 0.2 if is_interpreted() else 0.02
    assert_close(keys, expected_keys, tolerance=8e-3 if kv_dtype is None else of_fp8)
    assert (keys[:, 0] == 0).all()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "key_dim"), SIZES)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_scores(
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    num_heads: int,
    key_dim: int,
    kv_dtype: torch.dtype | None,
    num_tokens: int,
) -> None:
    """Tokens of one row follow each other, as those of a chunk, and others do not."""
    dtype = narrow_dtype(dtype)
    seen = Seen.of(
        [2, 2, 2, 0, 1, 2, 0][:num_tokens],
        [298, 299, 300, 1, 64, 301, 65][:num_tokens],
        key_dim=key_dim,
        page_size=page_size,
        dtype=kv_dtype or dtype,
        device=device,
    )
    q, weights = queries_of(num_tokens, num_heads, key_dim, dtype, device)
    scores, expected = (
        compute(q, weights, seen.index_keys, *seen.tables, width=seen.width)
        for compute in (all_scores, indexer.index_scores_reference)
    )
    assert_scores(scores, expected, seen)


def test_scores_of_full_precision(device: torch.device) -> None:
    seen = Seen.of([0, 1], [50, 33], key_dim=128, page_size=16, dtype=torch.float32, device=device)
    q, weights = queries_of(2, 64, 128, torch.float32, device)
    scores, expected = (
        compute(q, weights, seen.index_keys, *seen.tables, width=seen.width)
        for compute in (all_scores, indexer.index_scores_reference)
    )
    assert_scores(scores, expected, seen)


@ON_GPU
@pytest.mark.parametrize(("num_heads", "key_dim"), SIZES)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_many_tokens_share_keys(
    device: torch.device,
    num_heads: int,
    key_dim: int,
    kv_dtype: torch.dtype,
    page_size: int,
) -> None:
    """Decoding rows, and behind them chunks that end within a program."""
    rows = [0, 1, 2, 3, 4, *[5] * 601, *[6] * 302]
    lengths = [4000, 1, 2, 3000, 65, *range(1, 602), *range(3001, 3303)]
    seen = Seen.of(
        rows, lengths, key_dim=key_dim, page_size=page_size, dtype=kv_dtype, device=device
    )
    q, weights = queries_of(len(rows), num_heads, key_dim, torch.bfloat16, device)
    scores, expected = (
        compute(q, weights, seen.index_keys, *seen.tables, width=seen.width)
        for compute in (all_scores, indexer.index_scores_reference)
    )
    assert_scores(scores, expected, seen)


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=ON_GPU)])
def test_tokens_that_see_few_positions_need_no_scores(device: torch.device, pdl: bool) -> None:
    """They choose all."""
    lengths, top_k = [3, 12, 40, 13, 7], 12
    seen = Seen.of(
        [0, 1, 1, 2, 2], lengths, key_dim=128, page_size=4, dtype=torch.float32, device=device
    )
    q, weights = queries_of(5, 64, 128, torch.float32, device)
    width = seen.width
    scores = indexer.index_scores(
        q, weights, seen.index_keys, *seen.tables, width=width, top_k=top_k, pdl=pdl
    )
    scores[seen.lengths <= top_k] = torch.nan
    found, expected = (torch.full((5, top_k), -1, device=device).int() for _ in range(2))
    indexer.choose_slots(found, scores, *seen.tables, page_size=4, pdl=pdl)
    exact = indexer.index_scores_reference(q, weights, seen.index_keys, *seen.tables, width=width)
    indexer.choose_slots_reference(expected, exact, *seen.tables, page_size=4)
    assert torch.equal(found, expected)
    assert (found >= 0).sum(dim=1).tolist() == [3, 12, 12, 12, 7]


@pytest.fixture(params=["triton", "cuda"])
def choose_slots(request: pytest.FixtureRequest, device: torch.device) -> ChooseSlots:
    return indexer.choose_slots if request.param == "triton" else cuda_choice(device)


def cuda_choice(device: torch.device) -> ChooseSlots:
    if is_interpreted() or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernel is for Hopper")
    from minisgl_backend.kernels.cuda.position_choice import PositionChoice

    return PositionChoice(device)


@pytest.fixture(params=["triton", 1, 2, 8])
def divided_choice(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> ChooseSlots:
    """Also by kernels in which as many thread blocks share a token's positions."""
    if request.param == "triton":
        return indexer.choose_slots
    choice = cuda_choice(device)
    blocks = "minisgl_backend.kernels.cuda.position_choice.blocks_of"
    monkeypatch.setattr(blocks, lambda *_: request.param)
    return choice


def chosen(
    choose_slots: ChooseSlots, scores: Tensor, seen: Seen, top_k: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """The slots that are chosen, and those that the twin chooses; -7 where none is written."""
    found = []
    for choose in (choose_slots, indexer.choose_slots_reference):
        out = torch.full((len(scores), top_k), -7, dtype=torch.int32, device=scores.device)
        choose(out, scores, *seen.tables, page_size=page_size)
        found.append(out)
    return found[0], found[1]


def scores_of(kind: str, num_tokens: int, width: int, device: torch.device) -> Tensor:
    """Scores of which few or many are equal, or which differ only in their last bits."""
    scores = torch.randn(num_tokens, width, device=device)
    if kind == "ties":
        return scores.round()  # with zeros of both signs
    if kind == "equal":
        return torch.full_like(scores, -1.5)
    if kind == "close":
        return 1 + scores * 1e-5
    if kind == "infinite":
        return torch.where(scores > 0, torch.inf, -torch.inf)
    return scores


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "close", "infinite"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_choice(
    device: torch.device, divided_choice: ChooseSlots, kind: str, page_size: int
) -> None:
    """What a token does not see is NaN; rows of scores are strided."""
    top_k = 10
    lengths = [1, top_k - 1, top_k, top_k + 1, 1024, 1025, 3000]
    seen = Seen.of(
        [0, 1, 2, 3, 4, 4, 5],
        lengths,
        key_dim=1,
        page_size=page_size,
        dtype=torch.float32,
        device=device,
    )
    scores = scores_of(kind, len(lengths), 3010, device)
    scores = scores.masked_fill(~seen.is_seen(3010), torch.nan)[:, :3001]
    slots, expected = chosen(divided_choice, scores, seen, top_k, page_size)
    assert torch.equal(slots, expected)
    assert (slots[0, 1:] == -7).all()


def test_choice_among_nans(device: torch.device, divided_choice: ChooseSlots) -> None:
    """Positions of the token are chosen, each at most once, and nothing else is written."""
    top_k = 10
    seen = Seen.of([0, 0], [1500, 1500], key_dim=1, page_size=1, dtype=torch.float32, device=device)
    scores = torch.full((2, 1500), torch.nan, device=device)
    scores[1] = torch.where(torch.rand(1500, device=device) < 0.5, -scores[1], 1.0)
    memory = torch.full((4, top_k), -7, dtype=torch.int32, device=device)
    divided_choice(memory[1:3], scores, *seen.tables, page_size=1)
    assert (memory[[0, 3]] == -7).all()
    for slots in memory[1:3]:
        assert len(slots.unique()) == top_k
        assert torch.isin(slots, seen.page_table[0, :1500]).all()


@ON_GPU
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "close"])
@pytest.mark.parametrize("num_tokens", [1, 7, 100, 1000])
def test_choice_of_many(
    device: torch.device, choose_slots: ChooseSlots, kind: str, num_tokens: int
) -> None:
    lengths = [[40_000, 2048, 2049, 1, 33_333, 2047, 5000][i % 7] for i in range(num_tokens)]
    rows = [i % 7 for i in range(num_tokens)]
    seen = Seen.of(rows, lengths, key_dim=1, page_size=64, dtype=torch.float32, device=device)
    scores = scores_of(kind, num_tokens, 40_000, device)
    slots, expected = chosen(choose_slots, scores, seen, 2048, 64)
    assert torch.equal(slots, expected)


@ON_GPU
@pytest.mark.parametrize("pdl", [False, True])
def test_choice_of_more_than_shared_memory_holds(
    device: torch.device, choose_slots: ChooseSlots, pdl: bool
) -> None:
    lengths = [600_000, 450_001, 3000]
    table = torch.randperm(10_000, device=device).int().expand(3, -1)
    rows, seen = (torch.tensor(of, device=device).int() for of in ([0, 1, 2], lengths))
    scores = torch.randn(3, 600_000, device=device)
    found, expected = (torch.zeros(3, 2048, dtype=torch.int32, device=device) for _ in range(2))
    choose_slots(found, scores, table, rows, seen, page_size=64, pdl=pdl)
    indexer.choose_slots_reference(expected, scores, table, rows, seen, page_size=64)
    assert torch.equal(found, expected)


@ON_GPU
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_a_captured_choice_follows_lengths(
    device: torch.device, choose_slots: ChooseSlots, num_tokens: int
) -> None:
    """Lengths change between replays, as does the row of each token."""
    width, top_k, page_size = 9000, 2048, 64
    seen = Seen.of(
        [i % 3 for i in range(num_tokens)],
        [width] * num_tokens,
        key_dim=128,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=device,
    )
    q, weights = queries_of(num_tokens, 64, 128, torch.bfloat16, device)
    out = torch.zeros(num_tokens, top_k, dtype=torch.int32, device=device)

    def step() -> Tensor:
        scores = all_scores(q, weights, seen.index_keys, *seen.tables, width=width)
        choose_slots(out, scores, *seen.tables, page_size=page_size)
        return scores

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = step()
    for length in (1, 2048, 2049, 64, 9000, 5000):
        seen.lengths.copy_(torch.randint(length // 2 + 1, length + 1, (num_tokens,)))
        seen.rows.copy_(torch.randint(len(seen.page_table), (num_tokens,)))
        graph.replay()
        expected = indexer.index_scores_reference(
            q, weights, seen.index_keys, *seen.tables, width=width
        )
        assert_scores(scores, expected, seen)
        chosen_again = out.clone()
        indexer.choose_slots_reference(chosen_again, scores, *seen.tables, page_size=page_size)
        assert torch.equal(out, chosen_again)
