"""The cases of `minisgl bench kernels` for indexers: their store, scores, and choice of positions.

Few tokens decode, each in a row of its own; many are the last of a prompt. Must not know how calls
are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.indexer import (
    ChooseSlots,
    choose_slots,
    choose_slots_reference,
    index_scores,
    rope_store_index,
)
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_bench.kernel_cases import PAGE_SIZE, Case, copies, each, has_hopper_kernels, normal

_MOST_ROWS: Final = 256
"""More tokens are of one prompt."""


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """The sizes of an indexer."""

    num_heads: int
    key_dim: int
    rotary_dim: int
    top_k: int


INDEXERS: Final[Mapping[str, IndexerShape]] = MappingProxyType(
    {"deepseek-v3.2": IndexerShape(num_heads=64, key_dim=128, rotary_dim=64, top_k=2048)}
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Pages of rows, and how many positions of which row each token sees; the last one sees
    ``context``."""

    context: int
    page_table: Tensor
    rows: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, num_tokens: int, context: int) -> _Seen:
        num_rows = num_tokens if num_tokens <= _MOST_ROWS else 1
        pages = -(-context // PAGE_SIZE)
        table = torch.randperm(num_rows * pages, device="cuda").view(num_rows, pages).int()
        token = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
        if num_rows == num_tokens:
            return cls(context, table, token, torch.full_like(token, context))
        lengths = (token + context - num_tokens + 1).clamp(min=1)
        return cls(context, table, torch.zeros_like(token), lengths)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.page_table, self.rows, self.lengths

    def index_keys(self, key_dim: int, dtype: torch.dtype) -> Tensor:
        return normal(self.page_table.numel(), PAGE_SIZE, key_dim).to(dtype)


def indexer_cases(shape: IndexerShape, num_tokens: int, context: int) -> Iterator[Case]:
    """The three kernels; store and scores over bf16 and fp8 pages, the choice beside a top-k
    selection, which neither knows lengths nor finds slots."""
    seen = _Seen.of(num_tokens, context)
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        yield _store(shape, seen, name, dtype)
        yield _scores(shape, seen, name, dtype)
    yield _choice(shape, seen, "choose_slots, Triton", choose_slots)
    if has_hopper_kernels():
        from minisgl_backend.kernels.cuda.position_choice import PositionChoice

        yield _choice(shape, seen, "choose_slots", PositionChoice(seen.rows.device))


def _store(shape: IndexerShape, seen: _Seen, name: str, dtype: torch.dtype) -> Case:
    num_tokens = len(seen.rows)
    places = TokenPlaces(
        positions=seen.lengths - 1,
        slots=torch.arange(num_tokens, device="cuda"),
        cos_sin=torch.rand(seen.context, shape.rotary_dim, device="cuda"),
    )
    num_pages = -(-num_tokens // PAGE_SIZE)
    turned = 2 * shape.num_heads * shape.rotary_dim  # read and written
    num_bytes = num_tokens * (2 * turned + (2 + dtype.itemsize) * shape.key_dim)
    inputs = [
        (
            normal(num_tokens, shape.num_heads, shape.key_dim),
            normal(num_tokens, shape.key_dim),
            places,
            normal(num_pages, PAGE_SIZE, shape.key_dim).to(dtype),
        )
        for _ in copies(num_bytes)
    ]
    weights = {"norm_weight": normal(shape.key_dim), "norm_bias": normal(shape.key_dim)}
    return Case(
        f"rope_store_index, {name}, context {seen.context}",
        num_bytes,
        each(rope_store_index, inputs, **weights, eps=1e-6),
    )


def _scores(shape: IndexerShape, seen: _Seen, name: str, dtype: torch.dtype) -> Case:
    num_tokens = len(seen.rows)
    q = normal(num_tokens, shape.num_heads, shape.key_dim)
    weights = torch.randn(num_tokens, shape.num_heads, device="cuda")
    num_keys = len(seen.page_table) * seen.context
    num_bytes = num_keys * shape.key_dim * dtype.itemsize + 4 * num_tokens * seen.context
    inputs = [
        (q, weights, seen.index_keys(shape.key_dim, dtype), *seen.tables) for _ in copies(num_bytes)
    ]
    return Case(
        f"index_scores, {name}, context {seen.context}",
        num_bytes,
        each(index_scores, inputs, width=seen.context, top_k=min(shape.top_k, seen.context - 1)),
    )


def _choice(shape: IndexerShape, seen: _Seen, name: str, choose: ChooseSlots) -> Case:
    num_tokens, top_k = len(seen.rows), min(shape.top_k, seen.context)
    num_bytes = 4 * num_tokens * (seen.context + top_k)
    out = torch.zeros(num_tokens, top_k, dtype=torch.int32, device="cuda")
    scores = [torch.randn(num_tokens, seen.context, device="cuda") for _ in copies(num_bytes)]
    inputs = [(out, of_call, *seen.tables) for of_call in scores]
    return Case(
        f"{name}, context {seen.context}",
        num_bytes,
        each(choose, inputs, page_size=PAGE_SIZE),
        each(choose_slots_reference, inputs[:2], page_size=PAGE_SIZE),
        each(torch.topk, [(of_call,) for of_call in scores], k=top_k),
    )
