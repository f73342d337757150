"""What every attention backend must compute, against a plain softmax over unpaged keys and values.

To add a backend: put a function that makes it into ``BACKENDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    AttentionShape,
    Chunks,
    DecodeRows,
    LayerAttention,
    PagedAttention,
)
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.device.base import HostArray
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.plan import Groups
from minisgl_backend.request import IntArray

CPU: Final = torch.device("cpu")
MAX_SEQUENCES: Final = 128
MAX_POSITIONS: Final = 2048

BACKENDS: Final[Mapping[str, Callable[[AttentionSetting], PagedAttention]]] = MappingProxyType(
    {"sdpa": partial(choose_attention, "sdpa")}
)


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@dataclass
class Sequence:
    """Keys and values of a whole sequence; the first ``computed`` are in the pages."""

    keys: Tensor  # [length, num_kv_heads, head_dim]
    values: Tensor  # of latents only the first part of the keys
    pages: list[int]
    computed: int = 0


@dataclass
class Shared:
    """Sequences that share the pages from ``begin`` to ``end``."""

    indices: Seq[int]
    begin: int
    end: int


class World:
    """Sequences, their pages in random order, and a backend over them."""

    def __init__(
        self,
        backend: str,
        *,
        page_size: int = 16,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        windows: tuple[int | None, ...] = (None,),
        dtype: torch.dtype = torch.float32,
        sinks: bool = False,
        cap: float = 0.0,
        sections: bool = False,
        latent_dim: int | None = None,
    ):
        self.shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            cap=cap,
            windows=windows,
            sections=sections,
            sinks=sinks,
            latent_dim=latent_dim,
        )
        self.page_size, self.dtype = page_size, dtype
        # in some heads sinks take hardly any weight, in others nearly all
        self.sinks = torch.linspace(-3, 9, num_heads).to(dtype) if sinks else None
        self.setting = AttentionSetting(
            shape=self.shape,
            page_size=page_size,
            max_sequence_length=MAX_POSITIONS,
            dtype=dtype,
            kv_dtype=dtype,
            max_batch_size=MAX_SEQUENCES,
            max_captured_batch_size=0,
            device=CPU,
        )
        self.backend = BACKENDS[backend](self.setting)
        self.num_pages = 8192 // page_size
        self.kv = KVStorage(
            self.shape, num_pages=self.num_pages, page_size=page_size, dtype=dtype, device=CPU
        )
        for pages in self.kv.pages:
            pages[:, :, : self.num_pages] = 1e4  # loud if it is read by mistake
        self.random = torch.Generator().manual_seed(0)
        self.free = torch.randperm(self.num_pages, generator=self.random).tolist()
        self.sequences: list[Sequence] = []

    def add(self, length: int) -> int:
        heads = (length, self.shape.num_kv_heads, self.shape.head_dim)
        pages = [self.free.pop() for _ in range(-(-length // self.page_size))]
        keys, values = self.draw(heads), self.draw(heads)
        if self.shape.latent_dim is not None:
            values = keys[..., : self.shape.latent_dim]
        self.sequences.append(Sequence(keys, values, pages))
        return len(self.sequences) - 1

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64).to(self.dtype)

    def share(self, indices: Seq[int], begin: int, end: int) -> Shared:
        """Give sequences the pages of the first one from ``begin`` to ``end``."""
        first, span = (
            self.sequences[indices[0]],
            slice(begin * self.page_size, end * self.page_size),
        )
        for index in indices[1:]:
            guest = self.sequences[index]
            guest.keys[span], guest.values[span] = first.keys[span], first.values[span]
            guest.pages[begin:end] = first.pages[begin:end]
        return Shared(indices, begin, end)

    def step(self, runs: list[tuple[int, int]], groups: Seq[Shared] = ()) -> None:
        """Compute the next ``length`` positions of each (sequence, length), and check all of them.

        All runs are prompt chunks; then those of one position are also decoding rows, which read
        the pages of ``groups`` together.
        """
        rows = np.array([index for index, _ in runs])
        lengths = np.array([length for _, length in runs])
        starts = np.array([self.sequences[row].computed for row in rows])
        shape, ends = self.shape, starts + lengths
        queries = [self.draw((n, shape.num_heads, shape.head_dim)) for n in lengths]
        q = torch.cat(queries)
        self._store(rows, starts, ends)
        attend_chunks = self.backend.prefill.plan_chunks(self._chunks(rows, lengths, ends))
        single = np.flatnonzero(lengths == 1)
        attend_rows = None
        if len(single):
            decodes = self._decodes(rows[single], ends[single], groups)
            attend_rows = self.backend.decode.plan_rows(decodes)
        for layer in range(shape.num_layers):
            expected = [
                self._expected(run, self.sequences[row], slice(start, end), shape.windows[layer])
                for run, row, start, end in zip(queries, rows, starts, ends, strict=True)
            ]
            self._check(attend_chunks, q, layer, expected)
            if attend_rows is not None:
                of_rows = torch.cat([queries[index] for index in single])
                self._check(attend_rows, of_rows, layer, [expected[index] for index in single])
        for row, end in zip(rows, ends, strict=True):
            self.sequences[row].computed = int(end)

    def _store(self, rows: HostArray, starts: HostArray, ends: HostArray) -> None:
        """Put the keys and values of these positions into their pages, in all layers."""
        for row, start, end in zip(rows, starts, ends, strict=True):
            sequence = self.sequences[row]
            position = torch.arange(start, end)
            pages = torch.tensor(sequence.pages)[position // self.page_size]
            for kv in self.kv.layers:
                kv.keys[pages, position % self.page_size] = sequence.keys[start:end]
                kv.values[pages, position % self.page_size] = sequence.values[start:end]

    def _chunks(self, rows: HostArray, lengths: HostArray, ends: HostArray) -> Chunks:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return Chunks(
            rows=_int32(rows),
            offsets=_int32(offsets),
            ends=_int32(ends),
            page_table=self._page_table(),
            max_length=int(lengths.max()),
            max_end=int(ends.max()),
            host_offsets=offsets,
            host_ends=ends.astype(np.int32),
        )

    def _decodes(self, rows: HostArray, ends: HostArray, groups: Seq[Shared]) -> DecodeRows:
        index = {row: index for index, row in enumerate(rows.tolist())}
        columns = (
            [len(group.indices) for group in groups],
            [group.begin for group in groups],
            [group.end for group in groups],
            [index[member] for group in groups for member in group.indices],
        )
        return DecodeRows(
            groups=Groups(*(np.array(column, np.int32) for column in columns)),
            rows=_int32(rows),
            lengths=_int32(ends),
            page_table=self._page_table(),
            host_lengths=ends.astype(np.int32),
        )

    def _page_table(self) -> Tensor:
        """int32 [num_sequences, max_pages]; unused entries point to the dummy page."""
        table = torch.full((len(self.sequences), self.setting.max_pages), self.kv.dummy_page)
        for row, sequence in enumerate(self.sequences):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        return table.int()

    def _check(self, attend: LayerAttention, q: Tensor, layer: int, expected: list[Tensor]) -> None:
        out = q.new_full((*q.shape[:2], self.shape.latent_dim or self.shape.head_dim), torch.nan)
        attend(out, q, replace(self.kv.layers[layer], sinks=self.sinks), layer)
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.03}[self.dtype]
        torch.testing.assert_close(
            out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance
        )

    def _expected(self, q: Tensor, sequence: Sequence, span: slice, window: int | None) -> Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        keys = sequence.keys[: span.stop].double().repeat_interleave(group, dim=1)
        values = sequence.values[: span.stop].double().repeat_interleave(group, dim=1)
        products = torch.einsum("qhd,khd->hqk", q.double(), keys) * self.shape.scale
        if cap := self.shape.cap:
            products = cap * (products / cap).tanh()
        query = torch.arange(span.start, span.stop).unsqueeze(1)
        key = torch.arange(span.stop).unsqueeze(0)
        hidden = key > query
        if window is not None and self.shape.sections:
            hidden |= key < query // window * window
        elif window is not None:
            hidden |= key <= query - window
        products = products.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:  # one more position, whose value is 0
            of_sinks = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
            products = torch.cat([products, of_sinks], dim=2)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        return torch.einsum("hqk,khd->qhd", products.softmax(dim=-1), values)


def _int32(values: HostArray | IntArray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


@pytest.mark.parametrize("windows", [(48, 48), (48, None, 48)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sections(backend: str, page_size: int, windows: tuple[int | None, ...]) -> None:
    """Chunks and rows lie at both ends of sections."""
    world = World(backend, page_size=page_size, windows=windows, sections=True)
    first, second, third = world.add(200), world.add(98), world.add(10)
    world.step([(first, 48)])
    world.step([(first, 1), (second, 20), (third, 9)])
    world.step([(first, 47), (second, 28), (third, 1)])
    world.step([(second, 47), (first, 30)])
    for _ in range(3):
        world.step([(first, 1), (second, 1)])
    world.step([(first, 15)])
    world.step([(first, 1)])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_in_chunks_then_decode(backend: str, page_size: int) -> None:
    world = World(backend, page_size=page_size)
    first, second = world.add(100), world.add(37)
    world.step([(first, 32)])
    world.step([(first, 40), (second, 3)])
    world.step([(second, 30), (first, 1)])
    for _ in range(3):
        world.step([(first, 1), (second, 1)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(backend: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    world = World(backend, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    long, short = world.add(50), world.add(20)
    world.step([(long, 33), (short, 17)])
    world.step([(long, 1), (short, 1)])


def test_decode_of_ragged_lengths(backend: str) -> None:
    world = World(backend)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 255, 3, 300, 5, 48, 90]
    added = [world.add(length + 1) for length in lengths]
    world.step([(index, length) for index, length in zip(added, lengths, strict=True)])
    world.step([(index, 1) for index in added])


def test_very_different_lengths_are_not_padded_into_one(backend: str) -> None:
    world = World(backend, num_heads=2, head_dim=64)
    long = world.add(2000)
    short = [world.add(4) for _ in range(100)]
    world.step([(long, 1998), *((index, 3) for index in short)])
    world.step([(short[0], 1), (long, 1), *((index, 1) for index in short[1:])])


@pytest.mark.parametrize("window", [1, 7, 16, 40])
def test_sliding_window(backend: str, window: int) -> None:
    world = World(backend, windows=(window, None, 2 * window))
    long, short = world.add(120), world.add(30)
    world.step([(long, 50), (short, 10)])
    world.step([(long, 60), (short, 10)])
    world.step([(long, 1), (short, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    world = World(backend, dtype=dtype)
    first, second = world.add(60), world.add(9)
    world.step([(first, 40), (second, 8)])
    world.step([(first, 1), (second, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_latents(backend: str, page_size: int, dtype: torch.dtype) -> None:
    """Some rows read their first pages together."""
    world = World(
        backend,
        page_size=page_size,
        num_heads=8,
        num_kv_heads=1,
        head_dim=576,
        latent_dim=512,
        dtype=dtype,
    )
    rows = [world.add(length) for length in (700, 620, 600, 40)]
    world.step([(row, 30) for row in rows])
    world.step([(rows[0], 100), (rows[3], 1), (rows[1], 2)])
    shared = world.share(rows[:3], 0, 560 // page_size)
    world.step([(rows[0], 560), (rows[1], 560), (rows[2], 560)])
    world.step([(row, 1) for row in rows], [shared])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (8, 1)])
def test_sinks(backend: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> None:
    world = World(
        backend,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        windows=(None, 20),
        dtype=dtype,
        sinks=True,
    )
    long, short = world.add(120), world.add(30)
    world.step([(long, 50), (short, 10)])
    world.step([(long, 60), (short, 1)])
    world.step([(long, 1), (short, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_bounded_scores(backend: str, dtype: torch.dtype, sinks: bool) -> None:
    world = World(backend, windows=(None, 20), dtype=dtype, cap=0.7, sinks=sinks)
    long, short = world.add(120), world.add(30)
    world.step([(long, 50), (short, 10)])
    world.step([(long, 60), (short, 1)])
    world.step([(long, 1), (short, 1)])


def test_a_long_prompt_at_once(backend: str) -> None:
    world = World(backend, num_heads=4, num_kv_heads=1, head_dim=64)
    index = world.add(2000)
    world.step([(index, 500)])
    world.step([(index, 1500)])


PATTERNS: Final[Mapping[str, Seq[Shared]]] = MappingProxyType(
    {
        "none": [],
        "all": [Shared(range(12), 0, 5)],
        "pairs": [Shared((2 * i, 2 * i + 1), 0, 1 + i) for i in range(6)],
        "some": [Shared((7, 1, 4), 0, 3), Shared((0, 11), 0, 6)],
        "two levels": [Shared(range(10), 0, 2), Shared((0, 5, 9), 2, 5), Shared((3, 2), 2, 3)],
        "four levels": [Shared(range(12 - 3 * n), n, n + 1) for n in range(4)],
    }
)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


@pytest.fixture(params=["always", "where it pays"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set how small a group may be to be read together."""
    if request.param == "always":
        monkeypatch.setattr("minisgl_backend.attention.sdpa._LEAST_SAVED", 0)
    else:  # of "two levels" the first group pays and the others do not
        monkeypatch.setattr("minisgl_backend.attention.sdpa._LEAST_SAVED", 2**16)


def attend_together(world: World, pattern: str) -> None:
    """12 sequences of random lengths, whose first pages are shared in that pattern; they decode
    twice, once with the groups named and once without."""
    longest = 7 * world.page_size
    added = [world.add(longest + 2) for _ in range(12)]
    groups = [world.share(each.indices, each.begin, each.end) for each in PATTERNS[pattern]]
    lengths = np.random.default_rng(0).integers(6 * world.page_size, longest, len(added))
    lengths[0] = 6 * world.page_size  # it has nothing of its own yet except the new token
    world.step([(index, int(length)) for index, length in zip(added, lengths, strict=True)])
    for named in (groups, []):
        world.step([(index, 1) for index in added], named)


@every_pattern
@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_shared_pages(backend: str, pattern: str, page_size: int) -> None:
    attend_together(World(backend, page_size=page_size), pattern)


@every_pattern
@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("window", [1, 40, 90])
def test_shared_pages_behind_a_window(backend: str, pattern: str, window: int) -> None:
    attend_together(World(backend, windows=(window, None)), pattern)


@every_pattern
@pytest.mark.usefixtures("together")
def test_shared_pages_beside_sinks(backend: str, pattern: str) -> None:
    attend_together(World(backend, windows=(None, 40), sinks=True), pattern)


@every_pattern
@pytest.mark.usefixtures("together")
def test_shared_pages_and_bounded_scores(backend: str, pattern: str) -> None:
    attend_together(World(backend, windows=(None, 40), cap=0.7), pattern)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_pages_of_any_heads(
    backend: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    world = World(
        backend, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
    attend_together(world, "two levels")
