"""The tensors that hold keys and values, page by page, and the number of pages that fit.

Knows pages only by number, not who holds them. There is one page that the planner does not know
about, the *dummy page*: padding is stored there, and no request reads it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.paged_kv import KVScale, PagedKV

_COPIED_AT_ONCE: Final = 256
_MOST_SLOTS: Final = 2**31
"""Kernels index the positions of all pages with int32."""
_CACHE_LINE: Final = 64


class KVStorage:
    """Keys and values of all layers.

    ``pages`` has one tensor for each of the shape's ``kinds`` of layers, [num_layers, 2,
    num_pages + 1, page_size, num_kv_heads, head_dim]; the 2 are keys and values, and the last page
    is the dummy page. Latents, which are both, have 1 instead of the 2. Kinds with window pages
    have ``num_window_pages`` instead. All start as zero: attention may multiply positions that were
    never written by zero, so they must be finite. Index keys are in one more tensor, with 1 in
    place of the 2 and of the heads. ``layers`` has the pages of each layer.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KVScale] | None = None,
        num_window_pages: int | None = None,
    ):
        """The contents of float8 pages are multiplied by ``scales``, one per layer; None for 1."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.dummy_page = num_pages
        self.dummy_window_page = num_window_pages
        self._kinds = [kind for kind, _ in shape.kinds]
        scales = scales or [KVScale()] * shape.num_layers
        self.pages: list[Tensor] = []
        self.index_keys: Tensor | None = None
        by_layer: dict[int, PagedKV] = {}
        for kind, layers in shape.kinds:
            count = num_pages
            if kind.window_pages:
                assert num_window_pages is not None
                count = num_window_pages
            of_page = page_size, kind.num_kv_heads, kind.head_dim
            dims = (len(layers), kind.tensors_per_layer, count + 1, *of_page)
            pages = _zeros(dims, dtype, device)
            self.pages.append(pages)
            for layer, of_layer in zip(layers, pages, strict=True):
                by_layer[layer] = _layer(of_layer, scales[layer], kind.latent_dim)
        if (index := shape.index) is not None:
            dims = (len(index.layers), 1, num_pages + 1, page_size, 1, index.key_dim)
            self.index_keys = _zeros(dims, dtype, device)
            for layer, of_layer in zip(index.layers, self.index_keys, strict=True):
                by_layer[layer] = replace(by_layer[layer], index_keys=of_layer[0, :, :, 0])
        self.layers = [by_layer[layer] for layer in range(shape.num_layers)]

    def clear(self, pages: Tensor, *, window_pages: bool = False) -> None:
        """Zero these pages, or window pages, int64[n], in all layers that have them.

        Attention multiplies positions beyond a sequence's end by zero. A NaN left there by another
        sequence would survive that and spread.
        """
        for raw in self._raw(window_pages=window_pages):
            raw.index_fill_(2, pages, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values from slot to slot, both int64[num_positions], in all layers. There
        must be no window pages.

        No slot may be the target of two copies, or both a source and a target. Only a limited
        number of positions is copied at a time, which limits the memory that this takes.
        """
        for raw in self._raw(window_pages=False):
            slots = raw.flatten(2, 3)  # [num_layers, 2 or 1, num_slots, num_kv_heads, head_dim]
            for begin in range(0, len(sources), _COPIED_AT_ONCE):
                part = slice(begin, begin + _COPIED_AT_ONCE)
                slots.index_copy_(2, targets[part], slots.index_select(2, sources[part]))

    def page_bytes(self, *, window_pages: bool = False) -> int:
        """The bytes of a page, or of a window page, in all layers that have such pages."""
        return sum(_page_bytes(raw) for raw in self._raw(window_pages=window_pages))

    def read(self, pages: Tensor, out: Tensor, *, window_pages: bool = False) -> None:
        """Copy whole pages, or window pages, int64[n], to ``out``, uint8[n, page_bytes]."""
        for raw, part in self._parts(out, window_pages=window_pages):
            part.copy_(raw.index_select(2, pages).movedim(2, 0))

    def write(self, pages: Tensor, content: Tensor, *, window_pages: bool = False) -> None:
        """The reverse of ``read``. No page may occur twice."""
        for raw, part in self._parts(content, window_pages=window_pages):
            raw.index_copy_(2, pages, part.movedim(0, 2))

    def _parts(self, content: Tensor, *, window_pages: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of such pages, and its part of the ``content`` of n pages, uint8[n,
        page_bytes]: [n, num_layers, 2 or 1, page_size, num_kv_heads, head_dim]."""
        begin = 0
        for raw in self._raw(window_pages=window_pages):
            end = begin + _page_bytes(raw)
            part = content[:, begin:end].view(raw.dtype)
            yield raw, part.view(len(content), *raw.shape[:2], *raw.shape[3:])
            begin = end

    def _raw(self, *, window_pages: bool) -> Iterator[Tensor]:
        """``pages`` of these kinds, and index keys, which no window pages have; float8 as bytes,
        since it can be neither filled nor indexed."""
        found = [
            pages
            for kind, pages in zip(self._kinds, self.pages, strict=True)
            if kind.window_pages == window_pages
        ]
        if self.index_keys is not None and not window_pages:
            found.append(self.index_keys)
        for pages in found:
            yield pages.view(torch.uint8) if pages.itemsize == 1 else pages


def _page_bytes(raw: Tensor) -> int:
    """The bytes of a page in [num_layers, 2 or 1, num_pages + 1, ...]."""
    return raw.nbytes // raw.shape[2]


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        # PyTorch cannot fill float8
        filled = torch.uint8 if dtype.itemsize == 1 else dtype
        return torch.zeros(dims, dtype=filled, device=device).view(dtype)
    # NumPy's zeros take no memory until they are touched, since the system maps them page by page.
    # But they may be misaligned with cache lines, and vectors across two lines take longer to read.
    num_bytes = math.prod(dims) * dtype.itemsize
    raw = np.zeros(num_bytes + _CACHE_LINE, np.uint8)
    begin = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(dims)


def _layer(pages: Tensor, scale: KVScale, latent_dim: int | None) -> PagedKV:
    """``pages`` [2, num_pages + 1, page_size, num_kv_heads, head_dim] of one layer; of latents, 1
    instead of the 2."""
    keys, values = pages[0], pages[-1]
    if latent_dim is not None:
        values, scale = values[..., :latent_dim], replace(scale, v=scale.k)
    k_scale, v_scale = None, None
    if pages.dtype == torch.float8_e4m3fn:
        k_scale, v_scale = torch.tensor([[scale.k], [scale.v]], device=pages.device)
    return PagedKV(keys=keys, values=values, k_scale=k_scale, v_scale=v_scale, scale=scale)


def bytes_per_page(
    shape: AttentionShape, page_size: int, dtype: torch.dtype, *, window_pages: bool = False
) -> int:
    """The bytes of one page, or of one window page, in all layers together, on one rank."""
    numbers = shape.numbers_per_position(window_pages=window_pages)
    return numbers * page_size * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """How many window pages there are for a number of other pages.

    Half as many, but no more than all running rows can hold at once, plus the chunks of two steps,
    and no fewer than a single row needs. So with requests much longer than the window, the other
    pages run out first; with shorter requests, window pages do. If ``in_all_layers``, the other
    pages are only numbers that take no memory, and the running rows are no limit.
    """

    window: int
    page_size: int
    max_rows: int
    max_prefill_tokens: int
    page_bytes: int
    in_all_layers: bool = False

    @property
    def span(self) -> int:
        """See ``WindowPages``."""
        return -(-(self.window - 1) // self.page_size)

    def num_pages(self, num_others: int) -> int:
        """The number of window pages beside ``num_others`` pages."""
        of_row = self.span + 2
        of_chunks = 2 * (-(-self.max_prefill_tokens // self.page_size) + 1)
        most = num_others if self.in_all_layers else self.max_rows * of_row + of_chunks
        return min(num_others, most, max(of_row, num_others // 2))


def choose_num_pages(
    *,
    page_bytes: int,
    page_size: int,
    free_bytes: int,
    reserved_bytes: int,
    memory_ratio: float,
    cap_bytes: int | None,
    max_rows: int,
    windows: WindowRule | None = None,
) -> int:
    """The number of pages that fit in the budget, beside the dummy page and with the window pages
    that ``windows`` adds. A page takes ``page_bytes`` in the layers without window pages.

    The budget is ``memory_ratio`` of ``free_bytes``, less the ``reserved_bytes`` that rows take,
    and at most ``cap_bytes``: what rows take does not reduce what is left for steps. Raises
    ``ConfigError``, with the numbers, if not even one page fits.
    """
    budget = max(int(free_bytes * memory_ratio) - reserved_bytes, 0)
    if cap_bytes is not None:
        budget = min(budget, cap_bytes)

    def num_bytes(num_pages: int) -> int:
        """The bytes of this number of pages, plus the dummy pages."""
        taken = (num_pages + 1) * page_bytes
        if windows is not None:
            taken += (windows.num_pages(num_pages) + 1) * windows.page_bytes
        return taken

    if page_bytes:
        most = budget // page_bytes
    else:
        assert windows is not None
        most = 2 * budget // windows.page_bytes  # there are at least half as many window pages
    most = min(most, _MOST_SLOTS // page_size) - 1
    num_pages = bisect_right(range(1, most + 1), budget, key=num_bytes)
    if num_pages < 1:
        raise ConfigError(
            f"no memory for KV pages: one of {page_size} positions takes {num_bytes(0):,} bytes, "
            f"but only {budget:,} bytes are left for them ({memory_ratio:g} of {free_bytes:,} "
            f"free, less the {reserved_bytes:,} of {max_rows} running requests)"
        )
    return num_pages
