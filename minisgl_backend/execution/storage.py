"""The tensors that hold keys and values, page by page, and how many pages there can be.

Knows pages by number only, not who holds them. There is one page more than the planner knows of,
the *dummy* page: padding points to it, and nothing real is ever stored there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape, KVScale
from minisgl_backend.attention.paged import PagedKV
from minisgl_backend.errors import ConfigError


class KVStorage:
    """Keys and values of all layers (``KVPages``).

    ``pages`` is [num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim]; the 2 are keys
    and values, and the last page is the dummy page. ``scales`` has an entry for each layer: float8
    numbers in its pages are multiplied by it.
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
    ):
        """If ``scales`` is None, all scales are 1."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.dummy_page = num_pages
        self.pages = torch.empty(
            (shape.num_layers, 2, num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim),
            dtype=dtype,
            device=device,
        )
        self.pages[:, :, self.dummy_page] = 0
        self.scales = tuple(scales or [KVScale()] * shape.num_layers)
        self._layers = [(pages[0], pages[1]) for pages in self.pages]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_pages + 1, page_size, num_kv_heads, head_dim]."""
        return self._layers[layer]

    def clear(self, pages: Tensor) -> None:
        """Zero these pages, int64[n], in all layers.

        Padded attention multiplies what lies behind a sequence's end by zero; a NaN left there by
        another sequence would survive that and spread. So the CPU's executor clears a page before
        its first position is written, and a GPU's those of sequences that failed.
        """
        # a float8 tensor itself cannot be filled, but its bytes can
        filled = self.pages.view(torch.uint8) if self.pages.itemsize == 1 else self.pages
        filled.index_fill_(2, pages, 0)


def zeroed_layers(storage: KVStorage) -> list[PagedKV]:
    """The pages of each layer, after setting them to zero.

    So the dummy page, and whatever nobody has written, is finite. The kernels of this package
    ignore what stands behind a row's end, whatever it is; those of libraries need not do so.
    """
    pages, layers = storage.pages, []
    pages.view(torch.uint8).zero_()
    for layer, scale in enumerate(storage.scales):
        keys, values = storage.layer(layer)
        k_scale, v_scale = None, None
        if pages.dtype == torch.float8_e4m3fn:
            k_scale, v_scale = torch.tensor([[scale.k], [scale.v]], device=pages.device)
        layers.append(
            PagedKV(keys=keys, values=values, k_scale=k_scale, v_scale=v_scale, scale=scale)
        )
    return layers


def bytes_per_page(shape: AttentionShape, page_size: int, dtype: torch.dtype) -> int:
    """How many bytes one page takes in all layers together, on one rank."""
    per_position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return per_position * page_size * dtype.itemsize


def choose_num_pages(
    *,
    page_bytes: int,
    page_size: int,
    free_bytes: int,
    reserved_bytes: int,
    memory_ratio: float,
    cap_bytes: int | None,
    max_rows: int,
    max_sequence_length: int,
) -> int:
    """How many pages to make: as many as fit the budget, but no more than all rows can ever fill.

    From ``free_bytes`` the ``reserved_bytes`` that rows take are subtracted; the budget is
    ``memory_ratio`` of the rest, and at most ``cap_bytes``. Raises ``ConfigError``, with the
    numbers, if not even one page fits.
    """
    budget = int(max(free_bytes - reserved_bytes, 0) * memory_ratio)
    if cap_bytes is not None:
        budget = min(budget, cap_bytes)
    pages_per_row = -(-max_sequence_length // page_size)
    num_pages = min(budget // page_bytes, max_rows * pages_per_row)
    if num_pages < 1:
        raise ConfigError(
            f"no memory for KV pages: one of {page_size} positions takes {page_bytes:,} bytes, but "
            f"only {budget:,} bytes are left for them ({memory_ratio:g} of {free_bytes:,} free, of "
            f"which {max_rows} running requests take {reserved_bytes:,})"
        )
    return num_pages
