"""Every attention backend of a GPU against PyTorch's scaled dot product, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.attention.paged import Chunks, DecodeRows, PagedAttention, PagedKV
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.dispatch import is_interpreted
from tests.gpu.compare import assert_close

MAX_ROWS = 40
MAX_POSITIONS = 320


@dataclass(frozen=True)
class Paged:
    """Rows of random length over shuffled pages, and the same keys and values in order."""

    kv: PagedKV
    page_table: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_paged(
    lengths: Sequence[int], shape: AttentionShape, page_size: int, dtype: torch.dtype, device: str
) -> Paged:
    per_row = -(-MAX_POSITIONS // page_size)
    num_pages = per_row * len(lengths)
    table = torch.randperm(num_pages, device=device).view(len(lengths), per_row)
    # what nobody has written is finite, whatever else it is
    dims = (num_pages, page_size, shape.num_kv_heads, shape.head_dim)
    k_cache = torch.full(dims, 7.0, dtype=dtype, device=device)
    v_cache = torch.full(dims, 7.0, dtype=dtype, device=device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for row, length in enumerate(lengths):
        for cache, found in ((k_cache, keys), (v_cache, values)):
            x = torch.randn(length, shape.num_kv_heads, shape.head_dim, device=device).to(dtype)
            position = torch.arange(length, device=device)
            cache[table[row, position // page_size], position % page_size] = x
            found.append(x)
    return Paged(PagedKV(keys=k_cache, values=v_cache), table.int(), keys, values)


def expected_of(q: Tensor, paged: Paged, row: int, end: int, shape: AttentionShape) -> Tensor:
    """Attention of the last ``len(q)`` of ``end`` positions of the row, [len(q), heads, dim]."""
    position = torch.arange(end, device=q.device)
    query = position[end - len(q) :, None]
    seen = position <= query
    window = shape.windows[0]
    if window is not None:
        seen &= position > query - window
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1),
        paged.keys[row][:end].float().transpose(0, 1),
        paged.values[row][:end].float().transpose(0, 1),
        attn_mask=seen,
        scale=shape.scale,
        enable_gqa=True,
    )
    return out.transpose(0, 1).to(q.dtype)


@pytest.fixture(params=["triton", "fa", "fa,triton"])
def make_backend(
    request: pytest.FixtureRequest, device: torch.device, dtype: torch.dtype
) -> Callable[[AttentionShape, int], PagedAttention]:
    def make(shape: AttentionShape, page_size: int) -> PagedAttention:
        try:
            return choose_attention(
                request.param,
                shape,
                page_size=page_size,
                kv_dtype=dtype,
                max_batch_size=MAX_ROWS,
                device=device,
            )
        except ConfigError as error:
            pytest.skip(str(error))

    return make


def shape_of(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        windows=(window,),
    )


SHAPES = [(8, 8), (8, 4), (8, 2), (8, 1), (10, 2)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_prefill_of_ragged_chunks_and_extensions(
    make_backend: Callable[[AttentionShape, int], PagedAttention],
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    shape = shape_of(*heads, head_dim, window)
    backend = make_backend(shape, page_size)
    ends, lengths = [130, 17, 300, 64, 1, 220], [130, 9, 41, 1, 1, 128]
    rows = [3, 0, 5, 1, 2, 4]
    row_lengths = [0] * len(rows)
    for row, end in zip(rows, ends, strict=True):
        row_lengths[row] = end
    paged = make_paged(row_lengths, shape, page_size, dtype, str(device))
    packed = torch.randn(sum(lengths), heads[0] + 2 * heads[1], head_dim, device=device).to(dtype)
    q = packed[:, : heads[0]]
    offsets = np.concatenate([[0], np.cumsum(lengths)])

    def on_device(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    chunks = Chunks(
        rows=on_device(rows),
        offsets=on_device(offsets.tolist()),
        ends=on_device(ends),
        page_table=paged.page_table,
        max_length=max(lengths),
        max_end=max(ends),
    )
    out = backend.prefill.prefill(q, paged.kv, 0, backend.prefill.plan_chunks(chunks))
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        tokens = slice(offsets[index], offsets[index + 1])
        expected = expected_of(q[tokens], paged, row, end, shape)
        assert_close(out[tokens], expected, tolerance=1e-2)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_decode_eager_and_replayed(
    make_backend: Callable[[AttentionShape, int], PagedAttention],
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
) -> None:
    shape = shape_of(*heads, head_dim, window)
    backend = make_backend(shape, page_size)
    capacity = [300, 1, 129, 64, 16, 250, 33]
    paged = make_paged(capacity, shape, page_size, dtype, str(device))
    rows = torch.tensor([6, 0, 3, 2, 5], dtype=torch.int32, device=device)
    lengths = torch.tensor([33, 257, 64, 1, 250], dtype=torch.int32, device=device)
    q = torch.randn(len(rows), *(heads[0], head_dim), device=device).to(dtype)

    def step() -> Tensor:
        decode_rows = DecodeRows(rows=rows, lengths=lengths, page_table=paged.page_table)
        return backend.decode.decode(q, paged.kv, 0, backend.decode.plan_rows(decode_rows))

    def check(out: Tensor) -> None:
        for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            expected = expected_of(q[index : index + 1], paged, row, length, shape)
            assert_close(out[index : index + 1], expected, tolerance=1e-2)

    check(step())
    if is_interpreted():
        return  # no graphs on a CPU
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
    # the graph reads rows, lengths and queries at its replay
    rows.copy_(torch.tensor([1, 2, 0, 4, 6], dtype=torch.int32))
    lengths.copy_(torch.tensor([1, 129, 300, 9, 20], dtype=torch.int32))
    q.copy_(torch.randn(q.shape))
    graph.replay()
    torch.cuda.synchronize()
    check(out)
